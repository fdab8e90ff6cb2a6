use std::{
    io::{self, Cursor, SeekFrom},
    sync::{Arc, Mutex},
    time::Duration,
};

use slipgate_abi::{Ip4, Protocol, RuleIndex, Slot, SlotIndex, Verdict, VmId};
use slipgate_model::{FlowAddresses, FlowTuple, Labels, TranslatedId};

use super::*;
use crate::flow::{EndReason, Ended};

#[derive(Clone, Default)]
struct Sink {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Takes so many bytes, then fails once.
    fails_after: Arc<Mutex<Option<usize>>>,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut fails_after = self.fails_after.lock().unwrap();
        let n = match *fails_after {
            Some(0) => {
                *fails_after = None;
                return Err(io::ErrorKind::StorageFull.into());
            }
            Some(n) => n.min(bytes.len()),
            None => bytes.len(),
        };
        if let Some(left) = &mut *fails_after {
            *left -= n;
        }
        self.bytes.lock().unwrap().extend_from_slice(&bytes[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// As an empty file.
impl Read for Sink {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }
}

impl Seek for Sink {
    fn seek(&mut self, _: SeekFrom) -> io::Result<u64> {
        Ok(0)
    }
}

fn ended(slot: u32) -> Ended {
    let ip = |octets| Ip4 { octets };
    Ended {
        slot: SlotIndex::new(slot),
        addresses: FlowAddresses {
            guest: [10, 0, 2, 15].into(),
            remote: [198, 51, 100, 1].into(),
            nat: [192, 0, 2, 1].into(),
        },
        content: Slot {
            generation: 3,
            verdict: Verdict::Closing,
            tcp: 0,
            next_hop: 0,
            tx_packets: 1,
            tx_bytes: 2,
            rx_packets: 3,
            rx_bytes: 4,
            tx_last_ns: 0,
            rx_last_ns: 0,
            vm: 1,
            vm_row: 1,
            guest: ip([10, 0, 2, 15]),
            remote: ip([198, 51, 100, 1]),
            nat: ip([192, 0, 2, 1]),
            guest_port: 5_000,
            remote_port: 443,
            nat_port: 61_000,
            protocol: Protocol::Udp,
            flags: 0,
            isn: 0,
            created_ns: 1_000_000_000,
            rule: 2,
            uplink_ifindex: 1,
            owner: 0,
            epoch: 1,
            fin_end_tx: 0,
            fin_end_rx: 0,
            connect_us: 0,
        },
        reason: EndReason::Idle,
        held: false,
        ended_ns: 2_500_000_000,
    }
}

const A: VmText<'_> = VmText {
    name: "a",
    labels: None,
};

const NAMES: Names<'_> = Names {
    vm: VmText {
        name: "a \"b\"",
        labels: None,
    },
    rule: Some("--allow 198.51.100.0/24"),
    dns: None,
    uplink: None,
    moved_to: None,
};

fn at(seconds: u64, millis: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(millis)
}

#[test]
fn a_line_is_json_with_every_field() {
    let sink = Sink::default();
    let mut log = FlowLog::new(Some(Box::new(sink.clone())));
    log.set_instance(0x5f3a_91c2);
    log.flow_end(&ended(17), NAMES, at(1_700_000_001, 500));
    log.flush();
    let text = sink.bytes.lock().unwrap().clone();
    let line: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(
        line,
        serde_json::json!({
            "event": "flow_end", "id": "5f3a91c2-17-3", "vm": "a \"b\"", "proto": "udp",
            "guest": "10.0.2.15:5000", "remote": "198.51.100.1:443", "nat": "192.0.2.1:61000",
            "rule": 2, "rule_text": "--allow 198.51.100.0/24", "verdict": "fast",
            "started": "2023-11-14T22:13:20.000Z", "duration_ms": 1500,
            "tx_packets": 1, "tx_bytes": 2, "rx_packets": 3, "rx_bytes": 4,
            "end": "idle", "direction": "outbound", "path": "kernel",
        })
    );
    assert_eq!(log.counts(), (1, 0));
}

