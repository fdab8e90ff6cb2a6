//! Ports of the gateway that lead to the host's loopback: who is let in, and for how long.
use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read, Write as _},
    net::{TcpListener, UdpSocket},
    time::Duration,
};

use slipgate_abi::{DropReason, Ip4, Protocol, Refusal, VmId, VmRow, tcp::Flags};
use slipgate_model::{RelayedId, SleepChange, Subject, WhyAnswer};

use super::{reload::policy, rig::*};
use crate::{
    clock::SECOND_NS,
    observe::{CaptureRequest, NotCaptured},
    packet::{Ipv4, Packet, Transport, transport::Tcp},
    port::VirtioNetHdr,
};
use slipgate_policy::{Action, Destination, LoopbackPorts, OnReload, Policy, Rule, Settings};

const PORT: u16 = 8080;
const TO: At = (GATEWAY, PORT);

fn service() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn listed(text: String) -> Vec<LoopbackPorts> {
    vec![text.parse().unwrap()]
}

fn setup(host_port: u16, rules: Vec<Rule>) -> Setup {
    Setup {
        default: Action::Deny,
        rules,
        listed: listed(format!("{PORT}:{host_port}")),
        ..Setup::default()
    }
}

fn with_list(policy: Policy, list: Vec<LoopbackPorts>, on_reload: OnReload) -> Policy {
    policy.with(Settings {
        host_loopback: list,
        on_reload,
        ..Settings::default()
    })
}

impl Rig {
    /// The TCP segments that guests have received.
    fn segments(&mut self) -> Vec<Tcp> {
        let told = self.at_guest();
        let parsed = told.iter().filter_map(|(_, packet)| {
            match Packet::parse(Ipv4::parse(packet).ok()?).ok()?.transport {
                Transport::Tcp(tcp) => Some(tcp),
                _ => None,
            }
        });
        parsed.collect()
    }

    /// A SYN to the gateway, and the flags of the answer.
    fn knock(&mut self, row: u16, from: u16, to: At) -> Vec<u8> {
        self.guest(row, &syn((GUEST, from), to, 7));
        let told = self.segments().into_iter();
        let told = told.filter(|tcp| tcp.destination == from);
        told.map(|tcp| tcp.flags).collect()
    }

    /// Opens a connection to the service; the next sequence number of its side.
    fn enter(&mut self, row: u16, from: u16) -> u32 {
        self.guest(row, &syn((GUEST, from), TO, 7));
        let answer = self.segments();
        assert_eq!(answer.len(), 1, "{answer:?}");
        assert_eq!(answer[0].flags, SYN_ACK);
        let next = answer[0].sequence.wrapping_add(1);
        self.guest(row, &ack((GUEST, from), TO, 0, 8, next));
        next
    }

    pub(super) fn asks_why(&mut self, row: u16, to: At, protocol: Protocol) -> WhyAnswer {
        let to = Destination {
            addr: to.0.into(),
            port: to.1,
            protocol,
        };
        self.tell(move |engine| engine.why(VmRow::new(row), to, None))
    }
}

const SYN_ACK: u8 = Flags::SYN | Flags::ACK;
const RST_ACK: u8 = Flags::RST | Flags::ACK;

/// The service's end of the connection that waits.
fn accepted(listener: &TcpListener) -> std::net::TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_nonblocking(false).unwrap();
    let patience = Duration::from_secs(2);
    stream.set_read_timeout(Some(patience)).unwrap();
    stream
}

