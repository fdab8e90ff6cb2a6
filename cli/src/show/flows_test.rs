use slipgate_abi::{Ip4, Ip6};
use slipgate_ipc::engine::RelayedId;

use super::*;
use serde_json::json;

pub(super) fn slot() -> Slot {
    Slot {
        generation: 1,
        verdict: Verdict::Fast,
        protocol: Protocol::Tcp,
        tcp: TcpBits::SYN_TX | TcpBits::SYN_RX,
        next_hop: 1,
        tx_packets: 10,
        tx_bytes: 1_000,
        rx_packets: 20,
        rx_bytes: 30_000,
        tx_last_ns: 4_000_000_000,
        rx_last_ns: 4_500_000_000,
        vm: 1,
        vm_row: 1,
        guest: ip4([10, 0, 2, 15]),
        guest_port: 40_000,
        remote: ip4([192, 0, 2, 1]),
        remote_port: 443,
        nat: ip4([198, 51, 100, 1]),
        nat_port: 61_000,
        flags: 0,
        isn: 1,
        created_ns: 1_000_000_000,
        rule: 0,
        uplink_ifindex: 2,
        owner: 0,
        connect_us: 0,
        fin_end_tx: 0,
        fin_end_rx: 0,
        epoch: 1,
    }
}

fn addresses() -> FlowAddresses {
    FlowAddresses::of(&slot(), &Addresses6::default())
}

fn ip4(octets: [u8; 4]) -> Ip4 {
    Ip4 { octets }
}

fn at(slot: &Slot) -> (SlotIndex, &Slot) {
    (SlotIndex::new(3), slot)
}

#[test]
fn json_has_the_documented_fields() {
    let flow = Flow::new(
        0x5f,
        at(&slot()),
        addresses(),
        "a".into(),
        "--default allow".into(),
        5_000_000_000,
    );
    assert_eq!(
        serde_json::to_value([flow]).unwrap(),
        json!([{
            "id": "0000005f-3-1",
            "vm": "a",
            "proto": "tcp",
            "guest": "10.0.2.15:40000",
            "remote": "192.0.2.1:443",
            "nat": "198.51.100.1:61000",
            "verdict": "fast",
            "path": "kernel",
            "direction": "outbound",
            "state": "established",
            "rule": "--default allow",
            "tx_packets": 10,
            "tx_bytes": 1000,
            "rx_packets": 20,
            "rx_bytes": 30000,
            "age_ms": 4000,
            "idle_ms": 500,
        }])
    );
}

#[test]
fn a_flow_that_never_carried_a_packet_is_idle_since_it_was_admitted() {
    let fresh = Slot {
        tx_last_ns: 0,
        rx_last_ns: 0,
        ..slot()
    };
    let flow = Flow::new(
        1,
        at(&fresh),
        addresses(),
        "a".into(),
        "".into(),
        1_250_000_000,
    );
    assert_eq!((flow.age_ms, flow.idle_ms), (250, 250));
}

#[test]
fn udp_and_icmp_have_no_phases_but_directions() {
    let mut s = slot();
    s.protocol = Protocol::Icmp;
    s.remote_port = 0;
    let flow = Flow::new(1, at(&s), addresses(), "".into(), "".into(), 0);
    assert_eq!(
        (&*flow.state, &*flow.remote.to_string()),
        ("both-ways", "192.0.2.1")
    );
    s.rx_packets = 0;
    assert_eq!(
        Flow::new(1, at(&s), addresses(), "".into(), "".into(), 0).state,
        "one-way"
    );
}

/// `slipgate flows` with these flags.
fn args(flags: &str) -> FlowsArgs {
    use clap::Parser as _;
    let words = ["slipgate", "flows"];
    let words = words.into_iter().chain(flags.split_whitespace());
    match crate::args::CommandLine::parse_from(words).command {
        crate::args::Command::Show(crate::args::ShowCommand::Flows(args)) => args,
        other => panic!("{other:?}"),
    }
}