#[test]
fn what_can_t_be_written_is_counted_and_the_next_line_is_whole() {
    let sink = Sink::default();
    *sink.fails_after.lock().unwrap() = Some(10);
    let mut log = FlowLog::new(Some(Box::new(sink.clone())));
    log.flow_end(&ended(1), NAMES, at(1_700_000_000, 0));
    log.flow_end(&ended(2), NAMES, at(1_700_000_000, 0));
    log.flush();
    assert_eq!(log.counts(), (0, 2));
    log.flow_end(&ended(3), NAMES, at(1_700_000_000, 0));
    log.flush();
    assert_eq!(log.counts(), (1, 2));
    let text = sink.bytes.lock().unwrap().clone();
    let ids = recorded_ids(&mut Cursor::new(text)).unwrap();
    assert_eq!(
        ids.into_iter().collect::<Vec<_>>(),
        [TranslatedId {
            instance: 0,
            slot: SlotIndex::new(3),
            generation: 3
        }]
    );
}

#[test]
fn rotation_loses_no_record() {
    let (old, new) = (Sink::default(), Sink::default());
    let mut log = FlowLog::new(Some(Box::new(old.clone())));
    log.flow_end(&ended(1), NAMES, at(1, 0));
    log.set_file(new.clone());
    log.flow_end(&ended(2), NAMES, at(1, 0));
    log.flush();
    let ids =
        |sink: &Sink| recorded_ids(&mut Cursor::new(sink.bytes.lock().unwrap().clone())).unwrap();
    assert!(ids(&old).contains(&TranslatedId {
        instance: 0,
        slot: SlotIndex::new(1),
        generation: 3
    }));
    assert!(ids(&new).contains(&TranslatedId {
        instance: 0,
        slot: SlotIndex::new(2),
        generation: 3
    }));
}

#[test]
fn garbage_in_a_log_is_passed_over() {
    let text = b"\xff\xfe\n{\"id\":\"00000000-1-2\"}\n{\"id\":\"x\"}\n{\"id\":7}\nnot json\n{\"id\":\"00000000-3-4\"";
    let ids = recorded_ids(&mut Cursor::new(&text[..])).unwrap();
    assert_eq!(
        ids.into_iter().collect::<Vec<_>>(),
        [TranslatedId {
            instance: 0,
            slot: SlotIndex::new(1),
            generation: 2
        }]
    );
}

#[test]
fn only_what_ended_was_recorded() {
    let text = b"{\"event\":\"flow_start\",\"id\":\"00000000-1-2\"}\n\
        {\"event\":\"dns\",\"name\":\"a\"}\n{\"event\":\"flow_end\",\"id\":\"00000000-3-4\"}\n\
        {\"event\":\"flow_end\",\"id\":\"r00000000-3\"}\n";
    let ids = recorded_ids(&mut Cursor::new(&text[..])).unwrap();
    assert_eq!(
        ids.into_iter().map(|id| id.slot.get()).collect::<Vec<_>>(),
        [3]
    );
}

/// Returns the lines of a log of `events` to which `tell` records.
fn lines(events: Events, tell: impl FnOnce(&mut FlowLog)) -> Vec<serde_json::Value> {
    let sink = Sink::default();
    let mut log = FlowLog::new(Some(Box::new(sink.clone()))).of(events);
    tell(&mut log);
    log.flush();
    let text = sink.bytes.lock().unwrap().clone();
    let lines = text.split(|b| *b == b'\n').filter(|line| !line.is_empty());
    lines
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect()
}