/// A VM that sleeps is woken by what the service sends or by its reset, and not by what slipgate does
/// of its own accord.
#[test]
fn a_vm_that_sleeps_is_woken_by_what_a_relayed_connection_brings_and_not_by_its_end() {
    let (listener, port) = service();
    let row = VmRow::new(1);
    let knocks = |rig: &mut Rig| {
        rig.turn();
        let told = rig.broker.sleep_changes.drain(..);
        told.filter(|(_, change)| matches!(change, SleepChange::Knock(_)))
            .count()
    };
    let mut rig = Rig::with(setup(port, Vec::new()));
    let mut next = rig.enter(1, 40_000);
    let mut stream = accepted(&listener);
    // The guest's last data is acknowledged while it sleeps.
    rig.guest(
        1,
        &tcp((GUEST, 40_000), TO, 0x18, 8, next, &[], b"question"),
    );
    rig.tell(move |engine| engine.sleep(row));
    rig.pass(SECOND_NS);
    assert_eq!(knocks(&mut rig), 0);
    stream.write_all(b"answer").unwrap();
    rig.pass(SECOND_NS);
    assert!(knocks(&mut rig) >= 1, "data");
    next = next.wrapping_add(6);
    assert!(rig.tell(move |engine| engine.wake(row)));
    rig.guest(1, &ack((GUEST, 40_000), TO, 0, 16, next));
    rig.at_guest();
    rig.tell(move |engine| engine.sleep(row));
    rig.tell(move |engine| engine.cut(Subject::Vm { row }));
    let ended = rig.segments();
    assert!(
        ended.iter().any(|tcp| tcp.flags & Flags::RST != 0),
        "{ended:?}"
    );
    assert_eq!(knocks(&mut rig), 0, "the cut");
    // The service's end is something that comes.
    assert!(rig.tell(move |engine| engine.wake(row)));
    rig.enter(1, 40_001);
    let stream = accepted(&listener);
    rig.tell(move |engine| engine.sleep(row));
    drop(stream);
    rig.pass(SECOND_NS);
    assert!(knocks(&mut rig) >= 1, "the end");
}

#[test]
fn nothing_of_the_hosts_loopback_is_reached_that_is_not_listed() {
    let (listener, port) = service();
    let mut rig = Rig::with(Setup {
        default: Action::Allow,
        rules: vec![Rule::parse(Action::Allow, "10.0.2.2").unwrap()],
        listed: listed(format!("{PORT}:{port}/udp")),
        ..Setup::default()
    });
    for to in [
        TO,
        (GATEWAY, port),
        (
            Ip4 {
                octets: [10, 0, 2, 3],
            },
            PORT,
        ),
    ] {
        assert_eq!(rig.knock(1, 40_000, to), [RST_ACK], "{to:?}");
    }
    assert_eq!(rig.dropped(1, DropReason::NoFlow), 3);
    assert!(!rig.asks_why(1, TO, Protocol::Tcp).admitted);
    assert!(rig.asks_why(1, TO, Protocol::Udp).admitted);
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn a_listed_port_leads_to_the_service_though_the_default_is_deny() {
    let (listener, port) = service();
    let mut rig = Rig::with(setup(port, vec![]));
    let why = rig.asks_why(1, TO, Protocol::Tcp);
    assert!(why.admitted && why.refusal.is_none(), "{why:?}");
    assert_eq!(why.rule, format!("host_loopback {PORT}:{port}"));
    assert!(
        why.outcome.contains(&format!("127.0.0.1:{port}")),
        "{why:?}"
    );
    let next = rig.enter(1, 40_000);
    let mut service = accepted(&listener);
    let data = tcp((GUEST, 40_000), TO, Flags::ACK, 8, next, &[], b"hello");
    rig.guest(1, &data);
    let mut buffer = [0; 5];
    service.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"hello");
    // Neither the kernel nor the table has anything of it.
    rig.assert_empty();
}

#[test]
fn another_vms_list_is_nobody_elses() {
    let (_listener, port) = service();
    let mut rig = Rig::with(setup(port, vec![]));
    let list = listed(format!("{PORT}:{port}"));
    let policies = vec![
        with_list(policy(Action::Allow, &[]), list, OnReload::Cut),
        policy(Action::Allow, &["allow 10.0.2.2"]),
    ];
    rig.reload(policies, 40, [0, 1, 1]);
    assert_eq!(rig.applied(), (0, 0, 0));
    assert_eq!(rig.knock(1, 40_000, TO), [SYN_ACK]);
    assert_eq!(rig.knock(2, 40_000, TO), [RST_ACK]);
    assert!(!rig.asks_why(2, TO, Protocol::Tcp).admitted);
}

#[test]
fn a_rule_that_denies_beats_the_list() {
    let (listener, port) = service();
    let deny = Rule::parse(Action::Deny, "10.0.2.2:8080/tcp").unwrap();
    let mut rig = Rig::with(setup(port, vec![deny]));
    assert_eq!(rig.knock(1, 40_000, TO), [RST_ACK]);
    assert_eq!(rig.refused(1, Refusal::Rule), 1);
    assert_eq!(rig.dropped(1, DropReason::Refused), 1);
    let counts = rig.kernel.borrow().stats(1).snapshot().0;
    assert_eq!(counts.refused_by_rule[0].rule, 10 + 3 + 1);
    let why = rig.asks_why(1, TO, Protocol::Tcp);
    assert_eq!(
        (why.admitted, why.refusal.as_deref()),
        (false, Some("rule"))
    );
    assert_eq!(why.rule, "--deny 10.0.2.2:8080/tcp");
    assert!(why.explanation.contains("host_loopback"), "{why:?}");
    assert!(rig.asks_why(1, TO, Protocol::Udp).admitted);
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    // An inspect rule can't be held to.
    let inspect = Rule::parse(Action::Inspect, "10.0.2.2:8080").unwrap();
    let mut rig = Rig::with(setup(port, vec![inspect]));
    assert_eq!(rig.knock(1, 40_000, TO), [RST_ACK]);
    assert_eq!(rig.refused(1, Refusal::Inspection), 1);
}

