//! Fixtures of this crate's tests: a temporary network namespace, and its pins.

#[path = "skipped_test.rs"]
mod skipped;

use std::{panic, thread};

pub(crate) use skipped::skipped;

use slipgate_abi::IfIndex;

use crate::{Datapath, LoadOptions, Paths, Program, bpf, device::Device, layout::Sizes, pins};

/// Runs a test in a new network namespace, on a new thread. Reports the test as skipped if it
/// can't.
pub(crate) fn in_netns(test: &str, body: impl FnOnce() + Send + 'static) {
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return skipped(test, "needs root");
    }
    let outcome = thread::spawn(move || {
        // SAFETY: only this thread moves.
        let moved = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(moved, 0, "{}", std::io::Error::last_os_error());
        let _pins = PinsOfThisNetns;
        Device::named("lo").unwrap().set_up(true).unwrap();
        body();
    })
    .join();
    if let Err(cause) = outcome {
        panic::resume_unwind(cause);
    }
}

/// Removes the pins and locks, also after a panic.
struct PinsOfThisNetns;

impl Drop for PinsOfThisNetns {
    fn drop(&mut self) {
        if let Ok(paths) = Paths::of_this_netns()
            && paths.pin_dir.exists()
        {
            pins::remove_pins(&paths).unwrap();
            paths.remove().unwrap();
        }
    }
}

/// Opens the datapath in this namespace's directory.
pub(crate) fn datapath() -> Datapath {
    Datapath::open(&options()).unwrap()
}

/// Opens the maps in this namespace's directory, without programs.
pub(crate) fn maps_only() -> Datapath {
    Datapath::without_programs(&options()).unwrap()
}

pub(crate) fn options() -> LoadOptions {
    LoadOptions {
        paths: Paths::of_this_netns().unwrap(),
        sizes: Sizes::of_slots(4_096),
        bpf_log: false,
        ipv6: false,
    }
}

/// Runs a tool of iproute2 in this namespace.
pub(crate) fn run(command: &str) -> String {
    let mut words = command.split_whitespace();
    let output = std::process::Command::new(words.next().unwrap())
        .args(words)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{command}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Returns how many programs of that name run at the interface's TC ingress, by either hook.
pub(crate) fn attached_at(interface: &str, program: Program) -> usize {
    let ifindex = Device::named(interface).unwrap().ifindex().unwrap();
    let by_tcx = bpf::tcx_programs(ifindex)
        .unwrap()
        .into_iter()
        .filter(|id| {
            run(&format!("bpftool prog show id {id}")).contains(&format!(
                "name {} ",
                &program.name()[..program.name().len().min(15)]
            ))
        });
    let shown = run(&format!("tc filter show dev {interface} ingress"));
    let by_clsact = shown.lines().filter(|line| {
        line.contains("handle 0x5347") && line.contains(&format!(" {} ", program.name()))
    });
    by_tcx.count() + by_clsact.count()
}

/// Makes a persistent TAP, and returns its ifindex.
pub(crate) fn make_tap(name: &str) -> IfIndex {
    run(&format!("ip tuntap add {name} mode tap"));
    Device::named(name).unwrap().ifindex().unwrap()
}

/// Returns a typical VM, whose TAP and port are derived from its name.
pub(crate) fn vm_spec(name: &str) -> crate::vm::VmSpec {
    let number = name.bytes().map(u32::from).sum::<u32>();
    crate::vm::VmSpec {
        name: name.into(),
        guest: [10, 0, 2, 15].into(),
        gateway: [10, 0, 2, 2].into(),
        prefix_len: 24,
        ipv6: None,
        guest_mac: None,
        gateway_mac: [0x52, 0x55, 10, 0, 2, 2],
        mtu: 1_500,
        credits: 64,
        policy: 0,
        tap_ifindex: Some(IfIndex::new(10_000 + number)),
        port_ifindex: IfIndex::new(9_999),
    }
}
