use std::{
    os::unix::fs::PermissionsExt as _,
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd::geteuid,
};
use slipgate_ipc::client::{
    ControlServer, MachineState, PermittedRequest, Room, VmDefinition, VmState,
};

use super::*;
use crate::{host::make_private, test_vm};

/// The socket of a machine that a test answers for, and clients.
struct Rig {
    dir: tempfile::TempDir,
    machine: ControlServer,
    orders: MachineOrders,
    clients: ControlServer,
    asked: Vec<PermittedRequest>,
    /// Description of the machine, as the daemon has it.
    known: MachineStatus,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let machines = dir.path().join("machines");
        make_private(&machines).unwrap();
        std::fs::write(machines.join("7.json"), r#"{"name": "a"}"#).unwrap();
        let bind = |name: &str| {
            let owner = geteuid().as_raw();
            ControlServer::bind(&machines.join(name), owner)
                .unwrap()
                .of_its_owner()
        };
        let snapshots = dir.path().join("snapshots");
        std::fs::create_dir(&snapshots).unwrap();
        std::fs::set_permissions(&snapshots, std::fs::Permissions::from_mode(0o700)).unwrap();
        Self {
            machine: bind("7.sock"),
            clients: bind("clients.sock"),
            orders: MachineOrders::new(
                Some(Snapshots {
                    directory: snapshots,
                    most: 2,
                }),
                dir.path().join("daemon.sock"),
            )
            .unwrap(),
            asked: Vec::new(),
            known: MachineStatus {
                name: "a".into(),
                pid: 7,
                state: MachineState::Running,
                cpus: 1,
                memory_mib: 1,
                mac: Some("02:00:00:00:00:01".into()),
                tap: None,
                netns: 1,
                runs_s: 1,
            },
            dir,
        }
    }

    fn begin(&mut self, order: PassedOrder) -> Result<ClientId, Box<ClientAnswer>> {
        let client = self.clients.take_in();
        let begun = self
            .orders
            .begin_at(&self.machines(), client, self.known.clone(), order);
        begun.map(|()| client)
    }

    fn machines(&self) -> PathBuf {
        self.dir.path().join("machines")
    }

