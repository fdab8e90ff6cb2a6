//! The built-in guest on a machine.
use std::{
    fs::File,
    io::{Read, pipe},
    path::PathBuf,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use slipgate_testbed::{require_kvm, skipped};
use slipgate_vmm::{
    Machine, MachineConfig, Outcome, SerialIo,
    boot::{BootSource, Kernel},
    counters::Snapshot,
};

/// Where xtask puts the image.
fn image() -> Option<File> {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    File::open(workspace.join("target/guest/slipgate-guest")).ok()
}

fn run(cpus: u8, memory_bytes: u64, cmdline: &str, image: File) -> (Outcome, String, Snapshot) {
    let (mut printed, output) = pipe().unwrap();
    let kvm = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .unwrap();
    let machine = Machine::new(MachineConfig {
        cpus,
        memory_bytes,
        boot: BootSource {
            kernel: Kernel::File(image),
            initrd: None,
            cmdline: cmdline.into(),
        },
        net: None,
        serial: SerialIo {
            input: None,
            output: output.into(),
        },
        kvm: kvm.into(),
        threads: Arc::new(|_| Ok(())),
    })
    .unwrap();
    let counters = machine.counters();
    let stop = machine.stop_handle().unwrap();
    let (ended, wait) = mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        if wait.recv_timeout(Duration::from_secs(20)).is_err() {
            stop.stop();
        }
    });
    let reading = thread::spawn(move || {
        let mut text = String::new();
        printed.read_to_string(&mut text).unwrap();
        text
    });
    let outcome = machine.run();
    ended.send(()).ok();
    watchdog.join().unwrap();
    (outcome, reading.join().unwrap(), counters.snapshot())
}

#[test]
fn boots_and_exits() {
    require_kvm!();
    let Some(image) = image() else {
        return skipped!("it needs target/guest/slipgate-guest: cargo xtask build");
    };
    let (outcome, printed, counters) = run(2, 64 << 20, "", image);
    if let Outcome::Crashed(report) = &outcome {
        println!("{report}");
    }
    println!(
        "{printed}\n{}",
        serde_json::to_string_pretty(&counters).unwrap()
    );
    assert!(matches!(outcome, Outcome::GuestExit(0)), "{outcome:?}");
}
