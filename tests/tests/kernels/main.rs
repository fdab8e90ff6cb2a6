//! slipgate on the kernels that it supports, each booted by QEMU: the same binary, sandbox and
//! programs, a guest's traffic by both families, a kill -9. The checks are in `src/rig_init/checks`. And
//! end-to-end tests of devices that this machine's kernel may lack (`devices`), and the packages in a
//! Debian, which only `cargo xtask dist --try` runs.
//!
//! `SLIPGATE_RIG_RUN="PROGRAM ARGS"` runs a program of this machine there instead, with the files
//! of `SLIPGATE_RIG_FILES=PATH:PATH` in their places, the modules of `SLIPGATE_RIG_MODULES=NAME:NAME`
//! loaded as well, and `SLIPGATE_RIG_CPUS` CPUs (one).

mod client;
mod devices;
mod disk;
mod installed;
mod moved;
mod nested;
mod saved;

use std::time::Duration;

use slipgate_testbed::{
    rig::{COMMAND, Hardware, Initramfs, Kernel, Machine, on_path},
    skipped, slipgate,
};

/// Kernel modules that the checks use: devices, and the hooks before tcx.
const MODULES: [&str; 4] = ["tun", "veth", "sch_ingress", "cls_bpf"];
/// Time limit: several times the usual duration, because a machine under load emulates slowly.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Number of the checks in `src/rig_init/checks`, so that a missing one is noticed.
const CHECKS: usize = 22;

/// The oldest that is supported: no tcx, so it is clsact's.
#[test]
fn linux_6_1() {
    works_on("6.1");
}

#[test]
fn linux_6_12() {
    works_on("6.12");
}

fn works_on(series: &str) {
    let _turn = slipgate_testbed::turns::alone("QEMU without KVM keeps each CPU busy");
    let found = Machine::is_possible().and_then(|()| Kernel::find(series));
    let kernel = match found {
        Ok(kernel) => kernel,
        Err(why) => return skipped!("{why}"),
    };
    let mut initramfs = Initramfs::new(env!("CARGO_BIN_EXE_slipgate-rig-init").as_ref()).unwrap();
    let command = std::env::var("SLIPGATE_RIG_RUN").ok();
    // Without a command they would only make the checks' machine another one.
    let given = |name| match &command {
        Some(_) => std::env::var(name).unwrap_or_default(),
        None => String::new(),
    };
    let more = given("SLIPGATE_RIG_MODULES");
    let mut modules = MODULES.to_vec();
    modules.extend(more.split(':').filter(|name| !name.is_empty()));
    initramfs.modules(&kernel, &modules).unwrap();
    initramfs
        .program_as("slipgate", &slipgate::binary().unwrap())
        .unwrap();
    for tool in ["ip", "tc"] {
        initramfs.program(&on_path(tool).unwrap()).unwrap();
    }
    if let Some((program, args)) = command.as_deref().map(split) {
        initramfs.program_as("given", program.as_ref()).unwrap();
        initramfs.file(COMMAND, format!("/bin/given {args}").as_bytes());
        let files = given("SLIPGATE_RIG_FILES");
        for path in files.split(':').filter(|path| !path.is_empty()) {
            initramfs.file(path, &std::fs::read(path).unwrap());
        }
    }
    let machine = Machine {
        kernel: &kernel,
        initramfs: &initramfs.finish(),
        parameters: "",
        timeout: TIMEOUT,
        hardware: Hardware {
            cpus: match given("SLIPGATE_RIG_CPUS").as_str() {
                "" => 1,
                number => number.parse().unwrap(),
            },
            ..Hardware::default()
        },
    };
    let ended = machine.run().unwrap();
    println!("{}", ended.report);
    println!("{}: {:.1} s", kernel.release(), ended.took.as_secs_f64());
    assert!(
        ended.well,
        "{}: {}; the report:\n{}\nthe console:\n{}",
        kernel.release(),
        ended.how,
        ended.report,
        ended.console
    );
    if command.is_some() {
        return;
    }
    let ok = ended
        .report
        .lines()
        .filter(|line| line.starts_with("ok "))
        .count();
    assert_eq!(ok, CHECKS, "the report has other checks:\n{}", ended.report);
}

fn split(command: &str) -> (&str, &str) {
    command.split_once(' ').unwrap_or((command, ""))
}
