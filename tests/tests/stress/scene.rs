//! A world, a guest and slipgate between them, with a flow log and its maps in view.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use slipgate_control::{Paths, SharedMaps};
use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World, WorldConfig, flow_log, world::UPLINK,
};

use super::eventually;

/// Frames a TAP may queue: more than any test can have under way, so none is lost there.
const QUEUE_FRAMES: u32 = 20_000;

/// A line of the flow log.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: String,
    pub(crate) vm: String,
    pub(crate) proto: String,
    pub(crate) guest: String,
    pub(crate) remote: String,
    pub(crate) nat: String,
    pub(crate) tx_packets: u64,
    pub(crate) tx_bytes: u64,
    pub(crate) rx_packets: u64,
    pub(crate) rx_bytes: u64,
    pub(crate) end: String,
}

pub(crate) struct Scene {
    pub(crate) slipgate: Slipgate,
    pub(crate) guest: Guest,
    pub(crate) world: World,
    pub(crate) pins: PinDir,
    log: tempfile::TempDir,
    always: Vec<String>,
}

impl Scene {
    /// slipgate serves one guest by both families, with these flags too.
    pub(crate) fn new(flags: &[&str]) -> Scene {
        Scene::with(WorldConfig::default(), GuestConfig::new("tap0"), flags)
    }

    pub(crate) fn with(world: WorldConfig, guest: GuestConfig, flags: &[&str]) -> Scene {
        let world = World::with(world).unwrap();
        world.give_ipv6().unwrap();
        let guest = roomy_guest(&world, guest);
        let pins = PinDir::new().unwrap();
        let log = tempfile::tempdir().unwrap();
        let file = log.path().join("flows.jsonl");
        let always = ["--tap", guest.tap(), "--uplink", UPLINK, "--ipv6", "nat"];
        let always = [&always[..], &["--flow-log"]].concat();
        let mut always: Vec<String> = always.into_iter().map(str::to_owned).collect();
        always.push(file.to_str().unwrap().to_owned());
        let slipgate = attach(&world, &pins, &always, flags);
        Scene {
            slipgate,
            guest,
            world,
            pins,
            log,
            always,
        }
    }

    /// Starts slipgate again, after it was killed or stopped.
    pub(crate) fn restart(&mut self) {
        self.slipgate = self.slipgate.again().unwrap();
    }

    /// The same with other flags.
    pub(crate) fn restart_with(&mut self, flags: &[&str]) {
        self.slipgate = attach(&self.world, &self.pins, &self.always, flags);
    }

    /// Reads the records of the flow log.
    pub(crate) fn records(&self) -> Vec<Record> {
        records_of(&self.log_file())
    }

    /// Leaves a part of a line in the flow log, as a writer does that is killed within a long write.
    pub(crate) fn tear_log(&self) {
        // The kill may have done it already.
        if !self.ends_with_a_line() {
            return;
        }
        let log = fs::File::options().append(true).open(self.log_file());
        log.unwrap().write_all(br#"{"event":"flow_e"#).unwrap();
    }

    fn ends_with_a_line(&self) -> bool {
        let log = fs::read_to_string(self.log_file()).unwrap();
        log.is_empty() || log.ends_with('\n')
    }

    fn log_file(&self) -> PathBuf {
        self.log.path().join("flows.jsonl")
    }

    /// The pinned maps; they stay in view after the pins are gone.
    pub(crate) fn maps(&self) -> SharedMaps {
        maps(&self.world, &self.pins)
    }

    /// Detaches in order, and looks for what is left over.
    pub(crate) fn detach(&mut self) {
        let maps = self.maps();
        let status = self.slipgate.stop().unwrap();
        assert!(
            status.success(),
            "{status}; stderr:\n{}",
            self.slipgate.stderr()
        );
        assert!(self.ends_with_a_line(), "a torn line");
        assert_eq!(self.pins.pins(), Vec::<PathBuf>::new());
        let links = self.world.host.ip("-br link").unwrap();
        assert!(!links.contains("sgport"), "{links}");
        let tap = format!("link show {}", self.guest.tap());
        let tap = self.world.host.ip(&tap).unwrap();
        assert!(tap.contains("state DOWN"), "{tap}");
        assert_empty(&maps);
    }
}

fn attach(world: &World, pins: &PinDir, always: &[String], flags: &[&str]) -> Slipgate {
    let all: Vec<&str> = always
        .iter()
        .map(String::as_str)
        .chain(flags.iter().copied())
        .collect();
    Slipgate::attach(&world.host, pins, &all).unwrap()
}

/// A guest whose queues lose nothing, with addresses of both families.
pub(crate) fn roomy_guest(world: &World, config: GuestConfig) -> Guest {
    let guest = Guest::new(world, config).unwrap();
    let queue = |device: &str| format!("link set {device} txqueuelen {QUEUE_FRAMES}");
    world.host.ip(&queue(guest.tap())).unwrap();
    if !guest.config().hand_made {
        let device = slipgate_testbed::GUEST_DEVICE;
        guest.ns.ip(&queue(device)).unwrap();
        // A tuple that the guest closed first may be used again after a second, not after a minute.
        guest.ns.sysctl("net.ipv4.tcp_tw_reuse", "1").unwrap();
        guest.give_ipv6().unwrap();
    }
    guest
}

/// The ends of translated flows in a flow log.
pub(crate) fn records_of(file: &Path) -> Vec<Record> {
    let records = flow_log::records_after_kills(file).unwrap().into_iter();
    let ends = records.filter(|record| record["event"] == "flow_end" && record["path"] != "relay");
    ends.map(|record| {
        serde_json::from_value(record.clone())
            .unwrap_or_else(|error| panic!("{error} in the record {record}"))
    })
    .collect()
}

/// The maps pinned for a world's host.
pub(crate) fn maps(world: &World, pins: &PinDir) -> SharedMaps {
    let paths = world
        .host
        .run(|| Paths::with_pin_dir(pins.path().to_owned()))
        .unwrap();
    // The pins are directly in the directory, or in one per namespace.
    let inside = pins.pins().into_iter().find(|pin| pin.ends_with("SLOTS"));
    let slots = inside.unwrap_or_else(|| panic!("SLOTS is not pinned below {paths:?}"));
    let dir = pins.path().join(slots);
    SharedMaps::open_pinned(dir.parent().unwrap()).unwrap()
}

/// No tuple and no slot is in use.
pub(crate) fn assert_empty(maps: &SharedMaps) {
    let tuples = maps.flows.entries().unwrap();
    assert!(tuples.is_empty(), "left in FLOWS: {tuples:?}");
    let tuples = maps.flows6.entries().unwrap();
    assert!(tuples.is_empty(), "left in FLOWS6: {tuples:?}");
    let used = maps.slot_indexes().filter(|index| {
        let slot = maps.slot(*index).unwrap();
        slot.verdict().load(std::sync::atomic::Ordering::Acquire) != 0
    });
    assert_eq!(used.collect::<Vec<_>>(), [], "slots in use");
}

/// Both processes of a slipgate that was hit are gone.
pub(crate) fn await_death(slipgate: &mut Slipgate) {
    eventually("the end of broker and engine", || {
        !slipgate.broker_runs() && slipgate.engine_pid().is_none()
    });
}
