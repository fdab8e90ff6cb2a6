//! Messages between processes, in their encoded form.
use serde_json::json;
use slipgate_abi::{IfIndex, RuleIndex, SlotIndex, VmId, VmRow};
use slipgate_ipc::{
    api::{ApiRequest, FromApi},
    client::{
        ClientAnswer, ClientRequest, MachineEvent, MachineNotice, MachineOrder, PassedOrder,
        Replaces, SavedSnapshot, SnapshotBase, Target, Version,
    },
    descriptors::Slot,
    engine::{
        EngineInventory, EngineReply, EngineRequest, FlowQuestion, FromEngine, GuestProtocol,
        HostAddress, Link, NetworkView, OnExit, RouteEntry, RouteKind, RouteSnapshot, Start,
        Subject, ToEngine, UserspaceStart, VmSpec, WhyAnswer,
    },
    metrics::FromMetrics,
    vmm::{FromVmm, GuestEnd, ToVmm, VmmEnd},
};
use slipgate_policy::LocalAddresses;

use super::Seeds;
use crate::messages::kind;

pub(super) fn messages() -> Seeds {
    let packet = |kind: u8, json: Vec<u8>| [&[kind, 1, 0][..], &json].concat();
    let line = |kind: u8, json: Vec<u8>| [&[kind][..], &json, b"\n"].concat();
    let question = || {
        EngineRequest::Why(FlowQuestion {
            address: [192, 0, 2, 1].into(),
            port: 443,
            protocol: 6,
            name: Some("a.test".into()),
        })
    };
    let network = NetworkView {
        routes: RouteSnapshot {
            vm_uplinks: Vec::new(),
            further: Default::default(),
            uplink_ifindex: Some(IfIndex::new(3)),
            addresses: vec![HostAddress {
                ifindex: IfIndex::new(3),
                addr: "192.0.2.1/24".parse().expect("a network"),
                broadcast: None,
                source: Default::default(),
            }],
            routes: vec![RouteEntry {
                prefix: "0.0.0.0/0".parse().expect("a network"),
                kind: RouteKind::Unicast,
                ifindex: IfIndex::new(3),
                gateway: Some([192, 0, 2, 254].into()),
                prefsrc: None,
                metric: 0,
                mtu: None,
                share: Default::default(),
            }],
        },
        local: LocalAddresses {
            host: vec![[192, 0, 2, 1].into()],
            guests: vec!["10.0.2.0/24".parse().expect("a network")],
        },
        links: vec![Link {
            ifindex: IfIndex::new(3),
            name: "eth0".into(),
            mtu: 1_500,
            has_l2: true,
        }],
    };
    let vm = VmSpec {
        id: VmId::new(1),
        row: VmRow::new(1),
        name: "a".into(),
        labels: Default::default(),
        guest: [10, 0, 2, 15].into(),
        gateway: [10, 0, 2, 2].into(),
        dns: [10, 0, 2, 3].into(),
        prefix_len: 24,
        ipv6: None,
        guest_mac: None,
        gateway_mac: [2, 0, 0, 0, 0, 1],
        mtu: 1_500,
        max_flows: 10,
        new_flows_per_second: 100,
        policy: 0,
        host_loopback: Vec::new(),
        dns_per_second: 0,
        idle_after_s: 0,
        uplink: None,
        routes: None,
        nat_addresses: Default::default(),
        is_idle: false,
    };
    let request = |about, request| ToEngine::Request {
        id: 1,
        about,
        request,
    };
    let of_vm = Some(Subject::Vm { row: VmRow::new(1) });
    let capture = || EngineRequest::Capture {
        to: Slot,
        packets: Some(9),
        seconds: None,
    };
    let to_engine: [(&str, ToEngine<Slot>); 8] = [
        ("vm", ToEngine::Vm(vm)),
        ("network", ToEngine::Network(network)),
        ("ask", request(of_vm, question())),
        ("capture-engine", request(of_vm, capture())),
        ("flow-log", ToEngine::FlowLog(Slot)),
        ("begin", ToEngine::Begin),
        ("ping", ToEngine::Ping { id: 1 }),
        ("shutdown", ToEngine::Shutdown(OnExit::Keep)),
    ];
    let reply = |reply| FromEngine::Reply { id: 1, reply };
    let from_engine = [
        ("ready", FromEngine::Ready { adopted: 7 }),
        (
            "told",
            reply(EngineReply::Why(WhyAnswer {
                admitted: false,
                rule: "--deny 192.0.2.0/24".into(),
                refusal: Some("rule".into()),
                outcome: "refused".into(),
                explanation: String::new(),
                via: None,
                lacks_address: false,
            })),
        ),
        (
            "inventory",
            reply(EngineReply::Inventory(EngineInventory {
                flows: vec![(SlotIndex::new(17), 3, "a.test".into())],
                next: Some(1),
                ..EngineInventory::default()
            })),
        ),
    ];
    let ended = FromVmm::Ended(Box::new(VmmEnd {
        outcome: GuestEnd::Exited { status: 7 },
        counters: serde_json::Value::Null,
        ran_us: 1,
        restarts: 1,
        first_line_us: None,
    }));
    let reset = FromVmm::Reset { report: None };
    let counted = FromVmm::Counters {
        id: 1,
        counters: json!({"vcpus": [{"other": 0}]}),
    };
    let to_vmm: [(&str, ToVmm<Slot>); 3] = [
        ("go", ToVmm::Go),
        ("counters", ToVmm::Counters { id: 1 }),
        ("after-reset", ToVmm::AfterReset { begins: true }),
    ];
    let of_engine = |about, ask| ClientRequest::Engine {
        about: Some(about),
        ask,
    };
    let snapshot = || PassedOrder::Snapshot {
        to: "warm".into(),
        base: Some("base".into()),
        sleep: true,
    };
    let order = MachineOrder::Differences {
        state: Slot,
        memory: Slot,
        bases: vec![SnapshotBase {
            state: Slot,
            memory: Slot,
        }],
    };
    let (vm, passed) = ("a".to_owned(), snapshot());
    let clients: [(&str, ClientRequest<Slot>); 6] = [
        ("machine-snapshot", ClientRequest::Machine { order }),
        (
            "passed-snapshot",
            ClientRequest::OrderMachine { vm, order: passed },
        ),
        ("question", of_engine(Target::Vm("a".into()), question())),
        (
            "capture",
            of_engine(Target::Flow("5f3a91c2-17-3".into()), capture()),
        ),
        ("stop", ClientRequest::Stop { keep: true }),
        (
            "apply",
            ClientRequest::Apply {
                file: Some("/etc/policy.toml".into()),
            },
        ),
    ];
    let mut seeds = starts(packet);
    seeds.extend(
        to_engine
            .iter()
            .map(|(name, m)| (*name, packet(kind::TO_ENGINE, json(m)))),
    );
    seeds.extend(
        from_engine
            .iter()
            .map(|(name, m)| (*name, packet(kind::TO_BROKER, json(m)))),
    );
    seeds.extend(
        to_vmm
            .iter()
            .map(|(name, m)| (*name, packet(kind::TO_VMM, json(m)))),
    );
    for (name, message) in [("ended", ended), ("counted", counted), ("reset", reset)] {
        seeds.push((name, packet(kind::FROM_VMM, json(&message))));
    }
    let vm = serde_json::from_value(json!({ "name": "a", "tap": "tap0", "labels": { "k": "v" } }));
    let vm = Box::new(vm.expect("a definition"));
    for (name, request) in [
        (
            "put",
            ApiRequest::PutVm {
                vm,
                replaces: Replaces::AnyOf(vec![Version::of(b"a")]),
                tap: Some(Slot),
            },
        ),
        ("list", ApiRequest::ListVms),
        ("get", ApiRequest::GetVm { name: "a".into() }),
        (
            "activity",
            ApiRequest::Activity {
                vm: "a".into(),
                from: 4_096,
            },
        ),
        ("list_machines", ApiRequest::ListMachines),
        (
            "order_machine",
            ApiRequest::OrderMachine {
                vm: "a".into(),
                order: snapshot(),
            },
        ),
        ("remove", ApiRequest::RemoveVm { name: "a".into() }),
        ("keep", ApiRequest::KeepVm { name: "a".into() }),
        (
            "cut_flow",
            ApiRequest::Cut {
                what: Target::Flow("1.2.3".into()),
            },
        ),
    ] {
        let message = FromApi { id: 1, request };
        seeds.push((name, packet(kind::FROM_API, json(&message))));
    }
    for (name, text) in [
        (
            "http_put",
            "PUT /v1/vms/a\n{\"tap\": \"tap0\", \"quotas\": {\"max_flows\": 5}}",
        ),
        ("http_policy", "PUT /v1/policies/a\ndefault = \"deny\"\n"),
        ("http_patch", "PATCH /v1/vms/a\n{\"labels\": {\"k\": null}}"),
        ("http_cut", "POST /v1/flows/1.2.3/cut\n"),
        ("http_freeze", "POST /v1/vms/a/freeze\n"),
        ("http_pause", "POST /v1/machines/a/pause\n"),
        ("http_balloon", "POST /v1/machines/a/balloon\n{\"mib\": 64}"),
        (
            "http_snapshot",
            "POST /v1/machines/a/snapshot\n{\"name\": \"warm\"}",
        ),
    ] {
        seeds.push((name, [&[kind::HTTP][..], text.as_bytes()].concat()));
    }
    seeds.push((
        "scrape",
        packet(
            kind::FROM_METRICS,
            json(&FromMetrics::Inventory { from: 0 }),
        ),
    ));
    seeds.extend(
        clients
            .iter()
            .map(|(name, m)| (*name, line(kind::CONTROL, json(m)))),
    );
    let machine = json!({
        "name": "a", "pid": 7, "state": "paused", "cpus": 1, "memory_mib": 64, "tap": "sgvm0",
        "netns": 1, "runs_s": 2,
    });
    let machine = serde_json::from_value(machine).expect("a machine");
    let outcome = "powered_off".to_owned();
    let event = Some(MachineEvent::Ended {
        outcome,
        exit_code: 0,
    });
    let notice = MachineNotice { machine, event };
    seeds.push(("notice", line(kind::NOTICE, json(&notice))));
    let saved = SavedSnapshot {
        name: "warm".into(),
        directory: "/var/lib/snapshots/warm".into(),
    };
    let answer = ClientAnswer::SnapshotSaved { snapshot: saved };
    seeds.push(("saved", line(kind::ANSWER, json(&answer))));
    seeds.push((
        "answer",
        line(kind::ANSWER, json(&ClientAnswer::error("no"))),
    ));
    seeds
}

