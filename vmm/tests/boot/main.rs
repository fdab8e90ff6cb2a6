//! Kernels of a few instructions under KVM: each entry, CPUID as a guest reads it, all CPUs.
mod payloads;

use std::{
    fs::File,
    io::{Read, Write},
};

use slipgate_testbed::skipped;
use slipgate_vmm::{
    ThreadSetup,
    boot::{BootSource, Kernel},
    machine::{Devices, Machine, MachineConfig, Origin, Outcome, SerialIo},
};

/// Runs a kernel to its end. Returns the outcome and the text from the serial line; `None` on a
/// host without KVM.
fn run(image: &[u8], cmdline: &str, cpus: u8, memory_bytes: u64) -> Option<(Outcome, String)> {
    let kvm = match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(kvm) => kvm.into(),
        Err(why) => {
            skipped!("/dev/kvm: {why}");
            return None;
        }
    };
    let mut kernel = tempfile::tempfile().unwrap();
    kernel.write_all(image).unwrap();
    let (mut printed, output) = std::io::pipe().unwrap();
    let machine = Machine::new(MachineConfig {
        template: slipgate_vmm::cpuid::Template::Host,
        huge_pages: false,
        cpus,
        memory_bytes,
        origin: Origin::Boot(BootSource {
            kernel: Kernel::File(kernel),
            initrd: None,
            cmdline: cmdline.to_owned(),
        }),
        devices: Devices {
            net: None,
            disks: Vec::new(),
            vsock: None,
            balloon: None,
            serial: SerialIo {
                input: None,
                limit_bytes: None,
                output: output.into(),
            },
        },
        kvm,
        threads: ThreadSetup::new(|_| Ok(())),
    })
    .unwrap();
    let stop = machine.stop_handle().unwrap();
    let (ended, end) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        let late = std::time::Duration::from_secs(30);
        if end.recv_timeout(late) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            stop.stop();
        }
    });
    let outcome = machine.run();
    drop(ended);
    watchdog.join().unwrap();
    let mut text = String::new();
    printed.read_to_string(&mut text).unwrap();
    Some((outcome, text))
}

const MIB: u64 = 1 << 20;

#[test]
fn a_pvh_kernel_reads_its_command_line_and_resets() {
    let image = payloads::pvh(payloads::echo());
    if let Some((outcome, text)) = run(&image, "dns example.test", 1, 64 * MIB) {
        assert!(matches!(outcome, Outcome::Reset), "{outcome:?}");
        assert_eq!(text, "dns example.test");
    }
}

#[test]
fn vmlinux_and_bzimage_are_entered_in_64_bit_mode_and_power_off() {
    let code = payloads::linux_echo_code();
    for image in [payloads::vmlinux(code), payloads::bzimage(code)] {
        if let Some((outcome, text)) = run(&image, "console=ttyS0", 1, 64 * MIB) {
            assert!(matches!(outcome, Outcome::PoweredOff), "{outcome:?}");
            assert_eq!(text, "console=ttyS0");
        }
    }
}

#[test]
fn memory_goes_on_behind_the_hole() {
    // Only the memory that the kernel needs is touched.
    let image = payloads::pvh(payloads::echo());
    for bytes in [3072 * MIB, 3072 * MIB + 4096, 8192 * MIB] {
        if let Some((outcome, text)) = run(&image, "x", 1, bytes) {
            assert!(matches!(outcome, Outcome::Reset), "{outcome:?}");
            assert_eq!(text, "x");
        }
    }
}

#[test]
fn cpuid_tells_of_as_many_cpus_as_there_are() {
    let image = payloads::pvh(payloads::cpuid());
    for cpus in [1, 3, 32] {
        if let Some((outcome, _)) = run(&image, "", cpus, 64 * MIB) {
            assert!(
                matches!(outcome, Outcome::GuestExit(told) if told == cpus),
                "{outcome:?}"
            );
        }
    }
}

#[test]
fn every_cpu_starts() {
    let image = payloads::pvh(payloads::smp());
    for cpus in [2, 32] {
        let others = char::from(cpus - 1);
        if let Some((outcome, _)) = run(&image, &others.to_string(), cpus, 64 * MIB) {
            let all = matches!(outcome, Outcome::GuestExit(count) if count == cpus - 1);
            assert!(all, "{outcome:?}");
        }
    }
}
