//! The packages in a Debian with systemd as process 1: `cargo xtask dist --try` makes both and
//! runs this. The machine has SVM, so that the Debian's own QEMU boots the built-in guest under KVM.

use std::{env, fs, path::PathBuf, time::Duration};

use slipgate_testbed::{
    builtin_guest,
    rig::{Hardware, Initramfs, Kernel, Machine, NESTED_CPU_MODEL},
};

/// The disk: KVM, the datapath's devices, and the hooks of 6.1.
const MODULES: [&str; 8] = [
    "virtio_pci",
    "virtio_blk",
    "autofs4",
    "kvm_amd",
    "tun",
    "veth",
    "sch_ingress",
    "cls_bpf",
];
/// Why is said at the nested test's.
const PARAMETERS: &str = "nohz=off highres=off";
/// A Debian under emulation, several restarts and two removals: 2 min on a quiet machine.
const TIMEOUT: Duration = Duration::from_secs(900);
const DISK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/kernels/debian.ext4");
/// The folder of the packages.
const PACKAGES: &str = "SLIPGATE_DIST";
/// Number of the checks in `check.sh`.
const CHECKS: usize = 21;

#[test]
#[ignore = "of a release: `cargo xtask dist --try` makes the packages and runs it"]
fn the_packages_are_installed_used_upgraded_and_removed() {
    Machine::is_possible().unwrap();
    let kernel = Kernel::find("6.1").unwrap();
    let mut initramfs = Initramfs::with_busybox(include_str!("installed/init.sh")).unwrap();
    initramfs.modules(&kernel, &MODULES).unwrap();
    for (name, contents) in [
        ("check.service", include_str!("installed/check.service")),
        ("check.sh", include_str!("installed/check.sh")),
        ("client.pl", include_str!("installed/client.pl")),
    ] {
        initramfs.file(&format!("/check/{name}"), contents.as_bytes());
    }
    for (name, ending) in [("deb", "_amd64.deb"), ("rpm", ".x86_64.rpm")] {
        let package = fs::read(package(ending)).unwrap();
        initramfs.file(&format!("/check/slipgate.{name}"), &package);
    }
    let guest = fs::read(builtin_guest::image().unwrap()).unwrap();
    initramfs.file("/check/guest", &guest);

    // What is written to it is forgotten, and never flushed.
    let disk = format!("file={DISK},format=raw,if=virtio,snapshot=on,cache=unsafe");
    let machine = Machine {
        kernel: &kernel,
        initramfs: &initramfs.finish(),
        parameters: PARAMETERS,
        timeout: TIMEOUT,
        hardware: Hardware {
            cpus: 2,
            cpu_model: NESTED_CPU_MODEL,
            memory_mib: 1536,
            devices: &["-drive".to_owned(), disk],
            namespace: None,
        },
    };
    let ended = machine.run().unwrap();
    println!("{}\n{:.1} s", ended.report, ended.took.as_secs_f64());
    let lines = || ended.report.lines();
    let passed = lines().filter(|line| line.starts_with("ok ")).count();
    let failed = lines().any(|line| line.starts_with("FAILED "));
    let is_whole = passed == CHECKS && !failed && lines().any(|line| line == "end");
    assert!(
        is_whole && ended.powered_off,
        "{passed} of {CHECKS} checks passed; {}; its console:\n{}",
        ended.how,
        ended.console
    );
}

/// The package whose name ends so.
fn package(ending: &str) -> PathBuf {
    let folder = env::var_os(PACKAGES).unwrap_or_else(|| panic!("{PACKAGES} names no folder"));
    let mut files = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    files
        .find(|path| path.to_string_lossy().ends_with(ending))
        .unwrap_or_else(|| panic!("{PACKAGES} has no {ending}"))
}
