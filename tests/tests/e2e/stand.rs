//! One guest behind slipgate, with the operations that most tests need.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
};

use serde_json::Value;
use slipgate_control::SharedMaps;
use slipgate_testbed::{
    Guest, GuestConfig, OrdinaryUser, PinDir, Slipgate, World, WorldConfig, flow_log, kernel_view,
    slipgate::FlowRow, world::UPLINK, world_ipv6,
};

use crate::{Cell, Mode, eventually, matrix::cells};

/// A world, a guest and slipgate. Fields go in order: slipgate first.
pub(crate) struct Stand {
    pub(crate) slipgate: Slipgate,
    pub(crate) guest: Guest,
    /// More guests, none mostly.
    pub(crate) neighbours: Vec<Guest>,
    pub(crate) world: World,
    pub(crate) cell: Cell,
    log: PathBuf,
    _files: Files,
}

/// Owner of a stand's files; they are removed with it.
enum Files {
    Scratch(#[allow(dead_code, reason = "held for its drop")] tempfile::TempDir),
    OfUser(#[allow(dead_code, reason = "held for its drop")] OrdinaryUser),
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
        Self::in_world(world, guest, neighbours, args)
    }

    /// Makes a stand of this cell of the matrix. In user mode the VM of `tap0` is behind a socket
    /// `tap0.sock`, so that it has the same name. Its guest has its addresses at once.
    pub(crate) fn of(cell: Cell, args: &[&str]) -> Stand {
        Self::of_several(cell, WorldConfig::default(), &[], &[], args)
    }

    /// The same with the given world; `more_servers`: more addresses of servers by IPv6, whose IPv4
    /// ones are in `world`. Further guests are hybrid mode's: a socket has one.
    pub(crate) fn of_several(
        cell: Cell,
        world: WorldConfig,
        more_servers: &[Ipv6Addr],
        neighbours: &[GuestConfig],
        args: &[&str],
    ) -> Stand {
        let guest = GuestConfig::new("tap0");
        Self::of_guest(cell, guest, world, more_servers, neighbours, args)
    }

    /// The stand of a cell whose guest has no stack: the test writes its frames.
    pub(crate) fn of_hand_made(cell: Cell, args: &[&str]) -> Stand {
        let guest = GuestConfig::new("tap0").hand_made();
        Self::of_guest(cell, guest, WorldConfig::default(), &[], &[], args)
    }

    /// The same with the given guest.
    pub(crate) fn of_guest(
        cell: Cell,
        guest: GuestConfig,
        world: WorldConfig,
        more_servers: &[Ipv6Addr],
        neighbours: &[GuestConfig],
        args: &[&str],
    ) -> Stand {
        let world = World::with(world).unwrap();
        let args = [args, cell.give(&world)].concat();
        if cell.is_ipv6() {
            for server in more_servers {
                world_ipv6::add_address(&world.net, *server, 128, "lo").unwrap();
            }
        }
        let has_stack = !guest.hand_made;
        let mut stand = match cell.mode {
            Mode::Hybrid => Self::in_world(world, guest, neighbours, &args),
            Mode::User => {
                assert!(neighbours.is_empty(), "one guest at a socket");
                Self::as_user(world, guest, &args)
            }
        };
        stand.cell = cell;
        if cell.is_ipv6() && has_stack {
            give_ipv6(&stand.guest);
            stand.neighbours.iter().for_each(give_ipv6);
        }
        stand
    }

    /// The stand of a cell of user mode, whose processes may have so many descriptors each.
    pub(crate) fn with_few_files(cell: Cell, most_files: u64) -> Stand {
        let world = World::new().unwrap();
        let args = cell.give(&world);
        let user = OrdinaryUser::new().unwrap().limited_to(most_files);
        let mut stand = Self::of_user(user, world, GuestConfig::new("tap0"), args);
        stand.cell = cell;
        if cell.is_ipv6() {
            give_ipv6(&stand.guest);
        }
        stand
    }

    fn as_user(world: World, guest: GuestConfig, args: &[&str]) -> Stand {
        Self::of_user(OrdinaryUser::new().unwrap(), world, guest, args)
    }

    fn of_user(user: OrdinaryUser, world: World, guest: GuestConfig, args: &[&str]) -> Stand {
        // As most distributions have it.
        let everybody = "0 2147483647";
        world
            .host
            .sysctl("net.ipv4.ping_group_range", everybody)
            .unwrap();
        let socket = user.file(&format!("run/{}.sock", guest.tap));
        let log = user.file("run/flows.jsonl");
        let shown = log.display().to_string();
        let all = [&["--flow-log", &shown], args].concat();
        let slipgate = Slipgate::attach_socket(&world.host, &user, &socket, &all).unwrap();
        let guest = Guest::new(&world, guest.on_socket(&socket)).unwrap();
        Stand {
            slipgate,
            guest,
            neighbours: Vec::new(),
            world,
            cell: cells::user_ipv4,
            log,
            _files: Files::OfUser(user),
        }
    }

    pub(crate) fn in_world(
        world: World,
        guest: GuestConfig,
        neighbours: &[GuestConfig],
        args: &[&str],
    ) -> Stand {
        let guest = Guest::new(&world, guest).unwrap();
        let made = |config: &GuestConfig| Guest::new(&world, config.clone()).unwrap();
        let neighbours: Vec<Guest> = neighbours.iter().map(made).collect();
        let scratch = tempfile::tempdir().unwrap();
        let log = scratch.path().join("flows.jsonl");
        let shown = log.display().to_string();
        let pins = PinDir::new().unwrap();
        let mut all = vec!["--tap", "tap0", "--uplink", UPLINK, "--flow-log", &shown];
        all.extend(neighbours.iter().flat_map(|guest| ["--tap", guest.tap()]));
        all.extend(args);
        let slipgate = Slipgate::attach(&world.host, &pins, &all).unwrap();
        Stand {
            slipgate,
            guest,
            neighbours,
            world,
            cell: cells::hybrid_ipv4,
            log,
            _files: Files::Scratch(scratch),
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
    pub(crate) fn flows_to(&self, remote: impl Into<SocketAddr>) -> Vec<FlowRow> {
        let remote = remote.into().to_string();
        let mut flows = self.slipgate.flows().unwrap();
        flows.retain(|flow| flow.remote == remote);
        flows
    }

    /// Returns the only flow to `remote`.
    pub(crate) fn flow_to(&self, remote: impl Into<SocketAddr>) -> FlowRow {
        let remote = remote.into();
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

    /// Guests' frames that the programs handed to the engine, by its port or its ring, in credits.
    pub(crate) fn handed_over(&self) -> u64 {
        kernel_view::handed_over(&self.world.host, self.slipgate.pins()).unwrap()
    }

    /// Waits until slipgate's stderr contains these words, and returns it.
    pub(crate) fn says(&self, words: &str) -> String {
        eventually(words, || {
            let said = self.slipgate.stderr();
            said.contains(words).then_some(said)
        })
    }

    pub(crate) fn log_path(&self) -> PathBuf {
        self.log.clone()
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
        flow_log::records(&self.log_path()).unwrap()
    }
}

/// Gives the guest its address of IPv6, and the route by its gateway, without asking anybody: what it
/// would ask is tested elsewhere (`ipv6`).
pub(crate) fn give_ipv6(guest: &Guest) {
    guest.give_ipv6().unwrap();
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

/// A second uplink, and the host's address there.
pub(crate) const SECOND: &str = "up1";
const SECOND_PEER: &str = "w1";
pub(crate) const SECOND_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 2);
pub(crate) const SECOND_ADDRESS6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 2);
/// The world's router there.
const SECOND_ROUTER: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 1);
const SECOND_ROUTER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1);

impl Cell {
    /// The host's address on the second uplink.
    pub(crate) fn second_address(self) -> IpAddr {
        self.family.choose(SECOND_ADDRESS, SECOND_ADDRESS6)
    }

