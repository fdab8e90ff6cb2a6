//! A machine with a console and no other device.
use std::{
    fs::File,
    io::{PipeReader, pipe},
};

use slipgate_vmm::{
    Devices, MachineConfig, Origin, SerialIo, ThreadSetup,
    boot::{BootSource, Kernel},
};

use crate::payload::Code;

/// Returns a machine of 16 MiB that runs the code, and what its console prints. `typed`: what is
/// typed there.
pub(crate) fn machine(
    code: &Code,
    cpus: u8,
    typed: Option<PipeReader>,
) -> (MachineConfig, PipeReader) {
    let (printed, output) = pipe().unwrap();
    let kvm = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .unwrap();
    let config = MachineConfig {
        template: slipgate_vmm::cpuid::Template::Host,
        huge_pages: false,
        cpus,
        memory_bytes: 16 << 20,
        origin: Origin::Boot(BootSource {
            kernel: Kernel::Bytes(code.image()),
            initrd: None,
            cmdline: String::new(),
        }),
        devices: Devices {
            net: None,
            disks: Vec::new(),
            vsock: None,
            balloon: None,
            serial: SerialIo {
                input: typed.map(Into::into),
                limit_bytes: None,
                output: output.into(),
            },
        },
        kvm: kvm.into(),
        threads: ThreadSetup::new(|_| Ok(())),
    };
    (config, printed)
}
