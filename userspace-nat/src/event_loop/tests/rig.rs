//! An engine, a kernel, two VMs with one address, and the world.
use std::{
    cell::Cell,
    collections::VecDeque,
    io::{self, Write},
    net::{IpAddr, Ipv6Addr},
    os::fd::BorrowedFd,
    rc::Rc,
    sync::{Arc, Mutex},
};

use hashbrown::HashSet;
use ipnet::Ipv6Net;
use slipgate_abi::{DropReason, IfIndex, Ip4, Refusal, RuleIndex, VmId, VmRow};
use slipgate_model::{
    GuestIpv6, HostAddress, Link, NetworkView, OnExit, RouteEntry, RouteKind, RouteSnapshot,
    Silence, SleepChange, TranslatedId,
};

pub(super) use crate::fake::{Handling, packets::*};
use crate::{
    control::*,
    dns,
    event_loop::*,
    fake::{FakeClock, FakeDatapath, FakePort, Kernel, KernelHandle},
    flow::adopt::Adoption,
    name_gate::Judge,
    nat_ports::DEFAULT_RANGE,
    port::VirtioNetHdr,
    record::{Event, Events, FlowLog},
    relay::{Limits, Relay},
    services::Services,
    vm::VmSpec,
};
use slipgate_policy::{
    Action, AddressPool, LocalAddresses, LoopbackPorts, NatSettings, Policy, PolicySet, Rule,
    Settings, Sleep,
};

pub(super) const GUEST: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
pub(super) const GATEWAY: Ip4 = Ip4 {
    octets: [10, 0, 2, 2],
};
pub(super) const NAT: Ip4 = Ip4 {
    octets: [192, 0, 2, 1],
};
pub(super) const PEER: Ip4 = Ip4 {
    octets: [198, 51, 100, 7],
};
pub(super) const GUEST6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 2, 0, 0, 0, 0x15);
pub(super) const NAT6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);
pub(super) const PEER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 7);
pub(super) const SERVER: At = (PEER, 443);
/// Number of flows that take many turns to walk over.
pub(super) const CROWD: u16 = 10_000;
pub(super) const UPLINK: IfIndex = IfIndex::new(3);

/// The broker's end of the channel.
#[derive(Default)]
pub(super) struct Broker {
    pub(super) messages: VecDeque<Command>,
    pub(super) ended: Vec<EndsToken>,
    pub(super) gone: bool,
    pub(super) reloaded: Vec<Reloaded>,
    /// VMs that fell idle (true) or were busy again, in order.
    pub(super) idle: Vec<(u32, bool)>,
    /// What was said of each of them.
    pub(super) silences: Vec<Silence>,
    pub(super) sleep_changes: Vec<(VmId, SleepChange)>,
}

/// Effect of a message on the engine.
type Command = Box<dyn FnOnce(&mut TestEngine)>;

