use super::*;
use crate::rig::{DiskCase, DiskFigures};

fn result(vmm: DiskVmm) -> DiskRigResult {
    let figures = DiskFigures {
        case: 0,
        what: DiskCase::reads(32),
        requests: 1000,
        flushes: 0,
        took_us: 1e6,
        p50_us: 900.5,
        p99_us: 2000.0,
    };
    DiskRigResult {
        vmm,
        outcome: Ok(vec![DiskMeasured {
            figures,
            device_cpu_us: 5e5,
            vmm_cpu_us: 9e5,
            clock: "kvm-clock".to_owned(),
            rings: 1,
        }]),
        written_blocks: 0,
    }
}

#[test]
fn results_are_read_from_a_report_and_other_lines_are_not() {
    let failed = DiskRigResult {
        outcome: Err("no /dev/kvm".to_owned()),
        ..result(DiskVmm::QemuThreads)
    };
    let ours = result(DiskVmm::Slipgate);
    let whole = ours.to_string();
    let cut = &whole[..whole.len() / 2];
    let report = format!("ok other\n{ours}\nwords\n{cut}\n{failed}\n");
    assert_eq!(DiskRigResult::read(&report), [ours, failed]);
}

#[test]
fn the_plan_is_read_as_it_was_written() {
    let plan = DiskRigPlan {
        work: DiskWork {
            cases: vec![DiskCase::reads(1), DiskCase::writes(32, 64)],
            blocks: 7,
            warm_up_ms: 1,
            measured_ms: 2,
            rest_ms: 3,
        },
        vmms: DiskVmm::ALL.to_vec(),
    };
    let read = DiskRigPlan::of_text(&plan.to_text()).unwrap();
    assert_eq!((read.work, read.vmms), (plan.work, plan.vmms));
    assert!(DiskRigPlan::of_text("slipgate").is_err());
}