#[test]
fn cap_and_rate_count_it_like_any_flow() {
    let (listener, port) = service();
    let mut rig = Rig::with(Setup {
        default: Action::Allow,
        max_flows: 2,
        ..setup(port, vec![])
    });
    rig.connect(30_000, 1);
    rig.enter(1, 40_000);
    assert_eq!(rig.knock(1, 40_001, TO), [RST_ACK]);
    assert_eq!(rig.refused(1, Refusal::FlowCap), 1);
    assert_eq!(
        rig.asks_why(1, TO, Protocol::Tcp).refusal.as_deref(),
        Some("flow_cap")
    );
    rig.guest(1, &syn((GUEST, 30_001), SERVER, 1));
    assert_eq!(rig.refused(1, Refusal::FlowCap), 2, "nor one to the world");
    // Another's is not touched, and one that ends makes room.
    assert_eq!(rig.knock(2, 40_000, TO), [SYN_ACK]);
    drop(accepted(&listener));
    rig.turn();
    rig.guest(1, &tcp((GUEST, 40_000), TO, Flags::RST, 8, 0, &[], &[]));
    rig.at_guest();
    assert_eq!(rig.knock(1, 40_002, TO), [SYN_ACK]);

    let mut rig = Rig::with(Setup {
        rate: 1,
        ..setup(port, vec![])
    });
    assert_eq!(rig.knock(1, 40_000, TO), [SYN_ACK]);
    rig.guest(1, &syn((GUEST, 40_000), TO, 7));
    rig.at_guest();
    assert_eq!(rig.refused(1, Refusal::FlowRate), 0, "it is the same one");
    assert_eq!(rig.knock(1, 40_001, TO), [RST_ACK]);
    assert_eq!(rig.refused(1, Refusal::FlowRate), 1);
}

#[test]
fn a_port_taken_out_of_the_list_ends_its_connections_or_leaves_them() {
    let (listener, port) = service();
    for (list, rules, on_reload, counts) in [
        (port, vec![], OnReload::Cut, (0, 1, 0)),
        (0, vec![], OnReload::Keep, (0, 1, 1)),
        (0, vec![], OnReload::Cut, (1, 0, 0)),
        (port + 1, vec![], OnReload::Cut, (1, 0, 0)),
        (port, vec!["deny 10.0.2.2:8080"], OnReload::Cut, (1, 0, 0)),
    ] {
        let mut rig = Rig::with(setup(port, vec![]));
        rig.enter(1, 40_000);
        let mut service = accepted(&listener);
        let list = match list {
            0 => Vec::new(),
            other => listed(format!("{PORT}:{other}")),
        };
        let policy = with_list(policy(Action::Deny, &rules), list, on_reload);
        rig.reload(vec![policy], 40, [0, 0, 0]);
        let told = rig.segments();
        assert_eq!(rig.applied(), counts, "{counts:?}");
        let is_cut = counts.0 > 0;
        let reset = told.iter().any(|tcp| tcp.flags & Flags::RST != 0);
        assert_eq!(reset, is_cut, "{told:?}");
        let read = match is_cut {
            true => service.read(&mut [0; 8]).map_err(|e| e.kind()),
            false => Ok(0),
        };
        assert_eq!(
            read,
            if is_cut {
                Err(ErrorKind::ConnectionReset)
            } else {
                Ok(0)
            }
        );
    }
}