impl Control<TestEngine> for Broker {
    fn serve(&mut self, engine: &mut TestEngine) -> io::Result<()> {
        if self.gone {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for command in self.messages.drain(..) {
            command(engine);
        }
        Ok(())
    }
    fn ended(&mut self, token: EndsToken) -> io::Result<()> {
        self.ended.push(token);
        Ok(())
    }
    fn reloaded(&mut self, reloaded: Reloaded) -> io::Result<()> {
        self.reloaded.push(reloaded);
        Ok(())
    }
    fn activity(&mut self, changes: ActivityChanges) -> io::Result<()> {
        self.silences
            .extend(changes.idle.iter().chain(&changes.busy).map(|(_, it)| *it));
        self.idle
            .extend(changes.idle.iter().map(|(id, _)| (id.get(), true)));
        self.idle
            .extend(changes.busy.iter().map(|(id, _)| (id.get(), false)));
        Ok(())
    }
    fn sleep_changes(&mut self, changes: Vec<(VmId, SleepChange)>) -> io::Result<()> {
        self.sleep_changes.extend(changes);
        Ok(())
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A flow log in memory.
#[derive(Clone, Default)]
pub(super) struct Log(pub(crate) Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .lock()
            .map_err(|_| io::Error::other("poisoned"))?
            .extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) type TestEngine = Engine<FakeDatapath, FakePort, FakeClock>;

pub(super) struct Rig {
    pub(super) kernel: KernelHandle,
    pub(super) engine: TestEngine,
    pub(super) broker: Broker,
    pub(super) log: Log,
}

pub(super) struct Setup {
    pub(super) slots: u32,
    pub(super) default: Action,
    pub(super) rules: Vec<Rule>,
    pub(super) max_flows: u32,
    pub(super) rate: u32,
    pub(super) nat_ports: std::ops::RangeInclusive<u16>,
    pub(super) eim_ports: Option<std::ops::RangeInclusive<u16>>,
    /// Behaviour of translated ports in the policy.
    pub(super) nat: NatSettings,
    /// Bounds of what is held for a VM that sleeps, in the policy.
    pub(super) sleep: Sleep,
    /// Events that the log writes.
    pub(super) events: Events,
    pub(super) rule_base: RuleIndex,
    /// Ports of the gateway that lead to the host's loopback; with one there is a relay.
    pub(super) listed: Vec<LoopbackPorts>,
    pub(super) forwards: Vec<Forward>,
    /// The VMs' prefix; with one, the host has IPv6 too, and each guest an address bound.
    pub(super) ipv6: Option<Ipv6Net>,
    /// That of VM 2, if it is another one.
    pub(super) second: Option<Ipv6Net>,
    /// The VMs' pool of source addresses. The host has them.
    pub(super) nat_addresses: &'static [&'static str],
    /// Whether that prefix is routed to the host.
    pub(super) is_routed: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            slots: 2_048,
            default: Action::Allow,
            rules: Vec::new(),
            max_flows: 1_000,
            rate: 1_000_000,
            nat_ports: DEFAULT_RANGE,
            eim_ports: None,
            nat: NatSettings::default(),
            sleep: Sleep::default(),
            events: Events::from_iter([Event::FlowEnd]),
            rule_base: RuleIndex::new(10),
            listed: Vec::new(),
            forwards: Vec::new(),
            ipv6: None,
            nat_addresses: &[],
            second: None,
            is_routed: false,
        }
    }
}

impl Rig {
    pub(super) fn new() -> Self {
        Self::with(Setup::default())
    }

    pub(super) fn with(setup: Setup) -> Self {
        let kernel = Kernel::new(setup.slots);
        for row in 1..=3 {
            kernel
                .borrow_mut()
                .add_vm(row, 100 + u32::from(row), GUEST, GATEWAY, 1_500);
        }
        let log = Log::default();
        let (mut engine, broker) = start(&kernel, &setup, &log, 1, &HashSet::new());
        engine.finish_adoption().unwrap();
        Self {
            kernel,
            engine,
            broker,
            log,
        }
    }

    /// VM 1 has [`CROWD`] flows, to the peers that `to` names.
    pub(super) fn crowded(to: impl Fn(u16) -> Ip4) -> Self {
        let mut rig = Self::with(Setup {
            slots: 32_768,
            max_flows: 32_768,
            rate: 32_768,
            ..Setup::default()
        });
        for number in 0..CROWD {
            // A translated port serves each destination once.
            let to = (to(number), 9 + number / 1_000);
            rig.guest(1, &udp((GUEST, 5_000 + number), to, b"x"));
        }
        rig.at_world();
        assert_eq!(rig.flows(), usize::from(CROWD));
        rig
    }

    /// Kills the engine; another takes its place, and has adopted all flows.
    pub(super) fn restart(self, setup: &Setup) -> (Self, Adoption) {
        let mut rig = self.restart_in_steps(setup);
        let adoption = rig.engine.finish_adoption().unwrap();
        (rig, adoption)
    }

    /// Kills the engine; another takes its place, and has yet to adopt the flows.
    pub(super) fn restart_in_steps(self, setup: &Setup) -> Self {
        let Self {
            kernel,
            engine,
            log,
            ..
        } = self;
        drop(engine);
        let text = log.0.lock().unwrap().clone();
        let recorded = crate::record::recorded_ids(&mut io::Cursor::new(text)).unwrap();
        let (engine, broker) = start(&kernel, setup, &log, 2, &recorded);
        Self {
            kernel,
            engine,
            broker,
            log,
        }
    }

