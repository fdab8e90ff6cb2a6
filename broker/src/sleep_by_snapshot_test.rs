use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::unistd::geteuid;
use slipgate_ipc::client::{ControlServer, Room, VmChange, VmDefinition, VmStatus};

use super::*;
use crate::test_vm;

/// What a daemon and a machine were asked, in their order; each answers as a test says.
struct Rig {
    dir: tempfile::TempDir,
    asked: mpsc::Receiver<String>,
}

fn served(state: VmState) -> VmStatus {
    test_vm::status(VmDefinition::new("a", "tap0"), state)
}

fn status(state: MachineState) -> MachineStatus {
    MachineStatus {
        name: "a".into(),
        pid: 7,
        state,
        cpus: 1,
        memory_mib: 1,
        mac: None,
        tap: Some("tap0".into()),
        netns: 1,
        runs_s: 1,
    }
}

impl Rig {
    /// `state`: that of the VM. What contains `refuses` is refused.
    fn new(state: VmState, refuses: &'static str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (sender, asked) = mpsc::channel();
        for name in ["daemon", "machine"] {
            let bound = ControlServer::bind(&dir.path().join(name), geteuid().as_raw());
            let mut server = bound.unwrap().of_its_owner();
            let sender = sender.clone();
            // It ends with the test.
            thread::spawn(move || {
                loop {
                    for asked in server.serve() {
                        let text = format!("{:?}", asked.request);
                        let answer = match &asked.request {
                            _ if !refuses.is_empty() && text.contains(refuses) => {
                                ClientAnswer::error("no")
                            }
                            ClientRequest::ListVms => ClientAnswer::VmList {
                                vms: vec![served(state)],
                                room: Room::default(),
                                displaced: Vec::new(),
                            },
                            ClientRequest::KeepVm { .. } => ClientAnswer::Vm {
                                vm: Box::new(served(state)),
                                change: VmChange::Changed,
                            },
                            _ => ClientAnswer::Done,
                        };
                        let word = ["Sleep", "Pause", "Resume", "KeepVm", "Kill", "ListVms"]
                            .into_iter()
                            .find(|word| text.contains(word));
                        let word = word.unwrap_or("another");
                        if sender.send(format!("{name} {word}")).is_err() {
                            return;
                        }
                        server.answer(asked.client, &answer);
                        if word == "Kill" {
                            // Meanwhile it has its disks.
                            thread::sleep(ENDS_AFTER);
                            let _ = sender.send(format!("{name} ends"));
                            return;
                        }
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            });
        }
        Self { dir, asked }
    }

    fn begin(&self, state: MachineState) -> anyhow::Result<SleepBySnapshot> {
        let path = |name| self.dir.path().join(name);
        SleepBySnapshot::begin(&path("daemon"), (&path("machine"), &status(state)))
    }

    #[track_caller]
    fn was_asked(&self, expected: &[&str]) {
        let until = Instant::now() + Duration::from_secs(10);
        for expected in expected {
            let left = until.saturating_duration_since(Instant::now());
            assert_eq!(self.asked.recv_timeout(left).unwrap(), *expected);
        }
        assert!(self.asked.try_recv().is_err());
    }
}

/// How long a machine takes to end once it has answered that it does.
const ENDS_AFTER: Duration = Duration::from_millis(200);
const BEGINS: [&str; 3] = ["daemon ListVms", "daemon Sleep", "machine Pause"];
const TAKES_BACK: [&str; 2] = ["machine Resume", "daemon Resume"];

#[test]
fn what_fails_is_taken_back_and_a_vm_that_is_kept_stays_asleep() {
    let rig = Rig::new(VmState::Served, "");
    let sleep = rig.begin(MachineState::Running).unwrap();
    rig.was_asked(&BEGINS);
    sleep.finish().unwrap();
    // It is gone by then.
    let order: Vec<String> = rig.asked.try_iter().collect();
    assert_eq!(order, ["daemon KeepVm", "machine Kill", "machine ends"]);
    // The snapshot could not be written.
    let rig = Rig::new(VmState::Served, "");
    drop(rig.begin(MachineState::Running).unwrap());
    rig.was_asked(&[&BEGINS[..], &TAKES_BACK].concat());

    let rig = Rig::new(VmState::Served, "KeepVm");
    let sleep = rig.begin(MachineState::Running).unwrap();
    assert!(sleep.finish().is_err());
    rig.was_asked(&[&BEGINS[..], &["daemon KeepVm"], &TAKES_BACK].concat());
    let rig = Rig::new(VmState::Served, "Pause");
    assert!(rig.begin(MachineState::Running).is_err());
    rig.was_asked(&[&BEGINS[..], &TAKES_BACK].concat());
}

#[test]
fn what_slept_or_was_paused_before_stays_so() {
    let rig = Rig::new(VmState::Asleep, "");
    drop(rig.begin(MachineState::Paused).unwrap());
    rig.was_asked(&["daemon ListVms"]);
}

#[test]
fn a_machine_whose_vm_the_daemon_does_not_serve_is_refused() {
    let rig = Rig::new(VmState::Served, "");
    let path = |name| rig.dir.path().join(name);
    let other = MachineStatus {
        tap: Some("tap1".into()),
        ..status(MachineState::Running)
    };
    let refused = SleepBySnapshot::begin(&path("daemon"), (&path("machine"), &other));
    let why = refused.unwrap_err().to_string();
    assert!(why.contains("no daemon serves a"), "{why}");
    rig.was_asked(&["daemon ListVms"]);
}

#[test]
fn the_end_of_another_process_is_waited_for() {
    let mut process = std::process::Command::new("sleep");
    let mut process = process.arg("60").spawn().unwrap();
    let running = || Running::Here(pidfd_of_id(process.id()).unwrap());
    assert!(!running().ends_within(Duration::from_millis(20)));
    let ended = running();
    process.kill().unwrap();
    assert!(ended.ends_within(Duration::from_secs(60)));
    process.wait().unwrap();
}