#[test]
fn a_log_has_the_events_that_it_wants() {
    let all = |log: &mut FlowLog| {
        log.flow_end(&ended(1), NAMES, at(1, 0));
        log.relayed(&relayed(), None, NAMES, 0, at(1, 0));
        log.dns(&question(), A, 0, at(1, 0));
    };
    let events = |events| {
        let lines = lines(events, all).into_iter();
        lines
            .map(|line| line["event"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(events(Events::ALL), ["flow_end", "flow_start", "dns"]);
    for event in Event::ALL {
        let only = events(Events::from_iter([event]));
        assert!(only.iter().all(|name| name == event.name()), "{only:?}");
    }
}

fn relayed() -> RelayedFlow {
    RelayedFlow {
        number: 9,
        vm: VmId::new(1),
        protocol: Protocol::Tcp,
        guest: "10.0.2.15:80".parse().unwrap(),
        remote: "127.0.0.1:5555".parse().unwrap(),
        inbound: true,
        nat: Some("127.0.0.1:8080".parse().unwrap()),
        rule: Some(RuleIndex::new(4)),
        host: None,
        rule_text: None,
        opened_ns: 1_000_000_000,
        connect_us: 250,
        tx: (3, 4_000),
        rx: (5, 600),
        last_ns: 0,
    }
}

#[test]
fn a_relayed_flow_has_the_fields_of_any_other_but_for_tcp() {
    let end = RelayedEnd {
        reason: "closed",
        at_ns: 3_000_000_000,
    };
    let lines = lines(Events::ALL, |log| {
        log.run = 0xabc;
        log.relayed(
            &relayed(),
            Some(end),
            NAMES,
            3_000_000_000,
            at(1_700_000_002, 0),
        );
    });
    assert_eq!(
        lines,
        [serde_json::json!({
            "event": "flow_end", "id": "r00000abc-9", "vm": "a \"b\"", "proto": "tcp",
            "guest": "10.0.2.15:80", "remote": "127.0.0.1:5555", "nat": "127.0.0.1:8080",
            "rule": 4, "rule_text": "--allow 198.51.100.0/24", "verdict": "relay",
            "started": "2023-11-14T22:13:20.000Z", "duration_ms": 2000, "connect_us": 250,
            "tx_packets": 3, "tx_bytes": 4000, "rx_packets": 5, "rx_bytes": 600,
            "end": "closed", "direction": "inbound", "path": "relay",
        })]
    );
}

fn question() -> Question {
    Question {
        vm: VmId::new(1),
        server: Some("10.0.2.3".parse().unwrap()),
        name: "api.example.com".into(),
        qtype: 28,
        source: Source::Upstream("192.0.2.53:53".parse().unwrap()),
        rule: Some("--allow *.example.com".into()),
        refused: None,
        rcode: 0,
        chain: vec!["cdn.example.net".into()],
        addresses: vec!["2001:db8::1".parse().unwrap()],
        left_out: 0,
        ttl_s: Some(60),
        asked_ns: 1_000_000,
        answered_ns: 3_500_000,
    }
}

#[test]
fn questions_say_what_became_of_them() {
    let refused = Question {
        source: Source::Policy,
        refused: Some("x is refused by rule 1, --deny x".into()),
        server: None,
        qtype: 65_280,
        rcode: 5,
        chain: Vec::new(),
        addresses: Vec::new(),
        ttl_s: None,
        left_out: 3,
        ..question()
    };
    let failed = Question {
        source: Source::Nobody,
        rcode: 2,
        ..question()
    };
    let lines = lines(Events::ALL, |log| {
        for question in [question(), refused, failed] {
            log.dns(&question, A, 1_000_000, at(1_700_000_000, 0));
        }
    });
    assert_eq!(
        lines[0],
        serde_json::json!({
            "event": "dns", "time": "2023-11-14T22:13:20.000Z", "vm": "a",
            "name": "api.example.com", "type": "AAAA", "transport": "udp", "server": "10.0.2.3",
            "verdict": "allowed", "rule_text": "--allow *.example.com", "rcode": "NOERROR",
            "chain": ["cdn.example.net"], "answers": ["2001:db8::1"], "ttl_s": 60, "source": "upstream",
            "upstream": "192.0.2.53:53", "latency_us": 2500,
        })
    );
    assert_eq!(
        [
            &lines[1]["verdict"],
            &lines[1]["transport"],
            &lines[1]["type"]
        ],
        ["refused", "tcp", "TYPE65280"]
    );
    assert_eq!(lines[1]["why"], "x is refused by rule 1, --deny x");
    assert_eq!(lines[1]["answers_left_out"], 3);
    assert!(lines[1].get("chain").is_none());
    assert_eq!(
        [
            &lines[2]["verdict"],
            &lines[2]["source"],
            &lines[2]["rcode"]
        ],
        ["failed", "none", "SERVFAIL"]
    );
}

#[test]
fn every_record_has_the_labels_of_its_vm() {
    let labels = Labels::from([("tenant".to_owned(), "x".to_owned())]);
    let vm = VmText {
        labels: Some(&labels),
        ..A
    };
    let names = Names { vm, ..NAMES };
    let mut refusals = Refusals::default();
    refusals.note(VmId::new(1), "deny", None, &tuple(1), 1);
    let of_vm = lines(Events::ALL, |log| {
        log.flow_end(&ended(1), names, at(1, 0));
        log.relayed(&relayed(), None, names, 0, at(1, 0));
        log.dns(&question(), vm, 0, at(1, 0));
        refusals.report(log, |_, _| (vm, None), 2, at(1, 0));
    });
    assert_eq!(of_vm.len(), 4);
    for line in of_vm {
        assert_eq!(line["labels"], serde_json::json!({ "tenant": "x" }));
    }
    let of_another = lines(Events::ALL, |log| log.dns(&question(), A, 0, at(1, 0)));
    assert_eq!(of_another[0].get("labels"), None);
}

fn tuple(port: u16) -> FlowTuple {
    FlowTuple {
        scope: 1,
        local: [10, 0, 2, 15].into(),
        remote: [203, 0, 113, 9].into(),
        local_port: port,
        remote_port: 443,
        protocol: 6,
    }
}

fn report(refusals: &mut Refusals, now_ns: u64) -> Vec<serde_json::Value> {
    lines(Events::ALL, |log| {
        let names = |_, rule: Option<RuleIndex>| (A, rule.map(|_| "--deny x"));
        refusals.report(log, names, now_ns, at(1_700_000_000, 0));
    })
}

#[test]
fn refusals_are_told_together_and_once() {
    let mut refusals = Refusals::default();
    let second = 1_000_000_000;
    for n in 0..5 {
        refusals.note(
            VmId::new(1),
            "rule",
            Some(RuleIndex::new(3)),
            &tuple(4_000 + n),
            u64::from(n) * second,
        );
    }
    assert_eq!(
        report(&mut refusals, 4 * second),
        [serde_json::json!({
            "event": "refused", "vm": "a", "reason": "rule", "rule": 3, "rule_text": "--deny x",
            "count": 5, "first": "2023-11-14T22:13:16.000Z", "last": "2023-11-14T22:13:20.000Z",
            "proto": "tcp", "guest": "10.0.2.15:4004", "remote": "203.0.113.9:443",
        })]
    );
    assert_eq!(
        report(&mut refusals, 5 * second),
        [] as [serde_json::Value; 0]
    );
    refusals.note(
        VmId::new(1),
        "rule",
        Some(RuleIndex::new(3)),
        &tuple(1),
        6 * second,
    );
    let more = report(&mut refusals, 6 * second);
    assert_eq!(
        (&more[0]["count"], &more[0]["first"]),
        (&1.into(), &more[0]["last"])
    );
    let samples = refusals.samples(VmId::new(1), "a", |_| Some("--deny x"), 7 * second);
    assert_eq!((samples[0].count, samples[0].last_ms_ago), (6, 1_000));
    refusals.forget(VmId::new(1));
    assert!(refusals.samples(VmId::new(1), "a", |_| None, 0).is_empty());
}

#[test]
fn refusals_are_bounded_and_none_goes_uncounted() {
    let mut refusals = Refusals::default();
    for rule in 0..1_000 {
        refusals.note(
            VmId::new(1),
            "rule",
            Some(RuleIndex::new(rule)),
            &tuple(1),
            u64::from(rule),
        );
    }
    let first = report(&mut refusals, 1_000);
    assert_eq!(first.len(), 33, "32 rules, and the rest without");
    let count = |lines: &[serde_json::Value]| -> u64 {
        lines
            .iter()
            .map(|line| line["count"].as_u64().unwrap())
            .sum()
    };
    assert_eq!(count(&first), 1_000);
    // What was told makes room for what is new.
    for rule in 2_000..2_032 {
        refusals.note(
            VmId::new(1),
            "rule",
            Some(RuleIndex::new(rule)),
            &tuple(1),
            u64::from(rule),
        );
    }
    let second = report(&mut refusals, 3_000);
    assert_eq!((second.len(), count(&second)), (32, 32));
    assert!(
        second
            .iter()
            .all(|line| line["rule"].as_u64() >= Some(2_000))
    );
    assert!(refusals.samples(VmId::new(1), "a", |_| None, 0).len() <= 33);
}

#[test]
fn rfc3339_times() {
    for (seconds, millis, text) in [
        (0, 0, "1970-01-01T00:00:00.000Z"),
        (951_782_399, 999, "2000-02-28T23:59:59.999Z"),
        (951_782_400, 0, "2000-02-29T00:00:00.000Z"),
        (1_709_164_800, 1, "2024-02-29T00:00:00.001Z"),
        (4_102_444_799, 0, "2099-12-31T23:59:59.000Z"),
    ] {
        assert_eq!(Rfc3339(at(seconds, millis)).to_string(), text);
        assert_eq!(
            serde_json::to_value(Rfc3339(at(seconds, millis))).unwrap(),
            text
        );
    }
    // Cut, not rounded.
    let late = at(4_102_444_799, 999) + Duration::from_nanos(999_999);
    assert_eq!(Rfc3339(late).to_string(), "2099-12-31T23:59:59.999Z");
    // A clock that stands wrong.
    let before = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
    assert_eq!(Rfc3339(before).to_string(), "1970-01-01T00:00:00.000Z");
}
