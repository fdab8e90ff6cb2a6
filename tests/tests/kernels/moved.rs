//! A stock Linux under `slipgate run` that moves between hosts: QEMU emulates one CPU after the other,
//! with SVM; Debian's 6.1 runs on it and has KVM, and under that the guest is saved or goes on. All
//! machines have one disk, with the snapshot and the guest's own disk.
use std::{
    fs::File,
    path::Path,
    process::{Command, Stdio},
};

use slipgate_testbed::{
    rig::{
        Client, Hardware, Initramfs, Kernel, MOVED_PLAN, Machine, Move, MoveStep, NESTED_CPUS,
        NESTED_MODULES, NESTED_OUTER, SAVED, forbidden_calls, moved_plan, on_path, saved_initramfs,
    },
    skipped, slipgate,
};

use super::TIMEOUT;

/// What is left off is what TCG does not emulate. `npt`: see [`slipgate_testbed::rig::NESTED_CPU_MODEL`].
const EPYC: &str = "EPYC,+svm,-npt,-rdseed,-sha-ni,-fxsr-opt,-misalignsse,-3dnowprefetch,-osvw,\
                    -topoext,-nrip-save,-xsavec";
/// A newer one, with protection keys in its extended state.
const EPYC_MILAN: &str = "EPYC-Milan,+svm,-npt,-pcid,-invpcid,-rdseed,-sha-ni,-rdpid,-fsrm,\
                          -fxsr-opt,-misalignsse,-3dnowprefetch,-osvw,-topoext,-perfctr-core,\
                          -clzero,-xsaveerptr,-wbnoinvd,-ibpb,-ibrs,-amd-stibp,-amd-ssbd,\
                          -nrip-save,-xsavec,-xsaves";
/// An old one, without AVX and without XSAVE.
const OPTERON: &str = "Opteron_G3,+svm,-npt,-misalignsse";
/// The same with what x86-64-v2 needs: no such CPU was made. The Opterons that have it do not boot here.
const OPTERON_V2: &str = "Opteron_G3,+svm,-npt,-misalignsse,level=13,+ssse3,+sse4.1,+sse4.2";
/// Room for the snapshots; what is not used takes no space.
const STORE_BYTES: u64 = 2 << 30;

#[test]
fn debian_6_1_moves_between_hosts_of_one_template() {
    let _turn = slipgate_testbed::turns::alone("QEMU without KVM keeps each CPU busy");
    let found = Machine::is_possible().and_then(|()| Kernel::find("6.1"));
    let found = found.and_then(|kernel| Ok((kernel, on_path("mkfs.ext4")?)));
    let (kernel, mkfs) = match found {
        Ok(found) => found,
        Err(why) => return skipped!("{why}"),
    };
    let scratch = tempfile::tempdir().unwrap();
    let store = scratch.path().join("store");
    make_store(&mkfs, &store);
    let hosts = Hosts {
        inner: saved_initramfs(&Client::new(), &kernel).unwrap(),
        kernel,
        store: &store,
    };
    let of = |template: &str, step| Move {
        template: format!("x86-64-{template}"),
        step,
    };
    let refuse = |lacks: &[&str]| MoveStep::Refuse(lacks.iter().map(|&it| it.into()).collect());
    hosts.follow(EPYC, &[of("v2", MoveStep::Save), of("v3", MoveStep::Save)]);
    let sse = ["ssse3", "sse4_1", "sse4_2"].as_slice();
    let avx = ["xsave", "avx", "fma", "avx2", "bmi2"].as_slice();
    hosts.follow(
        OPTERON,
        &[
            of("v2", refuse(sse)),
            of("v3", refuse(&[sse, avx].concat())),
        ],
    );
    let steps = [of("v3", refuse(avx)), of("v2", MoveStep::Restore)];
    hosts.follow(OPTERON_V2, &steps);
    hosts.follow(EPYC_MILAN, &[of("v3", MoveStep::Restore)]);
}

fn make_store(mkfs: &Path, store: &Path) {
    File::create(store).unwrap().set_len(STORE_BYTES).unwrap();
    let made = Command::new(mkfs)
        .arg("-q")
        .arg(store)
        .stdin(Stdio::null())
        .status();
    assert!(made.unwrap().success());
}

/// The machines, and what all of them have.
struct Hosts<'a> {
    kernel: Kernel,
    inner: Vec<u8>,
    store: &'a Path,
}

impl Hosts<'_> {
    /// Boots a machine of this CPU, which does these steps.
    #[track_caller]
    fn follow(&self, cpu_model: &str, steps: &[Move]) {
        let kernel = &self.kernel;
        let mut outer = Initramfs::new(env!("CARGO_BIN_EXE_slipgate-rig-init").as_ref()).unwrap();
        let modules = [&NESTED_MODULES[..], &["virtio_pci", "virtio_blk", "ext4"]].concat();
        outer.modules(kernel, &modules).unwrap();
        let binary = slipgate::binary().unwrap();
        outer.program_as("slipgate", &binary).unwrap();
        outer.program(&on_path("ip").unwrap()).unwrap();
        let image = std::fs::read(kernel.image()).unwrap();
        outer.file(&format!("{SAVED}/vmlinuz"), &image);
        outer.file(&format!("{SAVED}/initramfs"), &self.inner);
        outer.file(MOVED_PLAN, moved_plan(steps).unwrap().as_bytes());
        let store = self.store.display();
        let drive = format!("file={store},format=raw,if=virtio,cache=unsafe");
        let machine = Machine {
            kernel,
            initramfs: &outer.finish(),
            parameters: NESTED_OUTER,
            timeout: TIMEOUT * u32::try_from(steps.len()).unwrap(),
            hardware: Hardware {
                cpus: NESTED_CPUS,
                cpu_model,
                memory_mib: 2048,
                devices: &["-drive".to_owned(), drive],
                ..Default::default()
            },
        };
        let ended = machine.run().unwrap();
        let seconds = ended.took.as_secs_f64();
        println!("{cpu_model}: {seconds:.1} s\n{}", ended.report);
        let calls = forbidden_calls(&ended.console);
        assert!(
            ended.well,
            "{cpu_model}: {}; the report:\n{}\nthe console:\n{}\n{calls:?}",
            ended.how, ended.report, ended.console
        );
    }
}
