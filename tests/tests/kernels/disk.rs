//! A stock Linux and its disk, under `slipgate run` and under QEMU: what `slipgate-bench --only
//! disk-debian` measures, for a short time, with each block checked.

use slipgate_testbed::{
    rig::{DiskCase, DiskRig, DiskRigPlan, DiskVmm, DiskWork, Kernel, Machine, forbidden_calls},
    skipped, slipgate,
};

const BLOCKS: u64 = 1024;

#[test]
fn debian_6_1_reads_and_writes_its_disk_at_random() {
    works_on("6.1");
}

#[test]
fn debian_6_12_reads_and_writes_its_disk_at_random() {
    works_on("6.12");
}

fn works_on(series: &str) {
    let _turn = slipgate_testbed::turns::alone("QEMU without KVM keeps each CPU busy");
    let found = Machine::is_possible();
    let found = found.and_then(|()| Ok((Kernel::find("6.1")?, Kernel::find(series)?)));
    let (outer, guest) = match found {
        Ok(found) => found,
        Err(why) => return skipped!("{why}"),
    };
    let cases = [
        DiskCase::reads(1),
        DiskCase::reads(32),
        DiskCase::writes(32, 64),
    ];
    let plan = DiskRigPlan {
        work: DiskWork {
            cases: cases.to_vec(),
            blocks: BLOCKS,
            warm_up_ms: 50,
            measured_ms: 500,
            rest_ms: 50,
        },
        vmms: vec![DiskVmm::Slipgate, DiskVmm::QemuIoUring],
    };
    let rig = DiskRig {
        init: env!("CARGO_BIN_EXE_slipgate-rig-init").as_ref(),
        slipgate: &slipgate::binary().unwrap(),
        outer: &outer,
        guest: &guest,
    };
    let (results, ended) = rig.run(&plan).unwrap();
    println!("{}\n{:.1} s", ended.report, ended.took.as_secs_f64());
    let calls = forbidden_calls(&ended.console);
    assert!(
        ended.well,
        "{}; the report:\n{}\nthe console:\n{}\n{calls:?}",
        ended.how, ended.report, ended.console
    );
    let vmms: Vec<_> = results.iter().map(|result| result.vmm).collect();
    assert_eq!(vmms, plan.vmms);
    for result in results {
        let measured = result.outcome.as_ref().unwrap();
        let done: Vec<_> = measured.iter().map(|one| one.figures.what).collect();
        assert_eq!(done, cases);
        for one in measured {
            let figures = &one.figures;
            assert!(
                figures.requests >= u64::from(figures.what.at_once),
                "{one:?}"
            );
            assert!(one.device_cpu_us > 0.0, "{one:?}");
            assert!(one.vmm_cpu_us > one.device_cpu_us, "{one:?}");
            // Both go by io_uring here.
            assert!(one.rings > 0, "{one:?}");
            let each = u64::from(figures.what.flush_each);
            let flushes = figures.requests.checked_div(each).unwrap_or(0);
            assert_eq!(figures.flushes, flushes, "{one:?}");
        }
        assert!(result.written_blocks > 0, "{result:?}");
        assert!(result.written_blocks <= BLOCKS, "{result:?}");
    }
}