#[test]
fn flows_are_filtered_and_sorted() {
    let flow = |vm: &str, bytes, name: Option<&str>| Flow {
        tx_bytes: bytes,
        dns_name: name.map(str::to_owned),
        ..Flow::new(
            0,
            at(&slot()),
            addresses(),
            vm.into(),
            "".into(),
            5_000_000_000,
        )
    };
    let flows = [
        flow("a", 1, Some("b.example.com")),
        flow("b", 3, None),
        flow("a", 2, Some("example.com")),
    ];
    let wanted = |flags: &str| {
        let args = args(flags);
        let mut flows = flows.to_vec();
        flows.retain(|flow| is_wanted(flow, &args));
        if let Some(order) = args.sort {
            sort(&mut flows, order);
        }
        flows.iter().map(|flow| flow.tx_bytes).collect::<Vec<_>>()
    };
    assert_eq!(wanted(""), [1, 3, 2]);
    assert_eq!(wanted("--vm a"), [1, 2]);
    assert_eq!(wanted("--name Example.com"), [2]);
    assert_eq!(wanted("--name *.example.com"), [1]);
    assert_eq!(wanted("--proto udp"), [] as [u64; 0]);
    assert_eq!(wanted("--proto tcp --sort bytes"), [3, 2, 1]);
    assert_eq!(
        wanted("--sort name"),
        [1, 2, 3],
        "those without a name last"
    );
    assert_eq!(wanted("--sort vm"), [1, 2, 3]);
}

/// A connection of a guest that has no socket of the host's yet.
pub(super) fn relayed(number: u64) -> LiveRelayed {
    LiveRelayed {
        id: RelayedId { run: 1, number },
        vm: "a".into(),
        protocol: 6,
        guest: "10.0.2.15:40000".parse().unwrap(),
        remote: "10.0.2.2:8080".parse().unwrap(),
        nat: None,
        host: None,
        inbound: false,
        rule: "--host-loopback 8080:80/tcp".into(),
        state: "established".into(),
        tx: (1, 40),
        rx: (2, 80),
        age_ms: 5,
        idle_ms: 4,
    }
}

#[test]
fn a_relayed_flow_has_the_fields_that_it_has() {
    let at = |text: &str| text.parse().unwrap();
    let flow = LiveRelayed {
        id: RelayedId {
            run: 0xabc,
            number: 7,
        },
        nat: Some(at("127.0.0.1:50000")),
        host: Some(at("127.0.0.1:80")),
        ..relayed(7)
    };
    let vm = |is_frozen| OfVm {
        name: "a".into(),
        labels: Arc::default(),
        is_frozen,
    };
    let shown = Flow::relayed(&flow, &vm(true));
    let mut text = Vec::new();
    let look = Look::Table { with_uplink: true };
    write_each([shown.clone()].into_iter(), look, &mut text).unwrap();
    assert!(String::from_utf8(text).unwrap().contains(" frozen "));
    assert_eq!(
        serde_json::to_value(shown).unwrap(),
        json!({
            "id": "r00000abc-7", "vm": "a", "proto": "tcp",
            "guest": "10.0.2.15:40000", "remote": "10.0.2.2:8080",
            "nat": "127.0.0.1:50000", "host": "127.0.0.1:80",
            "verdict": "relay", "path": "relay", "direction": "outbound", "frozen": true,
            "state": "established", "rule": "--host-loopback 8080:80/tcp",
            "tx_packets": 1, "tx_bytes": 40, "rx_packets": 2, "rx_bytes": 80,
            "age_ms": 5, "idle_ms": 4,
        })
    );
    // DNS over TCP: neither rule nor address toward the world.
    let dns = LiveRelayed {
        nat: None,
        host: None,
        rule: String::new(),
        ..flow
    };
    let json = serde_json::to_value(Flow::relayed(&dns, &vm(false))).unwrap();
    for absent in ["nat", "host", "rule", "frozen"] {
        assert!(json.get(absent).is_none(), "{json}");
    }
}

#[test]
fn the_addresses_of_an_ipv6_flow_are_beside_its_slot() {
    let six = |text: &str| Ip6::from(text.parse::<std::net::Ipv6Addr>().unwrap());
    let slot = Slot {
        flags: SlotFlags::IPV6,
        protocol: Protocol::Icmpv6,
        guest: Ip4::UNSPECIFIED,
        remote: Ip4::UNSPECIFIED,
        nat: Ip4::UNSPECIFIED,
        remote_port: 0,
        ..slot()
    };
    let beside = Addresses6 {
        guest: six("fd00::5"),
        remote: six("2001:db8::7"),
        nat: six("2001:db8::1"),
        pad: [0; 16],
    };
    let addresses = FlowAddresses::of(&slot, &beside);
    let flow = Flow::new(1, at(&slot), addresses, "a".into(), "".into(), 0);
    assert_eq!(flow.proto, "icmp");
    assert_eq!(
        (flow.guest.to_string(), flow.remote.to_string(), flow.nat),
        (
            "[fd00::5]:40000".into(),
            "2001:db8::7".into(),
            Some("[2001:db8::1]:61000".parse().unwrap())
        )
    );
}