/// The first message to a user-mode engine, for each way in which its guest comes in. Their two
/// descriptors are as many as the target passes.
fn starts(packet: impl Fn(u8, Vec<u8>) -> Vec<u8>) -> Seeds {
    let socket = |protocol| UserspaceStart::Socket {
        protocol,
        is_for_one: true,
    };
    [
        UserspaceStart::Tap { takes_uso: true },
        socket(GuestProtocol::Frames),
        socket(GuestProtocol::VhostUser),
        UserspaceStart::Connected,
        UserspaceStart::Packets,
        UserspaceStart::Rings,
        UserspaceStart::RecordOrphans,
    ]
    .map(|how| {
        // A way that is new has no name here: add it to the list, too.
        let name = match how {
            UserspaceStart::Tap { .. } => "start-tap",
            UserspaceStart::Socket { protocol, .. } => match protocol {
                GuestProtocol::Frames => "start-socket",
                GuestProtocol::VhostUser => "start-vhost-user",
            },
            UserspaceStart::Connected => "start-connected",
            UserspaceStart::Packets => "start-packets",
            UserspaceStart::Rings => "start-rings",
            UserspaceStart::RecordOrphans => "start-orphans",
        };
        let start = ToEngine::Start(Box::new(Start {
            maps: Vec::new(),
            port: Slot,
            userspace: Some(how),
            namespace: None,
            flow_log: None,
            pcap: None,
            locks: Vec::new(),
            owner_row: 1,
            epoch: 2,
            flow_log_events: Vec::new(),
            vms: Vec::new(),
            policies: Slot,
            forward_rules: RuleIndex::new(3),
            forward_texts: Vec::new(),
            resolvers: Vec::new(),
            nat_ports: (61_000, 65_535),
            eim_ports: None,
            reserved_ports: Vec::new(),
            network: NetworkView::default(),
            open_questions: Vec::new(),
            log: "info".into(),
        }));
        (name, packet(kind::TO_ENGINE, json(&start)))
    })
    .into()
}

/// A message as it is sent.
fn json(message: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("a message is JSON")
}