/// Connections that a VM could open while it was learning end with that, whatever its policy
/// leaves.
#[test]
fn what_is_strict_with_a_vm_leaves_none_of_its_connections() {
    let (_listener, port) = service();
    let mut rig = Rig::with(setup(port, vec![]));
    rig.enter(1, 40_000);
    rig.enter(2, 40_000);
    let refusing = policy(Action::Deny, &["inspect 10.0.2.2:8080"]);
    let list = listed(format!("{PORT}:{port}"));
    let policy = with_list(refusing, list, OnReload::Keep);
    rig.reload_strictly(vec![policy], 40, [0; 3], vec![101]);
    assert_eq!(rig.applied(), (1, 1, 1));
    let relay = &rig.engine.services.relay;
    let flows = [101, 102].map(|vm| relay.loopback_flows(VmId::new(vm)));
    assert_eq!(flows, [0, 1]);
}

/// The connections of two VMs have more to send at once than there is room for. Other answers are
/// neither lost for that, nor do they wait until all is sent.
#[test]
fn what_is_relayed_takes_no_room_of_other_answers() {
    const CONNECTIONS: u16 = 40;
    const QUESTIONS: u16 = 20;
    /// The relay's for a turn, and one for each of the guest's packets.
    const OF_A_TURN: usize = 256 + CONNECTIONS as usize;
    let (listener, port) = service();
    let mut rig = Rig::with(setup(port, vec![]));
    let mut held = Vec::new();
    let mut next = BTreeMap::new();
    for (row, vm) in [(1, 101), (2, 102)] {
        for from in 40_000..40_000 + CONNECTIONS {
            next.insert((vm, from), rig.enter(row, from));
            held.push(accepted(&listener));
        }
    }
    for stream in &mut held {
        stream.write_all(&[7; 120_000]).unwrap();
    }
    rig.turn();
    let told = |rig: &mut Rig| {
        let told = rig.at_guest().into_iter();
        let told = told.map(|(vm, packet)| {
            let packet = Packet::parse(Ipv4::parse(&packet).unwrap()).unwrap();
            match packet.transport {
                Transport::Tcp(tcp) => (vm, tcp),
                other => panic!("{other:?}"),
            }
        });
        told.collect::<Vec<_>>()
    };
    for (vm, tcp) in told(&mut rig) {
        let at = next.get_mut(&(vm, tcp.destination)).unwrap();
        *at = at.wrapping_add(tcp.payload_len as u32);
    }
    // All windows open in one batch, between questions to a closed port.
    {
        let mut kernel = rig.kernel.borrow_mut();
        let vnet = VirtioNetHdr::default();
        for ((vm, from), at) in next {
            let mut more = ack((GUEST, from), TO, 0, 8, at);
            more[34..36].fill(0xff);
            kernel.guest_sends((vm - 100) as u16, vnet, &more);
        }
        for from in 50_000..50_000 + QUESTIONS {
            kernel.guest_sends(2, vnet, &syn((GUEST, from), (GATEWAY, 1), 7));
        }
    }
    rig.turn();
    let mut all = Vec::new();
    for turn in 0..8 {
        let told = told(&mut rig);
        let of = |id| told.iter().filter(|(vm, _)| *vm == id).count();
        let (first, second) = (of(101), of(102));
        let answered = told.iter().filter(|(_, tcp)| tcp.destination >= 50_000);
        let answered = answered.count();
        assert_eq!(answered, usize::from(QUESTIONS) * usize::from(turn == 0));
        let most = first.max(second - answered);
        assert!(most <= OF_A_TURN, "{most} in turn {turn}");
        all.push([first, second - answered]);
        rig.turn();
    }
    assert!(
        all[0].iter().sum::<usize>() >= 512,
        "as much as fills half: {all:?}"
    );
    for vm in [0, 1] {
        let segments: usize = all.iter().map(|turn| turn[vm]).sum();
        assert!(segments > 1_024, "{all:?}");
    }
    let busy = [1, 2].map(|row| rig.dropped(row, DropReason::EngineBusy));
    assert_eq!(busy, [0, 0]);
}

#[test]
fn cutting_a_vm_cuts_what_is_relayed_for_it() {
    let (listener, port) = service();
    let mut rig = Rig::with(setup(port, vec![]));
    rig.enter(1, 40_000);
    rig.enter(2, 40_000);
    let mut service = accepted(&listener);
    let what = Subject::Vm { row: VmRow::new(1) };
    rig.tell(move |engine| engine.cut(what));
    let told = rig.at_guest();
    assert!(!told.is_empty() && told.iter().all(|(vm, _)| *vm == 101));
    let error = service.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let relay = &rig.engine.services.relay;
    assert_eq!(
        (
            relay.loopback_flows(VmId::new(101)),
            relay.loopback_flows(VmId::new(102))
        ),
        (0, 1)
    );
}