    /// Runs one turn of the loop.
    pub(super) fn turn(&mut self) {
        self.engine.turn(Some(0), &mut self.broker).unwrap();
    }

    /// Runs until the engine is stopped.
    pub(super) fn run(&mut self) -> Result<OnExit, EngineError> {
        self.engine.run(&mut self.broker)
    }

    /// A message arrives, which the next turn reads.
    pub(super) fn send(&mut self, command: impl FnOnce(&mut TestEngine) + 'static) {
        self.broker.messages.push_back(Box::new(command));
    }

    /// Delivers a message and runs a turn. Returns the result of the command.
    pub(super) fn tell<T: 'static>(
        &mut self,
        command: impl FnOnce(&mut TestEngine) -> T + 'static,
    ) -> T {
        let answer = Rc::new(Cell::new(None));
        let to = answer.clone();
        self.send(move |engine| to.set(Some(command(engine))));
        self.turn();
        answer.take().expect("the turn reads every message")
    }

    /// The host's network changes.
    pub(super) fn follow(&mut self, network: NetworkView) {
        self.tell(move |engine| engine.set_network(&network));
    }

    /// Takes the tokens of what has ended.
    pub(super) fn ended(&mut self) -> Vec<EndsToken> {
        std::mem::take(&mut self.broker.ended)
    }

    /// Advances time; the loop runs whenever a timer is due.
    pub(super) fn pass(&mut self, ns: u64) {
        let end = self.kernel.borrow().now_ns + ns;
        loop {
            self.turn();
            let now = self.kernel.borrow().now_ns;
            if now >= end && self.engine.timeout_ns() != Some(0) {
                break;
            }
            let step = self.engine.timeout_ns().unwrap_or(u64::MAX).max(1_000_000);
            self.kernel.borrow_mut().now_ns = now.saturating_add(step).min(end);
        }
    }

    /// VM `row` sends; the engine turns.
    pub(super) fn guest(&mut self, row: u16, packet: &[u8]) -> Handling {
        let way = self
            .kernel
            .borrow_mut()
            .guest_sends(row, VirtioNetHdr::default(), packet);
        self.turn();
        way
    }

    /// The world sends; the engine turns.
    pub(super) fn world(&mut self, packet: &[u8]) -> Handling {
        let way = self
            .kernel
            .borrow_mut()
            .world_sends(VirtioNetHdr::default(), packet);
        self.turn();
        way
    }

    /// Takes what arrived in the world.
    pub(super) fn at_world(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.kernel.borrow_mut().at_world)
    }

    /// Takes what arrived at the guests.
    pub(super) fn at_guest(&mut self) -> Vec<(u32, Vec<u8>)> {
        std::mem::take(&mut self.kernel.borrow_mut().at_guest)
    }

    /// Opens a TCP connection from this port of VM 1 and returns the translated address.
    pub(super) fn connect(&mut self, port: u16, isn: u32) -> At {
        self.connect_from(1, port, isn)
    }

    pub(super) fn connect_from(&mut self, row: u16, port: u16, isn: u32) -> At {
        self.guest(row, &syn((GUEST, port), SERVER, isn));
        let sent = self.at_world().pop().expect("the SYN goes out");
        let octets = [sent[12], sent[13], sent[14], sent[15]];
        let nat = (Ip4 { octets }, u16::from_be_bytes([sent[20], sent[21]]));
        assert_eq!(
            self.world(&syn_ack(SERVER, nat, 9_000, isn + 1)),
            Handling::Fast
        );
        assert_eq!(
            self.guest(row, &ack((GUEST, port), SERVER, 0, isn + 1, 9_001)),
            Handling::Fast
        );
        self.at_world();
        self.at_guest();
        nat
    }

    /// Both sides close, the guest first or the peer.
    pub(super) fn close(&mut self, port: u16, nat: At, guest_first: bool) {
        use slipgate_abi::tcp::Flags;
        let guest = (GUEST, port);
        if guest_first {
            self.guest(1, &ack(guest, SERVER, Flags::FIN, 2, 2));
            self.world(&ack(SERVER, nat, Flags::FIN, 2, 3));
            self.guest(1, &ack(guest, SERVER, 0, 3, 3));
        } else {
            self.world(&ack(SERVER, nat, Flags::FIN, 2, 2));
            self.guest(1, &ack(guest, SERVER, Flags::FIN, 2, 3));
            self.world(&ack(SERVER, nat, 0, 3, 3));
        }
        self.at_world();
        self.at_guest();
    }

    pub(super) fn flows(&self) -> usize {
        self.engine.core.nat.flows.len()
    }

    pub(super) fn refused(&self, row: u16, reason: Refusal) -> u64 {
        self.kernel
            .borrow()
            .stats(row)
            .snapshot()
            .0
            .refused
            .get(reason)
    }

    pub(super) fn dropped(&self, row: u16, reason: DropReason) -> u64 {
        self.kernel
            .borrow()
            .stats(row)
            .snapshot()
            .1
            .get(reason)
            .packets
    }

    pub(super) fn records(&self) -> Vec<serde_json::Value> {
        let log = self.log.0.lock().unwrap();
        let lines = log.split(|b| *b == b'\n').filter(|line| !line.is_empty());
        lines
            .map(|line| serde_json::from_slice(line).expect("a JSON line"))
            .collect()
    }

    /// Checks that no state of any flow is left.
    pub(super) fn assert_empty(&self) {
        let kernel = self.kernel.borrow();
        assert_eq!(self.flows(), 0);
        assert!(kernel.flows.is_empty(), "{:?}", kernel.flows);
        assert!(kernel.flows6.is_empty(), "{:?}", kernel.flows6);
        assert_eq!(kernel.slots_in_use(), []);
    }

    /// Every flow has both tuples, pointing to its slot, and there are no others.
    pub(super) fn assert_paired(&self) {
        let kernel = self.kernel.borrow();
        let flows = &self.engine.core.nat.flows;
        let mut pairs = 0;
        for slot in flows.all() {
            let entry = flows.entry(slot).unwrap();
            let linked = matches!(
                entry.state,
                crate::flow::State::Live | crate::flow::State::Ending
            );
            if !linked {
                continue;
            }
            pairs += 1;
            for tuple in [entry.guest, entry.world()] {
                let found = kernel.flow_by(&tuple);
                assert_eq!(
                    found.map(|f| (f.index(), f.generation)),
                    Some((slot, entry.generation))
                );
            }
        }
        assert_eq!(kernel.flow_entries(), 2 * pairs);
    }
}

