//! A stock Linux as the guest of `slipgate run`: QEMU emulates a machine with SVM, Debian's 6.1
//! runs on it and has KVM, and under that runs the same Debian's 6.1 once more.

use std::{collections::BTreeMap, io::Write, path::PathBuf, process::Command};

use slipgate_testbed::{
    rig::{
        Client, Ended, Hardware, Initramfs, Kernel, Machine, NESTED, NESTED_FIRMWARE, NESTED_ORDER,
        NestedRun, NestedVmm, QEMU, forbidden_calls, judge,
    },
    skipped, slipgate,
};

use super::{TIMEOUT, on_path};

/// KVM, the datapath's devices, and the hooks of 6.1.
pub(super) const MODULES: [&str; 5] = ["kvm_amd", "tun", "veth", "sch_ingress", "cls_bpf"];

/// The outer kernel's ticks from timers that go on by themselves. By default each tick sets the
/// timer for the next. In runs that hung, one CPU had no more ticks while it was busy, and the vCPU
/// on the other spun in KVM for good (RCU stall, soft lockup): nothing came to wake up the first.
/// And notices on the console: a lockup says where each CPU was, an audit which system call was
/// forbidden to whom.
pub(super) const OUTER: &str = "nohz=off highres=off audit=1 loglevel=6";

/// The outer machine's CPUs. Without nested paging: with it this QEMU's translations go wrong now and
/// then while the inner guest sends, and the inner or the outer Debian ends in a triple fault.
pub(super) const CPU_MODEL: &str = "qemu64,+svm,-npt";

/// Firmware that QEMU needs to boot a kernel on the machine `q35` without a display.
const FIRMWARE: [&str; 3] = ["bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin"];

/// Set to N: QEMU and `slipgate run` boot the same client N times each, in turn.
const ROUNDS: &str = "SLIPGATE_NESTED_ROUNDS";
/// The same, where slipgate's guest broke down and it is to be seen whether QEMU's does too.
/// Without nested paging no guest's CPU has been reset in some 80 runs; with it one in five was, or
/// the outer machine's, in which slipgate is but processes.
const REFERENCE_ROUNDS: usize = 10;

#[test]
fn debian_6_1_under_slipgate_run() {
    let _turn = slipgate_testbed::turns::alone("QEMU without KVM keeps each CPU busy");
    let found = Machine::is_possible().and_then(|()| Kernel::find("6.1"));
    let kernel = match found {
        Ok(kernel) => kernel,
        Err(why) => return skipped!("{why}"),
    };
    let in_turn = |rounds| [NestedVmm::Qemu, NestedVmm::Slipgate].repeat(rounds);
    let rounds = std::env::var(ROUNDS).map(|n| n.parse().expect("a number of rounds"));
    let runs = match rounds {
        Ok(rounds) => boot_all(&kernel, in_turn(rounds)),
        Err(_) => {
            let mut runs = boot_all(&kernel, vec![NestedVmm::Slipgate]);
            if runs.iter().any(NestedRun::is_breakdown) {
                runs.extend(boot_all(&kernel, in_turn(REFERENCE_ROUNDS)));
            }
            runs
        }
    };
    print_counts(&runs);
    judge(&runs).unwrap_or_else(|why| panic!("{why}"));
}

/// Boots machines until each of these VMMs had its turn; mostly one is enough. What broke is told
/// whole.
fn boot_all(kernel: &Kernel, mut order: Vec<NestedVmm>) -> Vec<NestedRun> {
    let mut all = Vec::new();
    while !order.is_empty() {
        let ended = boot(kernel, &order);
        let mut runs = NestedRun::read(&ended.report);
        if runs.is_empty() {
            // It ended before there was a guest.
            runs.push(NestedRun {
                number: 1,
                vmm: order[0],
                end: None,
                seconds: ended.took.as_secs_f64(),
            });
        }
        if !ended.well {
            eprintln!(
                "{}; the report:\n{}\nthe console:\n{}",
                ended.how, ended.report, ended.console
            );
            for call in forbidden_calls(&ended.console) {
                eprintln!("forbidden system call: {call}");
            }
        }
        order.drain(..runs.len());
        all.extend(runs);
    }
    all
}

fn print_counts(runs: &[NestedRun]) {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for run in runs {
        let end = run.end.as_ref();
        let end = end.map_or("outer machine ended".into(), |end| format!("{end:?}"));
        *counts.entry(format!("{:?}: {end}", run.vmm)).or_default() += 1;
    }
    for (what, times) in counts {
        // Not `println!`, which libtest shows of failed tests only.
        let _ = writeln!(std::io::stderr(), "nested: {what}: {times}");
    }
}

/// Boots the outer machine, and in it the client by each VMM in turn.
fn boot(kernel: &Kernel, order: &[NestedVmm]) -> Ended {
    let mut outer = Initramfs::new(env!("CARGO_BIN_EXE_slipgate-rig-init").as_ref()).unwrap();
    outer.modules(kernel, &MODULES).unwrap();
    let binary = slipgate::binary().unwrap();
    outer.program_as("slipgate", &binary).unwrap();
    outer.program(&on_path("ip")).unwrap();
    let image = std::fs::read(kernel.image()).unwrap();
    outer.file(&format!("{NESTED}/vmlinuz"), &image);
    let inner = Client::new().initramfs(kernel).unwrap();
    outer.file(&format!("{NESTED}/initramfs"), &inner);
    let names = order.iter().map(|vmm| format!("{vmm:?}\n").to_lowercase());
    outer.file(NESTED_ORDER, names.collect::<String>().as_bytes());
    if order.contains(&NestedVmm::Qemu) {
        outer.program(&on_path(QEMU)).unwrap();
        for name in FIRMWARE {
            let contents = std::fs::read(firmware(name)).unwrap();
            outer.file(&format!("{NESTED_FIRMWARE}/{name}"), &contents);
        }
    }
    let machine = Machine {
        kernel,
        initramfs: &outer.finish(),
        parameters: OUTER,
        timeout: TIMEOUT * u32::try_from(order.len()).unwrap(),
        hardware: Hardware {
            cpus: 2,
            cpu_model: CPU_MODEL,
            memory_mib: 2048,
            ..Default::default()
        },
    };
    machine.run().unwrap()
}

/// Where this machine's QEMU has a file of its firmware.
fn firmware(name: &str) -> PathBuf {
    let folders = Command::new(QEMU).args(["-L", "help"]).output().unwrap();
    let folders = String::from_utf8_lossy(&folders.stdout).into_owned();
    let mut all = folders
        .lines()
        .map(|folder| PathBuf::from(folder).join(name));
    all.find(|file| file.is_file())
        .unwrap_or_else(|| panic!("QEMU has no {name} in any of:\n{folders}"))
}
