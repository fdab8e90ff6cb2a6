//! `slipgate why` says what admission does, whatever policies, quotas, flows and routes there are.
use std::net::{TcpListener, UdpSocket};

use proptest::prelude::*;
use slipgate_abi::{IfIndex, Ip4, Protocol, Refusal, RuleIndex, Tuple, VmId, VmRow, tcp::Flags};
use slipgate_model::{RouteEntry, RouteKind, WhyAnswer};

use super::{reload::instead, rig::*};
use crate::{
    clock::MILLISECOND_NS,
    control::Reload,
    datapath::Tables as _,
    dns::{
        NamePolicy,
        chain::tests::{a, answer},
    },
    name_gate::ByRules,
    packet::icmp::v4::ECHO_REQUEST,
    state::Forward,
};
use slipgate_policy::{
    Action, Filtering, LocalAddresses, LoopbackPorts, Mapping, Name, NatBehaviour, NatSettings,
    Policy, Rule, Settings, wire,
};

/// A SYN's, as Linux sends them: MSS, SACK permitted, timestamps.
const OPTIONS: [u8; 16] = [2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0];
const NAMES: [&str; 3] = ["api.ok.test", "bad.ok.test", "www.other.test"];
const RULES: [&str; 20] = [
    "allow 198.51.100.0/24",
    "allow 198.51.100.0/24:80",
    "allow 0.0.0.0/0/udp",
    "allow 10.0.0.0/8",
    "allow 10.9.8.7",
    "allow 192.0.2.1",
    "allow 8.8.8.8:443/tcp",
    "allow *.ok.test",
    "allow www.other.test:80",
    "inspect 198.51.100.0/24",
    "inspect 198.51.100.7:443",
    "inspect api.ok.test:443",
    "inspect *.other.test",
    "inspect 10.0.2.2:8081",
    "deny 198.51.100.7:443/tcp",
    "deny 198.51.100.0/24/udp",
    "deny 203.0.113.0/24",
    "deny 0.0.0.0/0/icmp",
    "deny 10.0.2.2:8080/tcp",
    "deny bad.ok.test",
];
/// Remotes of each kind: allowed by rules, by name, private, the host's, a resolver's, without a
/// route, without an uplink, and of the guest's own network.
const REMOTES: [[u8; 4]; 10] = [
    PEER.octets,
    [198, 51, 100, 8],
    [203, 0, 113, 9],
    [203, 0, 113, 10],
    [10, 9, 8, 7],
    NAT.octets,
    [8, 8, 8, 8],
    [100, 100, 0, 1],
    [198, 18, 0, 1],
    [10, 0, 2, 9],
];
/// First port for endpoint-independent mappings.
const EIM_FIRST: u16 = 50_000;
const OTHER_LINK: IfIndex = IfIndex::new(9);

#[derive(Clone, Debug)]
struct Of {
    default: Action,
    rules: Vec<&'static str>,
    is_learning: bool,
    lists_loopback: bool,
    /// Behaviour of translated ports in the policy.
    nat: NatBehaviour,
}

#[derive(Clone, Debug)]
struct Quotas {
    max_flows: u32,
    rate: u32,
    ports: u16,
    /// Number of ports for endpoint-independent mappings.
    eim_ports: u16,
    reserved: bool,
    /// Whether the third VM has an uplink of its own.
    own_uplink: bool,
}

#[derive(Clone, Debug)]
enum Step {
    /// A new flow of a guest's, about which `why` is asked before.
    Open {
        row: u16,
        protocol: Protocol,
        remote: [u8; 4],
        port: u16,
    },
    /// A VM is told an address of a name.
    Tell {
        row: u16,
        name: &'static str,
        remote: [u8; 4],
    },
    /// The world opens a flow to VM 1, or to a port that a mapping may have.
    Knock {
        protocol: Protocol,
        from: u16,
        mapped: Option<u16>,
    },
    /// Both ends close a connection, the guest first or the peer.
    Close {
        guest_first: bool,
        which: prop::sample::Index,
    },
    /// A peer answers, or ends, a flow.
    Answer {
        flags: u8,
        which: prop::sample::Index,
    },
    Pass {
        ms: u64,
    },
    Reload {
        policies: Vec<Of>,
    },
}

