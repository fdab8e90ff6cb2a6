use std::io::{BufRead as _, BufReader, Read as _};

use slipgate_ipc::client::MachineState;

use super::*;

fn machine() -> MachineStatus {
    MachineStatus {
        name: "web".into(),
        pid: 7,
        state: MachineState::Paused,
        cpus: 2,
        memory_mib: 64,
        mac: Some("02:00:00:00:00:01".into()),
        tap: Some("sgvm0".into()),
        netns: 1,
        runs_s: 3,
    }
}

#[test]
fn a_notice_is_a_line_and_a_daemon_that_hangs_delays_nobody() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let mut notices = Notices::default();
    // Nobody is told.
    notices.tell(machine(), None);
    notices.go_by(ours);
    notices.tell(machine(), Some(MachineEvent::Paused));
    let mut reader = BufReader::new(theirs);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let notice: MachineNotice = serde_json::from_str(&line).unwrap();
    let event = Some(MachineEvent::Paused);
    let machine_is = machine();
    assert_eq!(
        notice,
        MachineNotice {
            machine: machine_is,
            event
        }
    );

    for _ in 0..10_000 {
        notices.tell(machine(), Some(MachineEvent::Saved));
    }
    // What was sent is whole lines.
    drop(notices);
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert!(rest.lines().count() < 10_000);
    for line in rest.lines() {
        serde_json::from_str::<MachineNotice>(line).unwrap();
    }
}
