//! Tests of listeners to a VM's records.
use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
};

use slipgate_abi::{VmId, VmRow};
use slipgate_policy::{Action, Rule};

use super::rig::*;
use crate::{
    clock::SECOND_NS,
    event_loop::{MOST_LISTENERS, NotListening},
    record::{Event, Events},
};

/// Begins to listen to a VM; what comes out of the socket.
fn listen(rig: &mut Rig, row: u16) -> (UnixStream, Result<(), NotListening>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let listening = rig.tell(move |engine| engine.listen(VmRow::new(row), theirs.into()));
    (ours, listening)
}

/// The lines received so far, and whether the stream has ended.
fn heard(stream: &mut UnixStream) -> (Vec<serde_json::Value>, bool) {
    let mut text = Vec::new();
    let ended = match stream.read_to_end(&mut text) {
        Ok(_) => true,
        Err(e) if e.kind() == ErrorKind::WouldBlock => false,
        Err(e) => panic!("{e}"),
    };
    let lines = text.split(|b| *b == b'\n').filter(|line| !line.is_empty());
    let parse = |line| serde_json::from_slice(line).expect("a whole line");
    (lines.map(parse).collect(), ended)
}

fn events<'l>(lines: &'l [serde_json::Value]) -> Vec<(&'l str, &'l str)> {
    let of = |value: &'l serde_json::Value| value.as_str().unwrap_or("");
    lines
        .iter()
        .map(|line| (of(&line["event"]), of(&line["guest"])))
        .collect()
}

#[test]
fn a_listener_hears_of_flows_that_live_begin_and_end_of_its_vm_alone() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 1);
    rig.connect_from(2, 41_000, 1);
    let (mut ours, listening) = listen(&mut rig, 1);
    assert_eq!(listening, Ok(()));
    let (lines, _) = heard(&mut ours);
    assert_eq!(events(&lines), [("flow_start", "10.0.2.15:40000")]);
    rig.connect(40_001, 1);
    rig.connect_from(2, 41_001, 1);
    rig.close(40_000, nat, true);
    rig.pass(300 * SECOND_NS);
    let (lines, ended) = heard(&mut ours);
    let expected = [
        ("flow_start", "10.0.2.15:40001"),
        ("flow_end", "10.0.2.15:40000"),
    ];
    assert_eq!(events(&lines), expected);
    assert!(!ended);
    // The file has what it was to have.
    assert!(rig.records().iter().all(|r| r["event"] == "flow_end"));
    assert_eq!(rig.records().len(), 1);
    // Enough: the rest, and the end.
    rig.guest(1, &syn((GUEST, 40_002), SERVER, 1));
    ours.shutdown(Shutdown::Write).unwrap();
    rig.turn();
    rig.turn();
    let (lines, ended) = heard(&mut ours);
    assert_eq!(events(&lines), [("flow_start", "10.0.2.15:40002")]);
    assert!(ended);
    assert!(!rig.engine.log.wants(Event::FlowStart), "nobody does now");
    assert!(!rig.engine.core.journal.records_starts);
}

#[test]
fn who_is_gone_is_forgotten_and_so_is_who_hears_of_no_vm() {
    let mut rig = Rig::with(Setup {
        events: Events::ALL,
        ..Setup::default()
    });
    assert_eq!(listen(&mut rig, 9).1, Err(NotListening::NoVm));
    let mut all: Vec<_> = (0..MOST_LISTENERS).map(|_| listen(&mut rig, 1)).collect();
    assert!(all.iter().all(|(_, listening)| listening.is_ok()));
    assert_eq!(listen(&mut rig, 1).1, Err(NotListening::TooMany));
    let (mut first, _) = all.remove(0);
    drop(all);
    rig.turn();
    rig.connect(40_000, 1);
    assert_eq!(listen(&mut rig, 2).1, Ok(()));
    rig.tell(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
    rig.pass(SECOND_NS);
    let (lines, ended) = heard(&mut first);
    assert_eq!(events(&lines), [("flow_start", "10.0.2.15:40000")]);
    assert!(ended);
    assert!(rig.engine.core.journal.records_starts, "the file's");
}

#[test]
fn a_slow_listener_loses_counted_lines_and_nobody_waits_for_it() {
    let mut rig = Rig::new();
    let (mut ours, _) = listen(&mut rig, 1);
    for isn in 0..10_u32 {
        for port in 40_000..40_900 {
            rig.guest(1, &syn((GUEST, port), SERVER, isn * 1_000_000));
        }
        let what = slipgate_model::Subject::Vm { row: VmRow::new(1) };
        rig.send(move |engine| {
            engine.cut(what);
        });
        rig.pass(SECOND_NS);
    }
    let mut text = Vec::new();
    loop {
        let before = text.len();
        let _ = ours.read_to_end(&mut text);
        if text.len() == before {
            break;
        }
        rig.turn();
    }
    let (mut told, mut lost) = (0, 0);
    for line in text.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
        let line: serde_json::Value = serde_json::from_slice(line).expect("a whole line");
        match line["event"].as_str() {
            Some("lost") => lost += line["count"].as_u64().unwrap(),
            _ => told += 1,
        }
    }
    assert!(lost > 0);
    let ended = rig.records().len() as u64;
    assert!(ended > 3_000);
    assert_eq!(told + lost, 2 * ended);
}