pub(super) fn network() -> NetworkView {
    let host = HostAddress {
        ifindex: UPLINK,
        addr: "192.0.2.1/24".parse().unwrap(),
        broadcast: None,
        source: Default::default(),
    };
    let default = RouteEntry {
        prefix: "0.0.0.0/0".parse().unwrap(),
        kind: RouteKind::Unicast,
        ifindex: UPLINK,
        gateway: Some([192, 0, 2, 254].into()),
        prefsrc: None,
        metric: 0,
        mtu: None,
        share: Default::default(),
    };
    NetworkView {
        routes: RouteSnapshot {
            vm_uplinks: Vec::new(),
            further: Default::default(),
            uplink_ifindex: Some(UPLINK),
            addresses: vec![host],
            routes: vec![default],
        },
        local: LocalAddresses {
            host: vec![[192, 0, 2, 1].into()],
            guests: Vec::new(),
        },
        links: vec![Link {
            ifindex: UPLINK,
            name: "eth0".into(),
            mtu: 1_400,
            has_l2: true,
        }],
    }
}

/// The host's network with an IPv6 address and a default route for IPv6.
pub(super) fn network_of_both() -> NetworkView {
    let mut network = network();
    network.routes.addresses.push(HostAddress {
        ifindex: UPLINK,
        addr: "2001:db8:1::1/64".parse().unwrap(),
        broadcast: None,
        source: Default::default(),
    });
    network.routes.routes.push(RouteEntry {
        prefix: "::/0".parse().unwrap(),
        kind: RouteKind::Unicast,
        ifindex: UPLINK,
        gateway: Some("fe80::1".parse().unwrap()),
        prefsrc: None,
        metric: 0,
        mtu: None,
        share: Default::default(),
    });
    network.local.host.push(NAT6.into());
    network
}

