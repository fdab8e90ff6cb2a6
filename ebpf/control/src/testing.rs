//! What this crate's tests share: a network namespace that goes away, and what is pinned for it.

use std::{panic, thread};

use crate::{Datapath, LoadOptions, Paths, device::Device, load};

/// Runs a test in a network namespace of its own, on a thread of its own. Says so when it can't.
pub(crate) fn in_netns(test: &str, body: impl FnOnce() + Send + 'static) {
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: {test}: needs root");
        return;
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
            load::remove_pins(&paths).unwrap();
            paths.remove().unwrap();
        }
    }
}

/// Loads into this namespace's directory.
pub(crate) fn datapath() -> Datapath {
    Datapath::open(&options()).unwrap()
}

pub(crate) fn options() -> LoadOptions {
    LoadOptions {
        paths: Paths::of_this_netns().unwrap(),
        slots: 4_096,
        bpf_log: false,
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

/// Makes a persistent TAP; its ifindex.
pub(crate) fn make_tap(name: &str) -> u32 {
    run(&format!("ip tuntap add {name} mode tap"));
    Device::named(name).unwrap().ifindex().unwrap()
}
