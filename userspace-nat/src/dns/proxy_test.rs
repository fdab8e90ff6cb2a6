use std::{cell::RefCell, rc::Rc, time::Instant};

use slipgate_abi::{Protocol, VmId};

use super::{
    super::{
        Name, NameVerdict, Way,
        tests::{hickory::*, rig::*},
    },
    *,
};
use crate::{clock::SECOND_NS, datagram::Datagram, test_vm};

const ADDRESS: [u8; 4] = [192, 0, 2, 1];

fn www(id: u16) -> Message {
    ask(id, "www.example.com.", RecordType::A)
}

#[test]
fn a_question_is_answered_under_its_own_id_and_from_whom_it_asked() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    rig.ask(4000, &www(77)).unwrap();
    assert!(rig.reply().is_none());
    let (query, from) = upstream.query();
    assert_eq!(query.queries, www(0).queries);
    upstream.send(&with_address(&query, 60, ADDRESS), from);
    rig.settle();
    let (origin, told) = rig.reply().unwrap();
    assert_eq!(
        origin,
        Origin::Udp {
            guest: ([10, 0, 2, 15], 4000).into(),
            server: ASKED.into()
        }
    );
    assert_eq!(told.metadata.id, 77);
    assert_eq!(first_address(&told), Some(ADDRESS.into()));
    assert_eq!(rig.counted(), (1, 0, 0));
    assert_eq!(
        (rig.proxy.in_flight(), rig.proxy.next_deadline_ns()),
        (0, None)
    );
}

#[test]
fn the_cache_answers_with_ttls_that_run_out() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    rig.ask(4000, &www(1)).unwrap();
    upstream.answer(60, ADDRESS);
    rig.settle();
    rig.told();
    rig.pass(59 * SECOND_NS);
    rig.ask(4001, &ask(2, "WWW.example.com.", RecordType::A))
        .unwrap();
    let told = rig.told();
    assert_eq!((told.metadata.id, told.answers[0].ttl), (2, 1));
    assert_eq!(told.queries[0].name().to_string(), "WWW.example.com.");
    assert_eq!(rig.counted(), (2, 1, 0));
    rig.pass(SECOND_NS);
    rig.ask(4002, &www(3)).unwrap();
    assert!(rig.reply().is_none(), "out of date");
    upstream.answer(60, ADDRESS);
}

#[test]
fn equal_questions_in_flight_go_upstream_once() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    let other = test_vm::vm(2);
    rig.ask(4000, &www(1)).unwrap();
    rig.ask(4000, &www(1)).unwrap(); // A retransmission.
    rig.ask(4001, &www(2)).unwrap();
    rig.ask_as(&other, Origin::Tcp { connection: 9 }, &www(3))
        .unwrap();
    assert_eq!(rig.proxy.in_flight(), 1);
    upstream.answer(60, ADDRESS);
    rig.settle();
    let mut ids: Vec<u16> = std::iter::from_fn(|| rig.reply())
        .map(|(_, m)| m.metadata.id)
        .collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 2, 3]);
    assert!(upstream.is_idle());
    assert_eq!(rig.counted(), (3, 0, 0));
    assert_eq!(other.stats.snapshot().0.dns_queries, 1);
}

#[test]
fn questions_do_not_wait_for_each_other() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    rig.ask(4000, &ask(1, "slow.example.", RecordType::A))
        .unwrap();
    let (slow, slow_from) = upstream.query();
    rig.ask(4001, &ask(2, "fast.example.", RecordType::A))
        .unwrap();
    upstream.answer(60, ADDRESS);
    rig.settle();
    assert_eq!(rig.told().metadata.id, 2);
    upstream.send(&with_address(&slow, 60, ADDRESS), slow_from);
    rig.settle();
    assert_eq!(rig.told().metadata.id, 1);
}