    /// The world's router on the second uplink.
    pub(crate) fn second_router(self) -> IpAddr {
        self.family.choose(SECOND_ROUTER, SECOND_ROUTER6)
    }

    /// Gives the host a second uplink, with a default route of each of the cell's families that the
    /// host itself does not use while it has another.
    pub(crate) fn add_second_uplink(self, world: &World) {
        add_second_uplink(world);
        let by = format!("dev {SECOND} metric 9000");
        let host = &world.host;
        host.ip(&format!("route add default via {SECOND_ROUTER} {by}"))
            .unwrap();
        if self.is_ipv6() {
            add_second_ipv6(world);
            host.ip(&format!("-6 route add default via {SECOND_ROUTER6} {by}"))
                .unwrap();
        }
    }
}

/// Gives the second uplink IPv6 at both ends, without a route.
pub(crate) fn add_second_ipv6(world: &World) {
    let ends = [
        (&world.host, SECOND, SECOND_ADDRESS6),
        (&world.net, SECOND_PEER, SECOND_ROUTER6),
    ];
    for (ns, device, address) in ends {
        ns.sysctl(&format!("net.ipv6.conf.{device}.accept_dad"), "0")
            .unwrap();
        world_ipv6::enable(ns, &[device]).unwrap();
        world_ipv6::add_address(ns, address, 64, device).unwrap();
    }
}

/// Gives the host a second uplink to the world, without a route.
pub(crate) fn add_second_uplink(world: &World) {
    let (host, net) = (&world.host, &world.net);
    let peer = net.path();
    host.ip(&format!(
        "link add {SECOND} type veth peer name {SECOND_PEER} netns {}",
        peer.display()
    ))
    .unwrap();
    net.ip(&format!("addr add {SECOND_ROUTER}/24 dev {SECOND_PEER}"))
        .unwrap();
    net.ip(&format!("link set {SECOND_PEER} up")).unwrap();
    host.ip(&format!("addr add {SECOND_ADDRESS}/24 dev {SECOND}"))
        .unwrap();
    host.ip(&format!("link set {SECOND} up")).unwrap();
}