fn of() -> impl Strategy<Value = Of> {
    let default = prop::sample::select(vec![Action::Allow, Action::Deny]);
    let rules = prop::collection::vec(prop::sample::select(RULES.to_vec()), 0..6);
    let bools = (prop::bool::weighted(0.2), any::<bool>());
    (default, rules, bools, nat()).prop_map(
        |(default, rules, (is_learning, lists_loopback), nat)| Of {
            default,
            rules,
            is_learning,
            lists_loopback,
            nat,
        },
    )
}

fn nat() -> impl Strategy<Value = NatBehaviour> {
    let filtering = prop::sample::select(vec![
        Filtering::AddressAndPortDependent,
        Filtering::AddressDependent,
        Filtering::EndpointIndependent,
    ]);
    let mapped = (filtering, any::<bool>()).prop_map(|(filtering, hairpin)| NatBehaviour {
        mapping: Mapping::EndpointIndependent,
        filtering,
        hairpin,
    });
    prop_oneof![1 => Just(NatBehaviour::default()), 2 => mapped]
}

fn quotas() -> impl Strategy<Value = Quotas> {
    let rate = prop::sample::select(vec![2u32, 1_000]);
    let bools = (any::<bool>(), any::<bool>());
    let ports = (1u16..5, 1u16..7);
    (1u32..7, rate, ports, bools).prop_map(
        |(max_flows, rate, (ports, eim_ports), (reserved, own_uplink))| Quotas {
            max_flows,
            rate,
            ports,
            eim_ports,
            reserved,
            own_uplink,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let row = 1u16..=3;
    let protocol = prop::sample::select(vec![
        Protocol::Tcp,
        Protocol::Tcp,
        Protocol::Udp,
        Protocol::Icmp,
    ]);
    // Mostly one, so that ports toward it run short.
    let remote = prop_oneof![3 => Just(PEER.octets), 2 => prop::sample::select(REMOTES.to_vec())];
    let port = prop_oneof![3 => Just(443u16), 1 => prop::sample::select(vec![80u16, 853])];
    let listed = prop::sample::select(vec![8_080u16, 8_081, 9_999]);
    let transport = prop::sample::select(vec![Protocol::Tcp, Protocol::Udp]);
    let flags = prop::sample::select(vec![
        Flags::SYN | Flags::ACK,
        Flags::RST | Flags::ACK,
        Flags::FIN | Flags::ACK,
    ]);
    let open = |(row, protocol, remote, port)| Step::Open {
        row,
        protocol,
        remote,
        port,
    };
    prop_oneof![
        10 => (row.clone(), protocol, remote.clone(), port).prop_map(open),
        2 => (row.clone(), transport.clone(), Just(GATEWAY.octets), listed).prop_map(open),
        4 => (row.clone(), transport.clone(), Just(NAT.octets), prop_oneof![
            4 => EIM_FIRST..EIM_FIRST + 6,
            1 => prop::sample::select(vec![8_080u16, 5_353]),
        ])
        .prop_map(open),
        3 => (row, prop::sample::select(NAMES.to_vec()), remote)
            .prop_map(|(row, name, remote)| Step::Tell { row, name, remote }),
        2 => (transport, 1_000u16..1_010, prop::option::of(EIM_FIRST..EIM_FIRST + 6))
            .prop_map(|(protocol, from, mapped)| Step::Knock { protocol, from, mapped }),
        3 => (any::<bool>(), any::<prop::sample::Index>())
            .prop_map(|(guest_first, which)| Step::Close { guest_first, which }),
        4 => (flags, any::<prop::sample::Index>())
            .prop_map(|(flags, which)| Step::Answer { flags, which }),
        4 => prop_oneof![0u64..400, 0u64..40_000].prop_map(|ms| Step::Pass { ms }),
        1 => prop::collection::vec(of(), 3).prop_map(|policies| Step::Reload { policies }),
    ]
}

/// Fate of a flow, as `why` predicts it or as it is observed afterwards.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Became {
    Translated { rule: String, by: String },
    Inspected { rule: String, by: String },
    Relayed { rule: String },
    Hairpin { rule: String, vm: String },
    Refused { reason: String },
    StaysOnLink,
}

impl Became {
    fn said(why: &WhyAnswer) -> Self {
        let rule = why.rule.clone();
        let by = || why.via.clone().expect("a way out");
        match (&why.refusal, why.admitted) {
            (Some(reason), false) => Self::Refused {
                reason: reason.clone(),
            },
            (None, true) if why.outcome.contains("inspected") => Self::Inspected { rule, by: by() },
            (None, true) if why.outcome.contains("(hairpin) to VM ") => {
                let (_, vm) = why.outcome.split_once("(hairpin) to VM ").unwrap();
                let vm = vm.split(',').next().unwrap().to_owned();
                Self::Hairpin { rule, vm }
            }
            (None, true) if why.outcome.contains("relayed") => Self::Relayed { rule },
            (None, true) => Self::Translated { rule, by: by() },
            (None, false) => Self::StaysOnLink,
            (Some(_), true) => panic!("{why:?}"),
        }
    }
}

struct World {
    rig: Rig,
    quotas: Quotas,
    next_port: u16,
    rule_base: RuleIndex,
    host_ports: (u16, u16),
    _services: (TcpListener, UdpSocket),
    /// Tuples of the packets sent to the world: own end, remote end, protocol.
    sent: Vec<(At, At, u8)>,
}

impl World {
    fn new(policies: &[Of], quotas: Quotas) -> Self {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let forward = |protocol, host_port, rule| Forward {
            protocol,
            host: [0, 0, 0, 0].into(),
            host_port,
            vm: VmId::new(101),
            vm_row: VmRow::new(1),
            guest_port: 80,
            rule,
            is_own: false,
        };
        let mut rig = Rig::with(Setup {
            nat_ports: 61_000..=60_999 + quotas.ports,
            eim_ports: Some(EIM_FIRST..=EIM_FIRST - 1 + quotas.eim_ports),
            forwards: vec![
                forward(Protocol::Tcp, 8_080, RuleIndex::new(13)),
                forward(Protocol::Udp, 5_353, RuleIndex::new(13)),
            ],
            ..Setup::default()
        });
        {
            let mut kernel = rig.kernel.borrow_mut();
            kernel.forwards.insert((NAT, 8_080, 6), (1, 101));
            kernel.forwards.insert((NAT, 5_353, 17), (1, 101));
        }
        let mut network = network();
        let default = network.routes.routes[0];
        let other = |prefix: &str, kind, ifindex| RouteEntry {
            prefix: prefix.parse().unwrap(),
            kind,
            ifindex,
            gateway: None,
            ..default
        };
        network.routes.routes.extend([
            other("100.100.0.0/16", RouteKind::Blackhole, IfIndex::NONE),
            other("198.18.0.0/15", RouteKind::Unicast, OTHER_LINK),
            RouteEntry {
                ifindex: OTHER_LINK,
                metric: 9,
                ..default
            },
        ]);
        if quotas.own_uplink {
            network.routes.vm_uplinks = vec![OTHER_LINK];
        }
        rig.follow(network);
        if quotas.own_uplink {
            let vm = slipgate_model::VmSpec {
                uplink: Some(OTHER_LINK),
                ..spec(3, &Setup::default())
            };
            rig.tell(|engine| engine.set_vm(vm));
        }
        if quotas.reserved {
            let ports = vec![(Protocol::Tcp, 61_000), (Protocol::Udp, 61_000)];
            rig.tell(|engine| engine.set_reserved_ports(ports));
        }
        let host_ports = (
            tcp.local_addr().unwrap().port(),
            udp.local_addr().unwrap().port(),
        );
        let mut world = Self {
            rig,
            quotas,
            next_port: 20_000,
            rule_base: RuleIndex::new(30),
            host_ports,
            _services: (tcp, udp),
            sent: Vec::new(),
        };
        world.reload(policies);
        world
    }

    fn policy(&self, of: &Of) -> Policy {
        let rules = of.rules.iter().map(|rule| {
            let (action, text) = rule.split_once(' ').unwrap();
            let action = match action {
                "allow" => Action::Allow,
                "inspect" => Action::Inspect,
                _ => Action::Deny,
            };
            Rule::parse(action, text).unwrap()
        });
        let listed = |text: String| -> LoopbackPorts { text.parse().unwrap() };
        let (tcp, udp) = self.host_ports;
        let host_loopback = vec![
            listed(format!("8080:{tcp}/tcp")),
            listed(format!("8080:{udp}/udp")),
            listed(format!("8081:{tcp}/tcp")),
        ];
        Policy::new(of.default, rules.collect::<Vec<_>>()).with(Settings {
            name: of.is_learning.then(|| "learning vm".to_owned()),
            is_learning: of.is_learning,
            host_loopback: match of.lists_loopback {
                true => host_loopback,
                false => Vec::new(),
            },
            nat: NatSettings {
                udp: of.nat,
                tcp: of.nat,
            },
            ..Settings::default()
        })
    }

    fn reload(&mut self, policies: &[Of]) {
        let vms = (1..=3).map(|row| {
            let mut vm = spec(row, &Setup::default());
            vm.policy = u32::from(row) - 1;
            vm.max_flows = self.quotas.max_flows;
            vm.new_flows_per_second = self.quotas.rate;
            vm.uplink = (row == 3 && self.quotas.own_uplink).then_some(OTHER_LINK);
            vm
        });
        let policies: Vec<Policy> = policies.iter().map(|of| self.policy(of)).collect();
        self.rule_base = RuleIndex::new(70 - self.rule_base.get());
        let reload = Reload {
            id: 1,
            policies: instead(policies, self.rule_base.get()),
            local: LocalAddresses {
                host: vec![NAT.into()],
                guests: Vec::new(),
            },
            vms: vms.collect(),
            strictly: Vec::new(),
        };
        self.rig.tell(|engine| engine.reload(reload));
    }

    fn relayed(&self, row: u16) -> usize {
        let live = self.rig.engine.services.relay.live(0);
        live.filter(|(flow, _)| flow.vm == VmId::new(100 + u32::from(row)))
            .count()
    }

    fn refusals(&self, row: u16) -> Vec<u64> {
        let reasons = Refusal::ALL.iter();
        reasons
            .map(|reason| self.rig.refused(row, *reason))
            .collect()
    }

    /// Refusals that were counted: reason, rule, number.
    fn noted(&self, row: u16) -> Vec<(String, Option<String>, u64)> {
        let core = &self.rig.engine.core;
        let text = |rule| core.rules.texts.known(rule);
        let samples = core
            .journal
            .refusals
            .samples(VmId::new(100 + u32::from(row)), "", text, 0);
        let noted = samples.into_iter().map(|s| (s.reason, s.rule, s.count));
        noted.collect()
    }

    /// Asks, then sends; what was said and what became of it must be the same.
    fn open(
        &mut self,
        row: u16,
        protocol: Protocol,
        remote: [u8; 4],
        port: u16,
    ) -> Result<(), TestCaseError> {
        let remote = Ip4 { octets: remote };
        self.next_port += 1;
        let from = self.next_port;
        let (guest, to) = ((GUEST, from), (remote, port));
        let (packet, to) = match protocol {
            Protocol::Tcp => (tcp(guest, to, Flags::SYN, 7, 0, &OPTIONS, &[]), to),
            Protocol::Udp => (udp(guest, to, b"data"), to),
            Protocol::Icmp | Protocol::Icmpv6 => {
                (echo(GUEST, remote, true, from, b"data"), (remote, 0))
            }
        };
        // What is due is done, so that nothing comes between the question and the packet.
        self.rig.turn();
        let why = self.rig.asks_why(row, to, protocol);
        let said = Became::said(&why);
        let (relayed, refusals) = (self.relayed(row), self.refusals(row));
        let noted = self.noted(row);
        self.rig.guest(row, &packet);
        let (became, rule) = self.became(row, (guest, to, protocol), relayed, &refusals, &noted);
        prop_assert_eq!(&said, &became, "{:?} {:?}", to, why);
        if let Some(rule) = rule {
            prop_assert_eq!(&why.rule, &rule, "{:?}", why);
        }
        prop_assert_ne!(why.refusal.as_deref(), Some("table_full"));
        self.collect();
        Ok(())
    }

    /// Returns the VM to which a packet to this port of the host's leads, whoever lets it in.
    fn leads_to(&self, to: At, protocol: Protocol) -> String {
        let world = Tuple::of_words(Tuple::WORLD, to, (Ip4::UNSPECIFIED, 0), protocol as u8);
        let core = &self.rig.engine.core;
        let mapped = core.nat.flows.mappings.by_outside(&world.into());
        // The forwards are those of VM 1.
        let vm = mapped.map_or(101, |(inside, _)| inside.vm.get());
        format!("vm{}", vm - 100)
    }

    /// Observes the fate of a flow, and the rule that refused it if one did.
    fn became(
        &self,
        row: u16,
        (guest, to, protocol): (At, At, Protocol),
        relayed: usize,
        refusals: &[u64],
        noted: &[(String, Option<String>, u64)],
    ) -> (Became, Option<String>) {
        let core = &self.rig.engine.core;
        let tuple = Tuple {
            scope: 100 + u32::from(row),
            local: guest.0,
            remote: to.0,
            local_port: guest.1,
            remote_port: to.1,
            protocol: protocol as u8,
            pad: [0; 3],
        };
        // What was let in may have ended by what it said.
        if let Some(slot) = core.nat.flows.by_guest(&tuple.into()) {
            let live = core.nat.datapath.slot(slot);
            let rule = core
                .rules
                .texts
                .text(live.rule_index(), &core.nat.datapath)
                .unwrap();
            if core.nat.is_hairpin(slot) {
                let (rule, vm) = (rule.into_owned(), self.leads_to(to, protocol));
                return (Became::Hairpin { rule, vm }, None);
            }
            let next_hop = match std::net::Ipv4Addr::from(to.0) {
                on_link if on_link.octets()[..2] == [198, 18] => on_link,
                _ => [192, 0, 2, 254].into(),
            };
            let by = format!(
                "{} by {next_hop} on ifindex {}",
                std::net::Ipv4Addr::from(live.nat()),
                live.uplink().get()
            );
            let rule = rule.into_owned();
            let is_held = core.nat.flows.entry(slot).is_some_and(|e| e.is_held());
            let became = match is_held {
                true => Became::Inspected { rule, by },
                false => Became::Translated { rule, by },
            };
            return (became, None);
        }
        let now = self.refusals(row);
        let mut more = Refusal::ALL.iter().zip(now.iter().zip(refusals));
        let refused = more.find(|(_, (now, before))| now > before);
        if let Some((reason, _)) = refused {
            let mut noted_now = self.noted(row).into_iter();
            let newest = noted_now.find(|one| !noted.contains(one));
            let (name, rule, _) = newest.expect("a refusal is noted");
            assert_eq!(name, reason.name());
            let reason = reason.name().to_owned();
            return (Became::Refused { reason }, rule);
        }
        if self.relayed(row) > relayed {
            let relay = &self.rig.engine.services.relay;
            let flow = relay.live(0).find(|(flow, _)| flow.guest.port() == guest.1);
            let rule = flow
                .unwrap()
                .0
                .rule_text
                .as_deref()
                .unwrap_or_default()
                .to_owned();
            return (Became::Relayed { rule }, None);
        }
        (Became::StaysOnLink, None)
    }

    /// Takes what arrived; whoever was spoken to may answer.
    fn collect(&mut self) {
        for sent in self.rig.at_world() {
            let at = |place: usize| u16::from_be_bytes([sent[place], sent[place + 1]]);
            let remote = Ip4 {
                octets: [sent[16], sent[17], sent[18], sent[19]],
            };
            let (local, to) = match sent[9] {
                1 if sent[20] == ECHO_REQUEST => (at(24), 0),
                1 => continue,
                _ => (at(20), at(22)),
            };
            self.sent.push(((NAT, local), (remote, to), sent[9]));
        }
        self.rig.at_guest();
    }

    /// A connection is accepted, and both sides close it.
    fn close(&mut self, nat: At, server: At, guest_first: bool) {
        let world = Tuple {
            scope: Tuple::WORLD,
            local: nat.0,
            remote: server.0,
            local_port: nat.1,
            remote_port: server.1,
            protocol: 6,
            pad: [0; 3],
        };
        let flows = &self.rig.engine.core.nat.flows;
        let slot = flows.by_world(&world.into());
        let Some(entry) = slot.and_then(|slot| flows.entry(slot)).copied() else {
            return;
        };
        let (row, guest) = (entry.vm_row.get(), (GUEST, entry.guest.local_port));
        self.rig.world(&syn_ack(server, nat, 9_000, 8));
        self.rig.guest(row, &ack(guest, server, 0, 8, 9_001));
        let (first, second) = (9_001, 9_002);
        if guest_first {
            self.rig
                .guest(row, &ack(guest, server, Flags::FIN, 8, first));
            self.rig.world(&ack(server, nat, Flags::FIN, first, 9));
            self.rig.guest(row, &ack(guest, server, 0, 9, second));
        } else {
            self.rig.world(&ack(server, nat, Flags::FIN, first, 8));
            self.rig
                .guest(row, &ack(guest, server, Flags::FIN, 8, second));
            self.rig.world(&ack(server, nat, 0, second, 9));
        }
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Open {
                row,
                protocol,
                remote,
                port,
            } => return self.open(row, protocol, remote, port),
            Step::Tell { row, name, remote } => {
                let mut dns = ByRules(self.rig.engine.core.rules.judge.clone());
                let now_ns = self.rig.kernel.borrow().now_ns;
                let (vm, wire) = (100 + u32::from(row), wire(name).unwrap());
                if dns.question(VmId::new(vm), Name(&wire), 1) == Ok(()) {
                    let told = answer(name, &[a(name, 60, remote)]);
                    let _ = dns.answer(VmId::new(vm), Name(&wire), &told, 0, now_ns);
                }
            }
            Step::Knock {
                protocol,
                from,
                mapped,
            } => {
                let from = (PEER, from);
                let packet = match protocol {
                    Protocol::Tcp => syn(from, (NAT, mapped.unwrap_or(8_080)), 5),
                    _ => udp(from, (NAT, mapped.unwrap_or(5_353)), b"data"),
                };
                self.rig.world(&packet);
            }
            Step::Close { guest_first, which } if !self.sent.is_empty() => {
                let (nat, server, protocol) = self.sent[which.index(self.sent.len())];
                if protocol == 6 {
                    self.close(nat, server, guest_first);
                }
            }
            Step::Answer { flags, which } if !self.sent.is_empty() => {
                let (nat, server, protocol) = self.sent[which.index(self.sent.len())];
                let packet = match protocol {
                    6 => tcp(server, nat, flags, 9, 8, &[], &[]),
                    17 => udp(server, nat, b"reply"),
                    _ => echo(server.0, NAT, false, nat.1, b"data"),
                };
                self.rig.world(&packet);
            }
            Step::Answer { .. } | Step::Close { .. } => {}
            Step::Pass { ms } => self.rig.pass(ms * MILLISECOND_NS),
            Step::Reload { policies } => self.reload(&policies),
        }
        self.collect();
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
    #[test]
    fn why_says_what_admission_does(
        policies in prop::collection::vec(of(), 3),
        quotas in quotas(),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let mut world = World::new(&policies, quotas);
        for step in steps {
            world.step(step)?;
        }
    }
}
