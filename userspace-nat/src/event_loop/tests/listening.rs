//! Tests of listeners to a VM's records.
use std::{
    io::{ErrorKind, Read as _},
    net::Shutdown,
    os::unix::net::UnixStream,
};

use slipgate_abi::{VmId, VmRow};

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