/// A process that is sent events; `wants`: which.
fn ask(rig: &mut Rig, wants: &[Event]) -> UnixStream {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    rig.tell(move |engine| engine.send_events(theirs.into()))
        .unwrap();
    ours.write_all(&[Events::of(wants).bits()]).unwrap();
    rig.turn();
    ours
}

#[test]
fn events_of_all_vms_are_made_while_they_are_asked_for() {
    let mut rig = Rig::new();
    let mut none = ask(&mut rig, &[]);
    assert!(!rig.engine.core.journal.records_starts);
    let mut ends = ask(&mut rig, &[Event::FlowEnd]);
    let mut both = ask(&mut rig, &[Event::FlowStart, Event::FlowEnd]);
    assert!(rig.engine.core.journal.records_starts);
    let nat = rig.connect(40_000, 1);
    rig.connect_from(2, 41_000, 1);
    let (lines, _) = heard(&mut both);
    let began = [
        ("flow_start", "10.0.2.15:40000"),
        ("flow_start", "10.0.2.15:41000"),
    ];
    assert_eq!(events(&lines), began);
    // Another set, and unknown bits with it.
    both.write_all(&[0xf0]).unwrap();
    rig.turn();
    assert!(!rig.engine.core.journal.records_starts);
    rig.close(40_000, nat, true);
    rig.pass(300 * SECOND_NS);
    let ended = [("flow_end", "10.0.2.15:40000")];
    assert_eq!(events(&heard(&mut ends).0), ended);
    assert_eq!(events(&heard(&mut both).0), []);
    assert_eq!(events(&heard(&mut none).0), []);
    drop((none, ends, both));
    rig.turn();
    // All places are free again.
    let all: Vec<_> = (0..4).map(|_| ask(&mut rig, &[])).collect();
    let (_, theirs) = UnixStream::pair().unwrap();
    let one_more = rig.tell(move |engine| engine.send_events(theirs.into()));
    assert_eq!(one_more, Err(NotListening::TooMany));
    drop(all);
}

#[test]
fn refusals_are_summed_up_each_second_for_who_asks() {
    let mut rig = Rig::with(Setup {
        rules: vec![Rule::Match(
            Action::Deny,
            "198.51.100.0/24".parse().unwrap(),
        )],
        ..Setup::default()
    });
    let refuse = |rig: &mut Rig, port| {
        rig.guest(1, &syn((GUEST, port), SERVER, 1));
    };
    // Before anyone asked.
    refuse(&mut rig, 40_000);
    let mut ours = ask(&mut rig, &[Event::Refused]);
    for port in [40_001, 40_002] {
        refuse(&mut rig, port);
    }
    rig.pass(2 * SECOND_NS);
    let (lines, _) = heard(&mut ours);
    assert_eq!(events(&lines), [("refused", "10.0.2.15:40002")]);
    assert_eq!(
        (&lines[0]["count"], &lines[0]["reason"]),
        (&2.into(), &"rule".into())
    );
    rig.pass(2 * SECOND_NS);
    assert_eq!(events(&heard(&mut ours).0), []);
}