/// Maps with flows in the first slots, and the reader of them.
pub(super) fn with_flows(
    dir: &std::path::Path,
    count: u32,
) -> (slipgate_control::InMemory, ReadOnlyMaps) {
    use slipgate_control::{InMemory, Paths, Sizes};
    let paths = Paths {
        pin_dir: dir.to_owned(),
        run_dir: dir.to_owned(),
    };
    let slots = count.max(1).next_multiple_of(1_024);
    // A part of a table is for other owners.
    let (memory, owner) = InMemory::open(paths, Sizes::of_slots(4 * slots)).unwrap();
    for _ in 0..slots / 1_024 {
        memory.maps.claim_chunk(owner.row(), 0).unwrap();
    }
    for index in 0..count {
        let at = memory.maps.slot(SlotIndex::new(index)).unwrap();
        // SAFETY: an element of SLOTS that nothing else uses meanwhile.
        unsafe { at.as_ptr().write(slot()) };
    }
    let read = ReadOnlyMaps::open_pinned(dir).unwrap();
    (memory, read)
}

fn name_rule(memory: &slipgate_control::InMemory, text: &str) {
    let element = slipgate_abi::maps::RuleElement::FREE;
    assert!(memory.maps.set_rule(RuleIndex::new(0), element, text));
}

/// Who reads our output may pause: a pager does.
#[test]
fn each_flow_is_shown_as_it_is_when_its_turn_comes() {
    const SECOND: u64 = 1_000_000_000;
    let dir = tempfile::tempdir().unwrap();
    let (memory, read) = with_flows(dir.path(), 4);
    name_rule(&memory, "first");
    let (known, now) = (names::Known::default(), std::cell::Cell::new(5 * SECOND));
    let mut flows = live(&read, &known, || now.get());
    let mut next = || flows.next().map(|flow| (flow.rule, flow.age_ms));
    assert_eq!(next(), Some(("first".into(), 4_000)));
    // A text is read once for all flows that name it; numbers of rules are used again, in time.
    name_rule(&memory, "second");
    now.set(6 * SECOND);
    assert_eq!(next(), Some(("first".into(), 5_000)));
    now.set(7 * SECOND);
    assert_eq!(next(), Some(("second".into(), 6_000)));
    let last = memory.maps.slot(SlotIndex::new(3)).unwrap();
    last.set_verdict(Verdict::Free);
    assert_eq!(next(), None);
}

#[test]
fn a_flow_shows_by_which_link_and_neighbour_it_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let (memory, read) = with_flows(dir.path(), 1);
    let links = |names: &[(u32, &str)]| names::Known {
        links: names
            .iter()
            .map(|(index, name)| (IfIndex::new(*index), (*name).to_owned()))
            .collect(),
        ..names::Known::default()
    };
    let of = |names: &names::Known, slot: &Slot| {
        let from = Sources { maps: &read, names };
        Texts::new(&read, 0).uplink_of(from, slot)
    };
    let shown = |known: &names::Known| of(known, &slot());
    let json_of = |known: &names::Known| serde_json::to_value(shown(known).as_deref()).unwrap();
    // The kernel resolves the neighbour, and no engine has named the link.
    assert_eq!(json_of(&links(&[])), json!({ "index": 2 }));
    let router = std::net::Ipv4Addr::new(192, 0, 2, 254);
    let claimed = memory.maps.claim_next_hop(0, IfIndex::new(2), router, 0);
    assert_eq!(claimed, Some(1));
    let known = links(&[(2, "eth0")]);
    assert_eq!(
        json_of(&known),
        json!({ "name": "eth0", "index": 2, "next_hop": "192.0.2.254" })
    );
    let hairpin = Slot {
        flags: SlotFlags::HAIRPIN,
        ..slot()
    };
    assert_eq!(of(&known, &hairpin), None);
    let flow = Flow {
        uplink: shown(&known),
        ..list(&read, &known).remove(0)
    };
    assert_eq!(
        serde_json::to_value(&flow).unwrap()["uplink"],
        json_of(&known)
    );
    let table = |with_uplink| {
        let mut out = Vec::new();
        let look = Look::Table { with_uplink };
        write_each(std::iter::once(flow.clone()), look, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    assert!(!table(false).contains("eth0"));
    assert!(table(true).contains("UPLINK") && table(true).contains("eth0"));
}

#[test]
fn json_written_flow_by_flow_is_an_array_like_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let (_memory, read) = with_flows(dir.path(), 3);
    let all = list(&read, &names::Known::default());
    assert_eq!(all.len(), 3);
    for flows in [&all[..0], &all[..1], &all] {
        let mut out = Vec::new();
        write_each(flows.iter().cloned(), Look::Json, &mut out).unwrap();
        let expected = serde_json::to_string_pretty(flows).unwrap() + "\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