#[test]
fn rfc2308_a_name_that_is_not_is_cached() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    rig.ask(4000, &www(1)).unwrap();
    let (query, from) = upstream.query();
    let mut message = response(&query);
    message.metadata.response_code = ResponseCode::NXDomain;
    message.add_authority(soa("example.com.", 900, 30));
    upstream.send(&message, from);
    rig.settle();
    assert_eq!(rig.told().metadata.response_code, ResponseCode::NXDomain);
    rig.pass(29 * SECOND_NS);
    rig.ask(4000, &www(2)).unwrap();
    let told = rig.told();
    assert_eq!(told.metadata.response_code, ResponseCode::NXDomain);
    assert_eq!(told.authorities[0].ttl, 900 - 29);
    rig.pass(SECOND_NS);
    rig.ask(4000, &www(3)).unwrap();
    assert!(rig.reply().is_none());
}

#[test]
fn a_vm_has_so_many_questions_waiting_and_no_more() {
    let upstream = Upstream::new();
    let mut rig = Rig::with_limits(
        &[&upstream],
        Limits {
            waiting_per_vm: 4,
            ..Limits::default()
        },
    );
    let name = |i| ask(1, &format!("n{i}.example."), RecordType::A);
    for i in 0..4 {
        rig.ask(4000, &name(i)).unwrap();
    }
    assert_eq!(rig.ask(4000, &name(4)), Err(DropReason::OverRate));
    assert_eq!(
        rig.ask(4001, &name(0)),
        Err(DropReason::OverRate),
        "joining counts too"
    );
    let vm = rig.vm.clone();
    rig.ask_as(&vm, Origin::Tcp { connection: 1 }, &name(5))
        .unwrap();
    assert_eq!(rig.told().metadata.response_code, ResponseCode::ServFail);
    let other = test_vm::vm(2);
    let origin = Origin::Udp {
        guest: ([10, 0, 2, 15], 1).into(),
        server: ASKED.into(),
    };
    rig.ask_as(&other, origin, &name(6)).unwrap();
    upstream.answer(60, ADDRESS);
    rig.settle();
    rig.told();
    rig.ask(4000, &name(7)).unwrap();
}

#[test]
fn a_vm_that_takes_all_exchanges_yields_to_others() {
    let upstream = Upstream::new();
    let mut rig = Rig::with_limits(
        &[&upstream],
        Limits {
            exchanges: 8,
            ..Limits::default()
        },
    );
    let name = |i| ask(i, &format!("n{i}.example."), RecordType::A);
    for i in 0..8 {
        rig.ask(4000, &name(i)).unwrap();
    }
    assert_eq!(
        rig.ask(4000, &name(8)),
        Err(DropReason::EngineBusy),
        "its share is all there is"
    );
    let other = test_vm::vm(2);
    for i in 10..14 {
        rig.ask_as(&other, Origin::Tcp { connection: 1 }, &name(i))
            .unwrap();
        let (_, told) = rig.reply().expect("the hog's oldest ends");
        assert_eq!(told.metadata.response_code, ResponseCode::ServFail);
        assert_eq!(told.metadata.id, i - 10);
    }
    assert_eq!(
        rig.ask(4000, &name(8)),
        Err(DropReason::EngineBusy),
        "half of it is the other's"
    );
    assert_eq!(rig.proxy.in_flight(), 8);
}

#[test]
fn a_vm_that_is_gone_is_forgotten() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    let other = test_vm::vm(2);
    rig.ask(4000, &www(1)).unwrap();
    rig.ask_as(
        &other,
        Origin::Udp {
            guest: ([10, 0, 2, 15], 5).into(),
            server: ASKED.into(),
        },
        &www(2),
    )
    .unwrap();
    rig.ask(4000, &ask(3, "alone.example.", RecordType::A))
        .unwrap();
    rig.proxy.forget(VmId::new(1));
    assert_eq!(rig.proxy.in_flight(), 1);
    upstream.answer(60, ADDRESS);
    upstream.query();
    rig.settle();
    assert_eq!(rig.told().metadata.id, 2);
    assert!(rig.proxy.in_flight.is_clean());
}

