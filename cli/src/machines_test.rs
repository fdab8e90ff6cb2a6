use std::os::unix::net::UnixListener;

use slipgate_ipc::client::{ControlServer, MachineState};

use super::*;

fn status(name: &str, pid: u32, netns: u64) -> MachineStatus {
    MachineStatus {
        name: name.to_owned(),
        pid,
        state: MachineState::Running,
        cpus: 1,
        memory_mib: 64,
        mac: None,
        tap: None,
        netns,
        runs_s: 1,
    }
}

/// Answers one question about a machine.
fn serve(dir: &Path, status: MachineStatus) -> thread::JoinHandle<()> {
    let path = dir.join(format!("{}.sock", status.pid));
    let user = nix::unistd::geteuid().as_raw();
    let mut server = ControlServer::bind(&path, user).unwrap();
    thread::spawn(move || {
        loop {
            if let Some(asked) = server.serve().pop() {
                let machine = Box::new(status);
                server.answer(asked.client, &ClientAnswer::Machine { machine });
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    })
}

#[test]
fn all_are_asked_and_one_that_hangs_delays_nobody() {
    let dir = tempfile::tempdir().unwrap();
    // It listens and never accepts.
    let _hangs = UnixListener::bind(dir.path().join("7.sock")).unwrap();
    // It was killed.
    drop(UnixListener::bind(dir.path().join("8.sock")).unwrap());
    std::fs::write(dir.path().join("notes"), "").unwrap();
    let served: Vec<_> = [status("b", 12, 0), status("a", 11, 0)]
        .into_iter()
        .map(|status| serve(dir.path(), status))
        .collect();
    let began = Instant::now();
    let within = Duration::from_millis(500);
    let machines = Machines::ask_in(dir.path(), None, within).unwrap();
    assert!(began.elapsed() < within * 4);
    let names: Vec<_> = machines.found.iter().map(|f| &*f.status.name).collect();
    assert_eq!(
        (names, machines.silent),
        (vec!["a", "b"], vec!["7".to_owned()])
    );
    served.into_iter().for_each(|thread| thread.join().unwrap());

    let nowhere = Machines::ask_in(&dir.path().join("no"), None, within).unwrap();
    assert!(nowhere.found.is_empty() && nowhere.silent.is_empty());
}

/// A process that is stopped is asked only for itself.
#[test]
fn only_those_of_the_name_or_the_id_are_asked() {
    let dir = tempfile::tempdir().unwrap();
    let socket = |pid: u32| dir.path().join(format!("{pid}.sock"));
    let record = |pid, name: &str| {
        let record = MachineRecord {
            name: name.to_owned(),
        };
        let text = serde_json::to_vec(&record).unwrap();
        std::fs::write(socket(pid).with_extension("json"), text).unwrap();
    };
    let _hangs = UnixListener::bind(socket(7)).unwrap();
    record(7, "stopped");
    record(11, "a");
    let served = serve(dir.path(), status("a", 11, 0));
    // Longer than the test may take.
    let within = Duration::from_secs(600);
    let machines = Machines::ask_in(dir.path(), Some("a"), within).unwrap();
    assert_eq!((machines.found.len(), machines.silent.len()), (1, 0));
    served.join().unwrap();
    for wanted in ["stopped", "7"] {
        let machines = Machines::ask_in(dir.path(), Some(wanted), Duration::from_millis(50));
        assert_eq!(machines.unwrap().silent, ["7"], "{wanted}");
    }
    assert!(
        may_be(&socket(99), "anything"),
        "of which nothing is written"
    );
}

#[test]
fn a_name_or_an_id_names_one_machine() {
    let here = netns_inode().unwrap();
    let machines = |all: &[MachineStatus]| Machines {
        found: all
            .iter()
            .map(|status| Found {
                status: status.clone(),
                socket: PathBuf::new(),
            })
            .collect(),
        silent: Vec::new(),
    };
    let all = [
        status("a", 1, here),
        status("b", 2, here),
        status("b", 3, here + 1),
        status("c", 4, here + 1),
        status("c", 5, here + 1),
    ];
    let pid = |wanted| {
        machines(&all)
            .of(wanted)
            .map(|found| found.map(|f| f.status.pid))
    };
    assert_eq!(pid("a").unwrap(), Some(1));
    assert_eq!(pid("b").unwrap(), Some(2), "the one in this namespace");
    assert_eq!(pid("3").unwrap(), Some(3));
    assert_eq!(pid("d").unwrap(), None);
    let why = pid("c").unwrap_err().to_string();
    assert!(why.contains("4 or 5"), "{why}");
}