    /// Waits for the order to the machine, and answers it.
    fn answer(&mut self, answer: &ClientAnswer) -> ClientRequest {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            assert!(Instant::now() < until, "no order came");
            self.asked.extend(self.machine.serve());
            if let Some(asked) = self.asked.pop() {
                self.machine.answer(asked.client, answer);
                return asked.request;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the machine to be told that the snapshot is complete.
    #[track_caller]
    fn is_finished(&mut self, snapshot: &Path) {
        let asked = self.answer(&ClientAnswer::Done);
        let ClientRequest::Machine { order } = asked else {
            panic!("{asked:?}");
        };
        assert!(matches!(order, MachineOrder::Finished), "{order:?}");
        for file in SNAPSHOT_FILES {
            assert!(snapshot.join(file).exists(), "{file}");
        }
    }

    fn done(&mut self) -> (ClientId, ClientAnswer) {
        let mut fds = [PollFd::new(self.orders.fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut fds, PollTimeout::from(10_000_u16)), Ok(1));
        let [(client, vm, answer)] = &self.orders.done()[..] else {
            panic!("one order was under way");
        };
        assert_eq!(vm, "a");
        (*client, answer.clone())
    }
}

fn snapshot(to: &str) -> PassedOrder {
    PassedOrder::Snapshot {
        to: to.into(),
        base: None,
        sleep: false,
    }
}

fn refusal(answer: impl Into<Box<ClientAnswer>>) -> (ErrorKind, String) {
    match *answer.into() {
        ClientAnswer::Error { error, kind } => (kind, error),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_order_is_carried_out_beside_others_and_a_second_one_is_refused() {
    let mut rig = Rig::new();
    let client = rig.begin(PassedOrder::Pause).unwrap();
    let (kind, why) = refusal(rig.begin(PassedOrder::Resume).unwrap_err());
    assert_eq!(kind, ErrorKind::Taken);
    assert!(why.contains("another order"), "{why}");
    // Its end does not wait.
    let ended = rig.begin(PassedOrder::Kill).unwrap();
    assert_eq!(
        refusal(rig.begin(PassedOrder::Kill).unwrap_err()).0,
        ErrorKind::Taken
    );
    let mut answered = Vec::new();
    for _ in 0..2 {
        rig.answer(&ClientAnswer::Done);
        answered.push(rig.done());
    }
    answered.sort_by_key(|(id, _)| *id == ended);
    assert_eq!(
        answered,
        [(client, ClientAnswer::Done), (ended, ClientAnswer::Done)]
    );
    // It has room again.
    rig.begin(PassedOrder::Resume).unwrap();
    rig.answer(&ClientAnswer::busy("later"));
    let (kind, why) = refusal(rig.done().1);
    assert_eq!((kind, why.as_str()), (ErrorKind::Busy, "a: later"));
}

#[test]
fn a_snapshot_is_made_in_the_directory_of_the_operator() {
    let mut rig = Rig::new();
    rig.begin(snapshot("warm")).unwrap();
    let machine = serde_json::json!({ "version": 1 });
    let asked = rig.answer(&ClientAnswer::Saved { machine });
    let ClientRequest::Machine { order } = asked else {
        panic!("{asked:?}");
    };
    assert!(matches!(order, MachineOrder::Snapshot { .. }));
    let directory = rig.dir.path().join("snapshots/warm");
    rig.is_finished(&directory);
    let (_, answer) = rig.done();
    let saved = SavedSnapshot {
        name: "warm".into(),
        directory: directory.clone(),
    };
    assert_eq!(answer, ClientAnswer::SnapshotSaved { snapshot: saved });
    // Another one of that name is not.
    rig.begin(snapshot("warm")).unwrap();
    assert_eq!(refusal(rig.done().1).0, ErrorKind::Taken);
    // One that fails leaves nothing.
    rig.begin(snapshot("other")).unwrap();
    rig.answer(&ClientAnswer::error("the disk is full"));
    let (kind, why) = refusal(rig.done().1);
    assert_eq!(
        (kind, why.as_str()),
        (ErrorKind::Invalid, "a: the disk is full")
    );
    assert!(!rig.dir.path().join("snapshots/other").exists());
}

#[test]
fn names_that_lead_elsewhere_and_missing_directories_are_refused() {
    let mut rig = Rig::new();
    for name in [
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "/etc",
        "a\0",
        "ü",
        &"x".repeat(64),
    ] {
        let (kind, why) = refusal(rig.begin(snapshot(name)).unwrap_err());
        assert_eq!(kind, ErrorKind::Invalid);
        assert!(why.contains("the snapshot's name"), "{why}");
    }
    // What others can write to is not written to.
    let snapshots = rig.dir.path().join("snapshots");
    std::fs::set_permissions(&snapshots, std::fs::Permissions::from_mode(0o777)).unwrap();
    rig.begin(snapshot("warm")).unwrap();
    let (_, why) = refusal(rig.done().1);
    assert!(
        why.contains("--snapshot-dir") && why.contains("others"),
        "{why}"
    );
    rig.orders.snapshots = None;
    let (_, why) = refusal(rig.begin(snapshot("warm")).unwrap_err());
    assert!(why.contains("--snapshot-dir DIR"), "{why}");
}

#[test]
fn there_are_no_more_snapshots_than_the_operator_permits() {
    let mut rig = Rig::new();
    let directory = rig.dir.path().join("snapshots");
    for name in ["one", "two"] {
        make_private(&directory.join(name)).unwrap();
    }
    // What is no directory is no snapshot.
    std::fs::write(directory.join("note"), "").unwrap();
    rig.begin(snapshot("three")).unwrap();
    let (kind, why) = refusal(rig.done().1);
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(
        why.contains("2 snapshots, as many as --snapshots-max"),
        "{why}"
    );
    assert!(!directory.join("three").exists(), "nothing is left of it");
    // One that a killed command has left empty is taken, and is none more.
    rig.begin(snapshot("two")).unwrap();
    let machine = serde_json::json!({ "version": 1 });
    rig.answer(&ClientAnswer::Saved { machine });
    rig.is_finished(&directory.join("two"));
    assert!(matches!(rig.done().1, ClientAnswer::SnapshotSaved { .. }));
}

#[test]
fn a_machine_that_has_ended_is_said_to_have() {
    let mut rig = Rig::new();
    let owner = geteuid().as_raw();
    rig.machine = ControlServer::bind(&rig.machines().join("8.sock"), owner).unwrap();
    rig.begin(PassedOrder::Pause).unwrap();
    let (kind, why) = refusal(rig.done().1);
    assert_eq!(
        (kind, why.as_str()),
        (ErrorKind::Removed, "a has ended meanwhile")
    );
    rig.begin(PassedOrder::Kill).unwrap();
    assert_eq!(rig.done().1, ClientAnswer::Done);
    // Another process has its id.
    std::fs::write(rig.machines().join("7.json"), r#"{"name": "b"}"#).unwrap();
    rig.begin(PassedOrder::Pause).unwrap();
    assert_eq!(refusal(rig.done().1).0, ErrorKind::Unknown);
}

#[test]
fn there_are_few_threads() {
    let mut rig = Rig::new();
    for number in 0..MOST_ORDERS {
        rig.orders.under_way.insert((format!("vm{number}"), false));
    }
    assert_eq!(
        refusal(rig.begin(PassedOrder::Pause).unwrap_err()).0,
        ErrorKind::Busy
    );
    // Machines that hang keep none from its end.
    rig.begin(PassedOrder::Kill).unwrap();
    rig.answer(&ClientAnswer::Done);
    assert_eq!(rig.done().1, ClientAnswer::Done);
    for number in 0..MOST_ORDERS {
        rig.orders.under_way.insert((format!("vm{number}"), true));
    }
    assert_eq!(
        refusal(rig.begin(PassedOrder::Kill).unwrap_err()).0,
        ErrorKind::Busy
    );
}

#[test]
fn sockets_that_are_not_the_users_alone_and_other_pid_namespaces_are_refused() {
    let mut rig = Rig::new();
    let set = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let machines = rig.machines();
    set(&machines, 0o755);
    rig.begin(PassedOrder::Kill).unwrap();
    let (kind, why) = refusal(rig.done().1);
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(why.contains("is open to others"), "{why}");
    set(&machines, 0o700);
    rig.known.pid = 0;
    let (kind, why) = refusal(rig.begin(PassedOrder::Kill).unwrap_err());
    assert_eq!(kind, ErrorKind::Unknown);
    assert!(why.contains("another PID namespace"), "{why}");
}

#[test]
fn a_base_of_another_machine_and_a_disk_without_room_are_refused_before_the_order() {
    let mut rig = Rig::new();
    let warm = rig.dir.path().join("snapshots/warm");
    make_private(&warm).unwrap();
    let machine = serde_json::json!({ "version": 1, "machine": {
        "kernel": null, "initrd": null, "cmdline": "", "cpus": 1, "memory_mib": 1, "queues": 1,
        "mac": "02:00:00:00:00:01",
    }});
    let files = [("state", "x".repeat(64)), ("memory", "x".into())];
    for (name, text) in files
        .into_iter()
        .chain([("machine.json", machine.to_string())])
    {
        std::fs::write(warm.join(name), text).unwrap();
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(warm.join(name), mode).unwrap();
    }
    let later = |base: &str| PassedOrder::Snapshot {
        to: "later".into(),
        base: Some(base.into()),
        sleep: false,
    };
    let known = rig.known.clone();
    let others: [fn(&mut MachineStatus); 3] = [
        |machine| machine.cpus = 2,
        |machine| machine.memory_mib = 2,
        |machine| machine.mac = Some("02:00:00:00:00:02".into()),
    ];
    for change in others {
        change(&mut rig.known);
        rig.begin(later("warm")).unwrap();
        let (kind, why) = refusal(rig.done().1);
        assert_eq!(kind, ErrorKind::Invalid);
        assert!(why.contains("of another machine"), "{why}");
        rig.known = known.clone();
    }
    rig.begin(later("absent")).unwrap();
    let (_, why) = refusal(rig.done().1);
    assert!(why.contains("absent can't be read"), "{why}");
    rig.known.memory_mib = u64::MAX;
    rig.begin(snapshot("huge")).unwrap();
    let (_, why) = refusal(rig.done().1);
    assert!(why.contains("MiB free"), "{why}");
    assert!(!rig.dir.path().join("snapshots/huge").exists());
    // One of its own, of which only what differs is asked for.
    rig.known = known;
    rig.begin(later("warm")).unwrap();
    let machine = serde_json::json!({ "version": 1 });
    let asked = rig.answer(&ClientAnswer::Saved { machine });
    let ClientRequest::Machine { order } = asked else {
        panic!("{asked:?}");
    };
    assert!(matches!(order, MachineOrder::Differences { bases, .. } if bases.len() == 1));
    let later_one = rig.dir.path().join("snapshots/later");
    rig.is_finished(&later_one);
    assert!(matches!(rig.done().1, ClientAnswer::SnapshotSaved { .. }));
    std::fs::remove_dir_all(later_one).unwrap();
    // What is no description of a machine leaves nothing.
    rig.begin(PassedOrder::Snapshot {
        to: "odd".into(),
        base: Some("warm".into()),
        sleep: false,
    })
    .unwrap();
    let machine = serde_json::json!("odd");
    rig.answer(&ClientAnswer::Saved { machine });
    let (_, why) = refusal(rig.done().1);
    assert!(why.contains("no object"), "{why}");
    assert!(!rig.dir.path().join("snapshots/odd").exists());
}

#[test]
fn a_snapshot_by_which_a_vm_sleeps_is_taken_back_when_the_daemon_ends() {
    let mut rig = Rig::new();
    rig.known.tap = Some("tap0".into());
    let daemon = rig.dir.path().join("daemon.sock");
    let bound = ControlServer::bind(&daemon, geteuid().as_raw());
    let mut daemon = bound.unwrap().of_its_owner();
    let (sender, asked_daemon) = mpsc::channel();
    // It ends with the test.
    thread::spawn(move || {
        loop {
            for asked in daemon.serve() {
                let answer = match &asked.request {
                    ClientRequest::ListVms => ClientAnswer::VmList {
                        vms: vec![test_vm::status(
                            VmDefinition::new("a", "tap0"),
                            VmState::Served,
                        )],
                        room: Room::default(),
                        displaced: Vec::new(),
                    },
                    _ => ClientAnswer::Done,
                };
                let _ = sender.send(format!("{:?}", asked.request));
                daemon.answer(asked.client, &answer);
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    let sleeps = || PassedOrder::Snapshot {
        to: "warm".into(),
        base: None,
        sleep: true,
    };
    rig.begin(sleeps()).unwrap();
    assert!(rig.orders.has_sleeps());
    let ordered = |request: ClientRequest| match request {
        ClientRequest::Machine { order } => order,
        other => panic!("{other:?}"),
    };
    let first = ordered(rig.answer(&ClientAnswer::Done));
    assert!(matches!(first, MachineOrder::Pause), "{first:?}");
    // It writes for long.
    let until = Instant::now() + Duration::from_secs(10);
    let saving = loop {
        assert!(Instant::now() < until, "no order came");
        if let Some(asked) = rig.machine.serve().pop() {
            break asked;
        }
        thread::sleep(Duration::from_millis(1));
    };
    let second = ordered(saving.request);
    assert!(matches!(second, MachineOrder::Snapshot { .. }));
    rig.orders.give_up_sleeps();
    let third = ordered(rig.answer(&ClientAnswer::Done));
    assert!(matches!(third, MachineOrder::Resume), "{third:?}");
    assert!(!rig.machine.is_connected(saving.client));
    let (kind, why) = refusal(rig.done().1);
    assert_eq!(kind, ErrorKind::Busy, "{why}");
    assert!(!rig.orders.has_sleeps());
    let asked: Vec<String> = asked_daemon.try_iter().collect();
    assert!(asked.last().unwrap().contains("Resume"), "{asked:?}");
    assert!(!rig.dir.path().join("snapshots/warm").exists());
    // No more are begun; others are.
    assert_eq!(refusal(rig.begin(sleeps()).unwrap_err()).0, ErrorKind::Busy);
    rig.begin(PassedOrder::Pause).unwrap();
    rig.answer(&ClientAnswer::Done);
    assert_eq!(rig.done().1, ClientAnswer::Done);
}
