//! A stock Linux under `slipgate run` that is saved and restored, and gives memory back: QEMU emulates
//! a machine with SVM, Debian's 6.1 runs on it and has KVM, and under that runs another Debian kernel.
use slipgate_testbed::{
    rig::{
        Client, Hardware, Initramfs, Kernel, Machine, NESTED_CPU_MODEL, NESTED_CPUS,
        NESTED_MODULES, NESTED_OUTER, SAVED, forbidden_calls, on_path, saved_initramfs,
    },
    skipped, slipgate,
};

use super::TIMEOUT;

#[test]
fn debian_6_1_is_saved_and_restored_with_its_disk() {
    is_saved_and_restored("6.1", false);
}

/// Debian's 6.1 has no driver for the generation id.
#[test]
fn debian_6_12_is_restored_and_reseeds_its_random_numbers() {
    is_saved_and_restored("6.12", true);
}

/// Saves, kills and restores a guest with the kernel of this series, which has a driver for the VM
/// generation id or none.
fn is_saved_and_restored(series: &str, has_generation: bool) {
    let _turn = slipgate_testbed::turns::alone("QEMU without KVM keeps each CPU busy");
    let found =
        Machine::is_possible().and_then(|()| Ok((Kernel::find("6.1")?, Kernel::find(series)?)));
    let (kernel, guest) = match found {
        Ok(found) => found,
        Err(why) => return skipped!("{why}"),
    };
    let mut outer = Initramfs::new(env!("CARGO_BIN_EXE_slipgate-rig-init").as_ref()).unwrap();
    outer.modules(&kernel, &NESTED_MODULES).unwrap();
    let binary = slipgate::binary().unwrap();
    outer.program_as("slipgate", &binary).unwrap();
    outer.program(&on_path("ip").unwrap()).unwrap();
    let image = std::fs::read(guest.image()).unwrap();
    outer.file(&format!("{SAVED}/vmlinuz"), &image);
    let inner = saved_initramfs(&Client::new(), &guest).unwrap();
    outer.file(&format!("{SAVED}/initramfs"), &inner);
    let machine = Machine {
        kernel: &kernel,
        initramfs: &outer.finish(),
        parameters: NESTED_OUTER,
        // Two guests, one after the other.
        timeout: 2 * TIMEOUT,
        hardware: Hardware {
            cpus: NESTED_CPUS,
            cpu_model: NESTED_CPU_MODEL,
            memory_mib: 2048,
            ..Default::default()
        },
    };
    let ended = machine.run().unwrap();
    println!("{}\n{:.1} s", ended.report, ended.took.as_secs_f64());
    let calls = forbidden_calls(&ended.console);
    assert!(
        ended.well,
        "{}; the report:\n{}\nthe console:\n{}\n{calls:?}",
        ended.how, ended.report, ended.console
    );
    let reseeded = ended.report.lines().any(|line| line == "ok reseeded 1");
    assert_eq!(reseeded, has_generation, "{}", ended.report);
}
