use slipgate_ipc::client::MAX_NOTICE;

use super::*;

fn line(state: &str, event: &str) -> Vec<u8> {
    let line = format!(
        r#"{{"machine": {{"name": "other", "pid": 7, "state": "{state}", "cpus": 1, "memory_mib": 64,
        "tap": null, "netns": 1, "runs_s": 2}}, "event": {event}}}"#
    );
    format!("{}\n", line.replace('\n', " ")).into_bytes()
}

#[test]
fn notices_say_what_a_machine_is_and_are_events() {
    let (mut machine, mut events) = (TiedMachine::of(8), Vec::new());
    assert_eq!(machine.status(), None);
    machine.take("a", &line("running", "null"), &mut events);
    assert_eq!(events, []);
    let status = machine.status().unwrap();
    assert_eq!((status.name.as_str(), status.pid), ("a", 8));
    // However they are divided.
    for byte in [
        line("paused", r#""paused""#),
        line("running", r#""resumed""#),
    ]
    .concat()
    {
        machine.take("a", &[byte], &mut events);
    }
    let vm = || "a".to_owned();
    let changed = [
        Event::MachinePaused { vm: vm() },
        Event::MachineResumed { vm: vm() },
    ];
    assert_eq!(std::mem::take(&mut events), changed);
    let ended = r#"{"ended": {"outcome": "exited", "exit_code": 7}}"#;
    machine.take("a", &line("running", ended), &mut events);
    machine.gone("a", &mut events);
    let ended = Event::MachineEnded {
        vm: vm(),
        outcome: Some("exited".into()),
        exit_code: Some(7),
    };
    assert_eq!(events, [ended]);
    assert_eq!(machine.status(), None);
}

#[test]
fn a_machine_that_is_killed_has_ended_and_another_client_is_none() {
    let (mut machine, mut events) = (TiedMachine::of(8), Vec::new());
    machine.take("a", &line("running", "null"), &mut events);
    machine.gone("a", &mut events);
    let [Event::MachineEnded { outcome: None, .. }] = &events[..] else {
        panic!("{events:?}");
    };
    events.clear();
    let mut attach = TiedMachine::of(8);
    attach.gone("a", &mut events);
    assert_eq!(events, []);
}

#[test]
fn what_is_no_notice_is_passed_over_within_bounds() {
    let (mut machine, mut events) = (TiedMachine::of(8), Vec::new());
    machine.take("a", b"nonsense\n{}\n\xff\n", &mut events);
    machine.take("a", &line("paused", "null"), &mut events);
    assert!(machine.status().is_some());
    for _ in 0..100 {
        machine.take("a", &[b'x'; 1_000], &mut events);
        assert!(machine.lines.kept_bytes() <= 4 * MAX_NOTICE);
    }
    machine.take("a", &line("running", r#""resumed""#), &mut events);
    assert_eq!(events, [], "it is not listened to any more");
}
