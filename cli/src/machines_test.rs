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
    let machines = Machines::ask_in(dir.path(), within).unwrap();
    assert!(began.elapsed() < within * 4);
    let names: Vec<_> = machines.found.iter().map(|f| &*f.status.name).collect();
    assert_eq!(
        (names, machines.silent),
        (vec!["a", "b"], vec!["7".to_owned()])
    );
    served.into_iter().for_each(|thread| thread.join().unwrap());

    let nowhere = Machines::ask_in(&dir.path().join("no"), within).unwrap();
    assert!(nowhere.found.is_empty() && nowhere.silent.is_empty());
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
