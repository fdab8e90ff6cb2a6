//! One guest behind slipgate, with the operations that most tests need.

use std::{fs, net::SocketAddrV4, path::PathBuf};

use serde_json::Value;
use slipgate_control::SharedMaps;
use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World, WorldConfig, kernel_view, slipgate::FlowRow,
    world::UPLINK,
};

use crate::eventually;

/// A world, a guest and slipgate. Fields go in order: slipgate first.
pub(crate) struct Stand {
    pub(crate) slipgate: Slipgate,
    pub(crate) guest: Guest,
    /// More guests, none mostly.
    pub(crate) neighbours: Vec<Guest>,
    pub(crate) world: World,
    scratch: tempfile::TempDir,
}

impl Stand {
    /// Creates the default world and guest. `args`: slipgate's arguments besides `--tap tap0
    /// --uplink up0 --flow-log …`.
    pub(crate) fn new(args: &[&str]) -> Stand {
        Self::with(WorldConfig::default(), GuestConfig::new("tap0"), args)
    }

    /// Makes a stand with the given world, guest and arguments.
    pub(crate) fn with(world: WorldConfig, guest: GuestConfig, args: &[&str]) -> Stand {
        Self::beside(world, guest, &[], args)
    }

    /// Creates the same with further guests.
    pub(crate) fn beside(
        world: WorldConfig,
        guest: GuestConfig,
        neighbours: &[GuestConfig],
        args: &[&str],
    ) -> Stand {
        let world = World::with(world).unwrap();
        let guest = Guest::new(&world, guest).unwrap();
        let made = |config: &GuestConfig| Guest::new(&world, config.clone()).unwrap();
        let neighbours: Vec<Guest> = neighbours.iter().map(made).collect();
        let scratch = tempfile::tempdir().unwrap();
        let log = scratch.path().join("flows.jsonl").display().to_string();
        let pins = PinDir::new().unwrap();
        let mut all = vec!["--tap", "tap0", "--uplink", UPLINK, "--flow-log", &log];
        all.extend(neighbours.iter().flat_map(|guest| ["--tap", guest.tap()]));
        all.extend(args);
        let slipgate = Slipgate::attach(&world.host, &pins, &all).unwrap();
        Stand {
            slipgate,
            guest,
            neighbours,
            world,
            scratch,
        }
    }

    pub(crate) fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.guest.run(f)
    }

    /// Starts it again with the same arguments, in the place of what ran before.
    pub(crate) fn again(&mut self) {
        self.slipgate = self.slipgate.again().unwrap();
    }

    /// The flows to `remote`.
    pub(crate) fn flows_to(&self, remote: SocketAddrV4) -> Vec<FlowRow> {
        let mut flows = self.slipgate.flows().unwrap();
        flows.retain(|flow| flow.remote == remote.to_string());
        flows
    }

    /// Returns the only flow to `remote`.
    pub(crate) fn flow_to(&self, remote: SocketAddrV4) -> FlowRow {
        let mut flows = self.flows_to(remote);
        assert_eq!(flows.len(), 1, "flows to {remote}: {flows:?}");
        flows.remove(0)
    }

    /// `slipgate stats`, all VMs together.
    pub(crate) fn total(&self) -> Value {
        self.slipgate.stats().unwrap()["total"].take()
    }

    /// Packets dropped for `reason`.
    pub(crate) fn dropped(&self, reason: &str) -> u64 {
        self.total()["drops"][reason]["packets"]
            .as_u64()
            .unwrap_or(0)
    }

    /// Flows refused for `reason`.
    pub(crate) fn refused(&self, reason: &str) -> u64 {
        self.total()["refused"][reason].as_u64().unwrap_or(0)
    }

    /// Frames that came out of the engine port, as the device counts them.
    pub(crate) fn port_frames(&self) -> u64 {
        kernel_view::frames_sent(&self.world.host, self.slipgate.engine_port()).unwrap()
    }

    /// Waits until slipgate's stderr contains these words, and returns it.
    pub(crate) fn says(&self, words: &str) -> String {
        eventually(words, || {
            let said = self.slipgate.stderr();
            said.contains(words).then_some(said)
        })
    }

    pub(crate) fn log_path(&self) -> PathBuf {
        self.scratch.path().join("flows.jsonl")
    }

    /// Returns the translated flows that have ended so far, from the flow log.
    pub(crate) fn records(&self) -> Vec<Value> {
        let mut ends = self.events("flow_end");
        ends.retain(|end| end["path"] != "relay");
        ends
    }

    /// Returns the lines of the flow log so far with this event.
    pub(crate) fn events(&self, event: &str) -> Vec<Value> {
        let mut lines = self.log();
        lines.retain(|line| line["event"] == event);
        lines
    }

    /// Returns the flow log so far.
    pub(crate) fn log(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.log_path()).unwrap();
        let parsed = text.lines().map(serde_json::from_str);
        parsed
            .collect::<Result<_, _>>()
            .unwrap_or_else(|error| panic!("{error} in the flow log:\n{text}"))
    }
}

/// The maps of a namespace, of which all that is needed is pinned.
pub(crate) fn maps(pins: &PinDir) -> SharedMaps {
    let inside = pins.pins().into_iter().find(|pin| pin.ends_with("META"));
    let meta = pins.path().join(inside.expect("META is pinned"));
    SharedMaps::open_pinned(meta.parent().unwrap()).unwrap()
}

/// Counters of a row of `flows` in each direction: packets, bytes.
pub(crate) fn counts(flow: &FlowRow) -> [(u64, u64); 2] {
    [
        (flow.tx_packets, flow.tx_bytes),
        (flow.rx_packets, flow.rx_bytes),
    ]
}
