//! A stock Linux as the guest of `slipgate run`: QEMU emulates a machine with SVM, Debian's 6.1
//! runs on it and has KVM, and under that runs the same Debian's 6.1 once more.

use std::{collections::BTreeMap, io::Write};

use slipgate_testbed::{
    left_out,
    rig::{
        Client, Ended, Hardware, Initramfs, Kernel, Machine, NESTED, NESTED_CPU_MODEL, NESTED_CPUS,
        NESTED_DISK, NESTED_FIRMWARE, NESTED_MODULES, NESTED_ORDER, NESTED_OUTER, NestedRun,
        NestedVmm, debian_userland, forbidden_calls, judge, on_path, root_disk, root_initramfs,
    },
    skipped, slipgate,
};

use super::TIMEOUT;

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
    let inner = Inner {
        kernel: None,
        initramfs: Some(Client::new().initramfs(&kernel).unwrap()),
        disk: None,
    };
    let in_turn = |rounds| [NestedVmm::Qemu, NestedVmm::Slipgate].repeat(rounds);
    let rounds = std::env::var(ROUNDS).map(|n| n.parse().expect("a number of rounds"));
    let runs = match rounds {
        Ok(rounds) => boot_all(&kernel, &inner, in_turn(rounds)),
        Err(_) => {
            let mut runs = boot_all(&kernel, &inner, vec![NestedVmm::Slipgate]);
            if runs.iter().any(NestedRun::is_breakdown) {
                runs.extend(boot_all(&kernel, &inner, in_turn(REFERENCE_ROUNDS)));
            }
            runs
        }
    };
    print_counts(&runs);
    judge(&runs).unwrap_or_else(|why| panic!("{why}"));
}

/// A Debian, its init, shell and tools, from an ext4 file system on a whole disk. Its own kernel, whose drivers of
/// the disk are modules, has no root there by itself: it takes an initramfs that does nothing but load them.
#[test]
fn debian_6_1_boots_from_an_ext4_root() {
    let _turn = slipgate_testbed::turns::alone("QEMU without KVM keeps each CPU busy");
    let kernel = match kernel_with_root() {
        Ok(kernel) => kernel,
        Err(why) => return skipped!("{why}"),
    };
    let inner = Inner {
        kernel: None,
        initramfs: Some(root_initramfs(&kernel).unwrap()),
        disk: Some(root_disk(&Client::new(), &kernel).unwrap()),
    };
    boots_under_slipgate(&kernel, &inner);
}

/// Names a kernel (bzImage) with the drivers of `src/rig/root_kernel.config` built in, which says how to
/// make it. No distribution that we know has one.
const ROOT_KERNEL: &str = "SLIPGATE_ROOT_KERNEL";

/// The same Debian, by `root=` alone.
#[test]
fn a_kernel_with_the_disk_built_in_boots_from_it_without_an_initrd() {
    let Some(image) = std::env::var_os(ROOT_KERNEL) else {
        return left_out!("{ROOT_KERNEL} names no kernel");
    };
    let _turn = slipgate_testbed::turns::alone("QEMU without KVM keeps each CPU busy");
    let kernel = match kernel_with_root() {
        Ok(kernel) => kernel,
        Err(why) => return skipped!("{why}"),
    };
    let inner = Inner {
        kernel: Some(std::fs::read(image).unwrap()),
        initramfs: None,
        disk: Some(root_disk(&Client::new(), &kernel).unwrap()),
    };
    boots_under_slipgate(&kernel, &inner);
}

/// The kernel of the tests here, on a machine that can make their disks, too.
fn kernel_with_root() -> slipgate_testbed::Result<Kernel> {
    Machine::is_possible()?;
    let kernel = Kernel::find("6.1")?;
    debian_userland()?;
    on_path("mkfs.ext4")?;
    Ok(kernel)
}

fn boots_under_slipgate(kernel: &Kernel, inner: &Inner) {
    let runs = boot_all(kernel, inner, vec![NestedVmm::Slipgate]);
    print_counts(&runs);
    judge(&runs).unwrap_or_else(|why| panic!("{why}"));
}

/// What a configuration of the kernel says of a driver: `y`, built in; `m`, a module.
fn configured(kernel: &Kernel, driver: &str) -> Option<char> {
    let line = format!("CONFIG_{driver}=");
    let config = kernel
        .image()
        .with_file_name(format!("config-{}", kernel.release()));
    let config = std::fs::read_to_string(config).unwrap();
    let mut values = config.lines().filter_map(|it| it.strip_prefix(&line));
    values.next()?.chars().next()
}

/// What `docs/vmm.md` says of them.
#[test]
fn debian_s_kernels_for_clouds_have_the_disk_as_a_module() {
    for (series, virtio) in [("6.1", 'm'), ("6.12", 'y')] {
        let kernel = match Kernel::find(series) {
            Ok(kernel) => kernel,
            Err(why) => return skipped!("{why}"),
        };
        let is = |driver| configured(&kernel, driver);
        assert_eq!(is("VIRTIO_BLK"), Some('m'), "{series}");
        assert_eq!(is("VIRTIO"), Some(virtio), "{series}");
        assert_eq!(is("VIRTIO_PCI"), Some(virtio), "{series}");
        assert_eq!(is("EXT4_FS"), Some('y'), "{series}");
    }
}

/// What the nested guest boots.
struct Inner {
    /// Another kernel than the outer machine's.
    kernel: Option<Vec<u8>>,
    initramfs: Option<Vec<u8>>,
    disk: Option<Vec<u8>>,
}

/// Boots machines until each of these VMMs had its turn; mostly one is enough. What broke is told
/// whole.
fn boot_all(kernel: &Kernel, inner: &Inner, mut order: Vec<NestedVmm>) -> Vec<NestedRun> {
    let mut all = Vec::new();
    while !order.is_empty() {
        let ended = boot(kernel, inner, &order);
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
fn boot(kernel: &Kernel, inner: &Inner, order: &[NestedVmm]) -> Ended {
    let mut outer = Initramfs::new(env!("CARGO_BIN_EXE_slipgate-rig-init").as_ref()).unwrap();
    outer.modules(kernel, &NESTED_MODULES).unwrap();
    let binary = slipgate::binary().unwrap();
    outer.program_as("slipgate", &binary).unwrap();
    outer.program(&on_path("ip").unwrap()).unwrap();
    let own = || std::fs::read(kernel.image()).unwrap();
    let image = inner.kernel.clone().unwrap_or_else(own);
    outer.file(&format!("{NESTED}/vmlinuz"), &image);
    if let Some(initramfs) = &inner.initramfs {
        outer.file(&format!("{NESTED}/initramfs"), initramfs);
    }
    if let Some(disk) = &inner.disk {
        outer.file(NESTED_DISK, disk);
    }
    let names = order.iter().map(|vmm| format!("{vmm:?}\n").to_lowercase());
    outer.file(NESTED_ORDER, names.collect::<String>().as_bytes());
    if order.contains(&NestedVmm::Qemu) {
        outer.qemu(NESTED_FIRMWARE).unwrap();
    }
    let machine = Machine {
        kernel,
        initramfs: &outer.finish(),
        parameters: NESTED_OUTER,
        timeout: TIMEOUT * u32::try_from(order.len()).unwrap(),
        hardware: Hardware {
            cpus: NESTED_CPUS,
            cpu_model: NESTED_CPU_MODEL,
            memory_mib: 2048,
            ..Default::default()
        },
    };
    machine.run().unwrap()
}
