//! `slipgate run` in the testbed: ends of guests, the remaining state, and the processes'
//! privileges.
mod asleep;
mod balloon;
mod built_in;
mod cgroups;
mod console;
mod differences;
mod disks;
mod ends;
mod fleet_of_clones;
mod generations;
mod huge_pages;
mod jail;
mod jail_refused;
mod joined;
mod kept_vms;
mod limits;
mod ordered_by_api;
mod payload;
mod processes;
mod refused;
mod restarts;
mod same_vm;
mod snapshots;
mod vsock;
mod vsock_messages;

use std::{
    path::PathBuf,
    sync::Once,
    time::{Duration, Instant},
};

use slipgate_testbed::{MicroVm, MicroVmEnd, PinDir, World, world::UPLINK};

/// For what takes a second or two on a machine that does nothing else.
const WAIT: Duration = Duration::from_secs(30);

/// The testbed is to run the binary that was built with this test.
fn this_build() {
    static ONCE: Once = Once::new();
    // SAFETY: every test begins here and waits for the first; nothing else in the process looks at
    // the environment by then.
    ONCE.call_once(|| unsafe {
        std::env::set_var("SLIPGATE_BIN", env!("CARGO_BIN_EXE_slipgate"));
    });
}

/// Waits until it is done, looking often. Who drops a machine in a panic sees its stderr.
#[track_caller]
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + WAIT;
    while !done() {
        assert!(Instant::now() < until, "{what} did not happen in {WAIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A world, pins, and a folder for kernels.
struct Bed {
    world: World,
    pins: PinDir,
    folder: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        this_build();
        Self {
            world: World::new().unwrap(),
            pins: PinDir::new().unwrap(),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn kernel(&self, name: &str, image: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, image).unwrap();
        path
    }

    /// Starts a guest of this image.
    fn start(&self, image: &[u8], flags: &[&str]) -> MicroVm {
        let kernel = self.kernel("kernel", image);
        let mut all = vec!["--kernel", kernel.to_str().unwrap(), "--memory", "32"];
        all.extend(flags);
        self.start_with(&all)
    }

    fn start_with(&self, flags: &[&str]) -> MicroVm {
        let mut all = flags.to_vec();
        // With `--as` the VM is the daemon's.
        if !flags.contains(&"--uplink") && !flags.contains(&"--as") {
            all.extend(["--uplink", UPLINK]);
        }
        MicroVm::start(&self.world.host, &self.pins, &all).unwrap()
    }

    /// Runs a guest of this image to its end.
    fn run(&self, image: &[u8]) -> MicroVmEnd {
        self.start(image, &[]).finish(WAIT).unwrap()
    }

    /// Checks that no TAP, no engine port and no pin of slipgate is left.
    #[track_caller]
    fn assert_nothing_is_left(&self) {
        let links = self.world.host.ip("-brief link").unwrap();
        for prefix in ["sgvm", "sgport"] {
            assert!(!links.contains(prefix), "{links}");
        }
        assert_eq!(self.pins.pins(), Vec::<PathBuf>::new());
    }
}