/// Gives the host these addresses.
pub(super) fn add_addresses(network: &mut NetworkView, addresses: impl Iterator<Item = IpAddr>) {
    for address in addresses {
        network.local.host.push(address);
        network.routes.addresses.push(HostAddress {
            ifindex: UPLINK,
            addr: address.into(),
            broadcast: None,
            source: Default::default(),
        });
    }
}

pub(super) fn spec(row: u16, setup: &Setup) -> VmSpec {
    let second = setup.second.filter(|_| row == 2);
    let prefix = second.or(setup.ipv6);
    VmSpec {
        id: VmId::new(100 + u32::from(row)),
        row: VmRow::new(row),
        name: format!("vm{row}"),
        labels: Default::default(),
        guest: GUEST.into(),
        gateway: GATEWAY.into(),
        dns: [10, 0, 2, 3].into(),
        prefix_len: 24,
        ipv6: prefix.map(|prefix| GuestIpv6 {
            prefix,
            is_routed: setup.is_routed,
        }),
        guest_mac: None,
        gateway_mac: [2, 0, 0, 0, 0, 1],
        mtu: 1_500,
        max_flows: setup.max_flows,
        new_flows_per_second: setup.rate,
        policy: 0,
        host_loopback: Vec::new(),
        dns_per_second: 0,
        idle_after_s: 0,
        uplink: None,
        routes: None,
        nat_addresses: AddressPool::parse(setup.nat_addresses).unwrap(),
        is_idle: false,
    }
}

fn start(
    kernel: &KernelHandle,
    setup: &Setup,
    log: &Log,
    epoch: u32,
    recorded: &HashSet<TranslatedId>,
) -> (TestEngine, Broker) {
    let policy = Policy::new(setup.default, setup.rules.clone()).with(Settings {
        host_loopback: setup.listed.clone(),
        nat: setup.nat,
        sleep: setup.sleep,
        ..Settings::default()
    });
    let parts = Parts {
        datapath: FakeDatapath::new(kernel, 0, epoch),
        port: FakePort::new(kernel),
        clock: FakeClock::new(kernel),
        // No resolver: no question leaves this process.
        services: Services::new(
            dns::Proxy::new(&[], dns::Limits::default(), Box::new(dns::AllowAll)),
            Relay::new(Limits::default()),
        ),
        judge: Judge::shared(PolicySet::numbered_from(
            setup.rule_base.get(),
            vec![policy],
        )),
        nat_ports: setup.nat_ports.clone(),
        log: FlowLog::new(Some(Box::new(log.clone()))).of(setup.events),
    };
    let mut engine = Engine::new(parts).unwrap();
    engine.set_eim_ports(setup.eim_ports.clone());
    let mut network = match setup.ipv6 {
        Some(_) => network_of_both(),
        None => network(),
    };
    let pool = AddressPool::parse(setup.nat_addresses).unwrap();
    add_addresses(&mut network, pool.addresses());
    engine.set_network(&network);
    for row in 1..=3 {
        let spec = spec(row, setup);
        let mac = spec.gateway_mac;
        let addresses = |ipv6: GuestIpv6| {
            let prefix = ipv6.prefix.network();
            (
                prefix.into(),
                ipv6.gateway().into(),
                ipv6.gateway_link_local(mac).into(),
            )
        };
        let vm6 = kernel.borrow().vm6(row);
        vm6.set(spec.ipv6.map(addresses));
        if let Some(ipv6) = spec.ipv6 {
            let [.., last] = GUEST6.segments();
            let guest = ipv6.prefix.network().to_bits() | u128::from(last);
            vm6.bind(1, Ipv6Addr::from_bits(guest).into(), 1);
        }
        engine.set_vm(spec);
    }
    engine.set_forwards(setup.forwards.clone());
    engine.begin_adoption(recorded.clone());
    (engine, Broker::default())
}