#[test]
fn packets_come_in_and_go_out_as_the_guest_sees_them() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    let payload = www(5).to_vec().unwrap();
    let (guest, server) = (
        "10.0.2.15:4000".parse().unwrap(),
        "8.8.4.4:53".parse().unwrap(),
    );
    let good = Datagram {
        from: guest,
        to: server,
        payload: &payload,
    };
    let send = |rig: &mut Rig, datagram: Datagram<'_>| {
        rig.proxy
            .query_packet(as_guest(&rig.vm), &datagram.emit(), &rig.poller, rig.now_ns)
    };
    let spoofed = Datagram {
        from: "10.0.2.16:4000".parse().unwrap(),
        ..good
    };
    assert_eq!(send(&mut rig, spoofed), Err(DropReason::Spoofed));
    let group = Datagram {
        to: "255.255.255.255:53".parse().unwrap(),
        ..good
    };
    assert_eq!(send(&mut rig, group), Err(DropReason::Group));
    let junk = Datagram {
        payload: b"GET / HTTP/1.1",
        ..good
    };
    assert!(send(&mut rig, junk).is_ok(), "any 12 bytes are a header");
    assert!(rig.reply().is_some());
    let response = Datagram {
        payload: &[0, 1, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ..good
    };
    assert_eq!(send(&mut rig, response), Err(DropReason::ServiceReject));
    send(&mut rig, good).unwrap();
    upstream.answer(60, ADDRESS);
    rig.settle();
    let packet = rig.proxy.next_reply().unwrap().to_packet().unwrap();
    let reply = Datagram::parse(&packet).unwrap();
    assert_eq!((reply.from, reply.to), (server, guest));
    assert_eq!(read(reply.payload).metadata.id, 5);
}

struct Recording(Rc<RefCell<Vec<String>>>);

impl NamePolicy for Recording {
    fn question(&mut self, vm: VmId, name: Name<'_>, qtype: u16) -> NameVerdict {
        self.0
            .borrow_mut()
            .push(format!("{vm} asks {name} {qtype}"));
        match name.labels().next() {
            Some(b"bad") => Err(ExtendedError::blocked("no".into())),
            _ => Ok(()),
        }
    }

    fn answer(
        &mut self,
        vm: VmId,
        name: Name<'_>,
        answer: &Answer,
        age_s: u32,
        _: u64,
    ) -> NameVerdict {
        let at = answer.addresses().map(|(a, ttl)| (a, ttl - age_s));
        self.0
            .borrow_mut()
            .push(format!("{vm} hears {name} {:?}", at.collect::<Vec<_>>()));
        Ok(())
    }
}

#[test]
fn the_policy_sees_each_question_and_each_answer_also_from_the_cache() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[]);
    let seen = Rc::new(RefCell::new(Vec::new()));
    let policy = Box::new(Recording(seen.clone()));
    rig.proxy = Proxy::new(&[upstream.address], Limits::default(), policy);
    rig.ask(4000, &ask(1, "Bad.example.", RecordType::A))
        .unwrap();
    assert_eq!(rig.told().metadata.response_code, ResponseCode::Refused);
    rig.ask(4000, &www(1)).unwrap();
    upstream.answer(60, ADDRESS);
    rig.settle();
    rig.pass(10 * SECOND_NS);
    let other = test_vm::vm(2);
    rig.ask_as(&other, Origin::Tcp { connection: 1 }, &www(1))
        .unwrap();
    let expected = [
        "1 asks bad.example. 1",
        "1 asks www.example.com. 1",
        "1 hears www.example.com. [(192.0.2.1, 60)]",
        "2 asks www.example.com. 1",
        "2 hears www.example.com. [(192.0.2.1, 50)]",
    ];
    assert_eq!(*seen.borrow(), expected);
}