#[test]
fn datagrams_in_one_frame_come_out_as_they_were_written() {
    let service = UdpSocket::bind("127.0.0.1:0").unwrap();
    service
        .set_read_timeout(Some(Duration::from_secs(2)))
        .unwrap();
    let port = service.local_addr().unwrap().port();
    let mut rig = Rig::with(setup(port, vec![]));
    let vnet = VirtioNetHdr {
        gso_type: VirtioNetHdr::GSO_UDP_L4,
        gso_size: 300,
        ..VirtioNetHdr::default()
    };
    let data: Vec<u8> = (0..1_000u32).map(|i| i as u8).collect();
    let frame = udp((GUEST, 40_000), TO, &data);
    for _ in 0..2 {
        rig.kernel.borrow_mut().guest_sends(1, vnet, &frame);
        rig.turn();
        let mut buffer = [0; 2_000];
        for expected in data.chunks(300) {
            let len = service.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..len], expected);
        }
    }
    assert_eq!(rig.refused(1, Refusal::Rule), 0);
}

#[test]
fn nobodys_port_is_refused_and_another_address_may_be_listed() {
    let (listener, port) = service();
    let address = Ip4 {
        octets: [10, 0, 2, 100],
    };
    let mut rig = Rig::with(Setup {
        listed: listed(format!("10.0.2.100:{PORT}:{port}")),
        ..Setup::default()
    });
    assert_eq!(rig.knock(1, 40_000, TO), [RST_ACK], "not of the gateway");
    assert_eq!(rig.knock(1, 40_000, (address, PORT)), [SYN_ACK]);
    drop(listener);
    assert_eq!(rig.knock(1, 40_001, (address, PORT)), [RST_ACK]);
    rig.guest(1, &udp((GUEST, 40_002), (address, PORT), b"x"));
    let answer = rig.at_guest().pop().unwrap().1;
    let packet = Packet::parse(Ipv4::parse(&answer).unwrap()).unwrap();
    let Transport::Icmp(icmp) = packet.transport else {
        panic!("{packet:?}");
    };
    assert_eq!((icmp.kind, icmp.code), (3, 3));
    assert_eq!(rig.dropped(1, DropReason::ServiceReject), 1);
}

#[test]
fn a_relayed_flow_is_told_of_cut_by_its_id_and_not_captured_alone() {
    let (_listener, port) = service();
    let mut rig = Rig::with(setup(port, vec![]));
    rig.enter(1, 40_000);
    rig.enter(1, 40_001);
    rig.guest(1, &ack((GUEST, 40_000), TO, 0, 8, 0));
    let page = rig.engine.inventory(0);
    assert_eq!(page.next, None);
    let (vm, counts) = &page.relayed[0];
    assert_eq!((vm.as_str(), counts.flows, counts.begun), ("vm1", 2, 2));
    let flows = page.relayed_flows;
    let ports: Vec<u16> = flows.iter().map(|flow| flow.guest.port()).collect();
    assert_eq!(ports, [40_000, 40_001]);
    let flow = &flows[0];
    assert_eq!(
        (flow.vm.as_str(), flow.state.as_str(), flow.inbound),
        ("vm1", "established", false)
    );
    assert_eq!(flow.host.map(|at| at.port()), Some(port));
    assert_eq!(flow.rule, format!("host_loopback {PORT}:{port}"));
    let sum: u64 = flows.iter().map(|flow| flow.tx.1).sum();
    assert_eq!(counts.tx_bytes, sum);

    let mut cut = |what| {
        let cut = rig.tell(move |engine| engine.cut(what));
        cut.map(|cut| cut.flows)
    };
    let id = flow.id;
    let others = RelayedId {
        run: id.run ^ 1,
        ..id
    };
    assert_eq!(cut(Subject::Relayed(others)), None);
    assert_eq!(cut(Subject::Relayed(id)), Some(1));
    assert_eq!(cut(Subject::Relayed(id)), None);
    let relay = &rig.engine.services.relay;
    assert_eq!(relay.loopback_flows(VmId::new(101)), 1);

    let (_client, to) = std::os::unix::net::UnixStream::pair().unwrap();
    let capture = CaptureRequest {
        subject: Subject::Relayed(flows[1].id),
        to: to.into(),
        packets: None,
        lasts_ns: None,
    };
    let started = rig.tell(|engine| engine.capture(capture));
    assert_eq!(started, Err(NotCaptured::Relayed));
}