/// `cargo test --release -p userspace-nat measure -- --ignored --nocapture`: questions a second,
/// packet in to packet out, from the cache and by a resolver on loopback.
#[test]
#[ignore = "a measurement"]
fn measure_questions() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    let (from, to) = (
        "10.0.2.15:4000".parse().unwrap(),
        "8.8.4.4:53".parse().unwrap(),
    );
    let packet = |i: u32| {
        let payload = ask(1, &format!("n{i}.example."), RecordType::A)
            .to_vec()
            .unwrap();
        Datagram {
            from,
            to,
            payload: &payload,
        }
        .emit()
    };
    let packets: Vec<_> = (0..5000).map(packet).collect();
    let started = Instant::now();
    for packet in &packets {
        rig.proxy
            .query_packet(as_guest(&rig.vm), packet, &rig.poller, rig.now_ns)
            .unwrap();
        upstream.answer(60, ADDRESS);
        let mut ready = Vec::new();
        rig.poller.wait(Some(SECOND_NS), &mut ready).unwrap();
        rig.proxy.on_ready(ready[0], &rig.poller, rig.now_ns);
        rig.proxy.next_reply().unwrap().to_packet().unwrap();
    }
    let took = started.elapsed().as_nanos() as f64 / packets.len() as f64;
    println!("by a resolver, its own work included: {took:.0} ns");
    let started = Instant::now();
    for packet in packets.iter().cycle().take(1_000_000) {
        rig.proxy
            .query_packet(as_guest(&rig.vm), packet, &rig.poller, rig.now_ns)
            .unwrap();
        rig.proxy.next_reply().unwrap().to_packet().unwrap();
    }
    let took = started.elapsed().as_nanos() as f64 / 1e6;
    println!("from the cache: {took:.0} ns, {:.0} a second", 1e9 / took);
}

/// No route leads to any resolver.
#[derive(Debug)]
struct Nowhere;

impl Ways for Nowhere {
    fn are_hosts(&self, _: VmId) -> bool {
        false
    }

    fn way(&self, _: VmId, _: SocketAddr, _: Protocol) -> Option<Way> {
        None
    }
}

/// Asks as the guest whose questions leave by these ways.
fn ask_by(rig: &mut Rig, ways: &dyn Ways, query: &Message) {
    let vm = rig.vm.clone();
    let guest = Guest {
        vm: &vm,
        has_ipv6: false,
        ways,
    };
    let origin = Origin::Udp {
        guest: ([10, 0, 2, 15], 4000).into(),
        server: ASKED.into(),
    };
    let query = query.to_vec().unwrap();
    rig.proxy
        .query(guest, origin, &query, &rig.poller, rig.now_ns)
        .unwrap();
}

#[test]
fn a_guest_is_told_that_no_route_leads_to_a_resolver() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    ask_by(&mut rig, &Nowhere, &with_edns(www(1), 1232, false));
    let told = rig.proxy.next_reply().unwrap().message;
    assert_eq!(read(&told).metadata.response_code, ResponseCode::ServFail);
    let reason = b"no route";
    assert!(told.windows(reason.len()).any(|part| part == reason));
    assert!(upstream.is_idle());
    assert_eq!(rig.counted(), (1, 0, 1));
    // Questions that fail otherwise have no such reason.
    rig.ask(4001, &with_edns(www(2), 1232, false)).unwrap();
    upstream.refuse(ResponseCode::ServFail);
    rig.settle();
    let told = rig.proxy.next_reply().unwrap().message;
    assert!(!told.windows(reason.len()).any(|part| part == reason));
}

/// Datagrams to a resolver leave, and connections do not.
#[derive(Debug)]
struct ByDatagrams;

impl Ways for ByDatagrams {
    fn are_hosts(&self, _: VmId) -> bool {
        false
    }

    fn way(&self, _: VmId, _: SocketAddr, by: Protocol) -> Option<Way> {
        (by == Protocol::Udp).then(Way::default)
    }
}

#[test]
fn a_question_by_tcp_leaves_by_the_way_of_connections() {
    let upstream = Upstream::new();
    let mut rig = Rig::new(&[&upstream]);
    ask_by(&mut rig, &ByDatagrams, &www(1));
    upstream.truncate();
    rig.settle();
    assert!(rig.told().metadata.truncation, "there is no way by TCP");
}
