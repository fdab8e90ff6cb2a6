//! Orders to a machine of `slipgate run` by the API of the daemon that serves its VM.
use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
};

use serde_json::{Value, json};
use slipgate_testbed::{
    MicroVm, Slipgate, require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService},
    signal,
    world::{SERVER, UPLINK},
};

use crate::{Bed, WAIT, eventually};

/// A daemon with its API; fields go in order.
pub(crate) struct Stand {
    pub(crate) daemon: Slipgate,
    pub(crate) bed: Bed,
}

impl Stand {
    /// With a directory for snapshots, or none.
    pub(crate) fn new(has_directory: bool) -> Self {
        let bed = Bed::new();
        let path = |name: &str| bed.folder.path().join(name).display().to_string();
        let (api, read, snapshots) = (path("api.sock"), path("read.sock"), path("snapshots"));
        fs::create_dir(&snapshots).unwrap();
        fs::set_permissions(&snapshots, fs::Permissions::from_mode(0o700)).unwrap();
        let mut flags = vec!["--uplink", UPLINK, "--api", &api, "--api-read", &read];
        if has_directory {
            flags.extend(["--snapshot-dir", &snapshots]);
        }
        let daemon = Slipgate::serve(&bed.world.host, &bed.pins, &flags).unwrap();
        Self { daemon, bed }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.bed.folder.path().join(name)
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        ask(&self.path("api.sock"), method, path, body)
    }

    /// The machine as the API shows it.
    pub(crate) fn machine(&self, name: &str) -> Value {
        self.ask("GET", &format!("/v1/machines/{name}"), None).1
    }

    /// The kinds of the machine's events from now on, and their objects.
    pub(crate) fn events(&self) -> mpsc::Receiver<Value> {
        let mut stream = UnixStream::connect(self.path("read.sock")).unwrap();
        let request = "GET /v1/events HTTP/1.0\r\nHost: slipgate\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut lines = BufReader::new(stream).lines();
        // The head is there: it reads from now on.
        while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
        let (sender, events) = mpsc::channel();
        thread::spawn(move || {
            let events = lines.map_while(Result::ok);
            for event in events.filter_map(|line| serde_json::from_str::<Value>(&line).ok()) {
                if sender.send(event).is_err() {
                    break;
                }
            }
        });
        events
    }

    pub(crate) fn start(&self, name: &str, work: &str) -> MicroVm {
        let mut vm = (self.bed).start_with(&["--name", name, "--cmdline", work]);
        vm.await_line("10.0.2.15", WAIT).unwrap();
        vm
    }
}

fn ask(socket: &Path, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
    let body = body.map(|body| body.to_string()).unwrap_or_default();
    let mut stream = UnixStream::connect(socket).unwrap();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: slipgate\r\nConnection: close\r\nContent-Length: {}\r\n\r\n\
         {body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    (status, serde_json::from_str(body).unwrap_or_default())
}

/// Waits for a machine's event of this kind, and passes others over.
#[track_caller]
pub(crate) fn await_event(events: &mpsc::Receiver<Value>, kind: &str) -> Value {
    loop {
        let event = events
            .recv_timeout(WAIT)
            .unwrap_or_else(|_| panic!("no {kind}"));
        if event["event"] == kind {
            return event;
        }
    }
}

#[test]
fn a_machine_is_paused_saved_and_ended_by_the_api_of_its_daemon() {
    require_root_and_tun!();
    require_kvm!();
    let stand = Stand::new(true);
    assert_eq!(stand.ask("GET", "/v1/machines", None), (200, json!([])));
    let close = TcpServer::start(&stand.bed.world.net, (SERVER, 7001), TcpService::Close).unwrap();
    let work = format!("wait 1s; crr {0} 20 close; serve 7 600s", close.address());
    let vm = stand.start("web", &work);
    let events = stand.events();
    let machine = stand.machine("web");
    assert_eq!(
        (&machine["state"], &machine["pid"]),
        (&json!("running"), &json!(vm.broker_pid()))
    );
    assert!(
        machine["tap"].as_str().unwrap().starts_with("sgvm"),
        "{machine}"
    );

    assert_eq!(stand.ask("POST", "/v1/machines/web/pause", None).0, 204);
    assert_eq!(stand.machine("web")["state"], "paused");
    assert_eq!(await_event(&events, "machine_paused")["vm"], "web");
    let warm = json!({ "name": "warm" });
    let (status, saved) = stand.ask("POST", "/v1/machines/web/snapshot", Some(warm.clone()));
    assert_eq!(status, 201, "{saved}");
    let dir = stand.path("snapshots").join("warm");
    assert_eq!(saved, json!({ "name": "warm", "directory": dir }));
    await_event(&events, "machine_saved");
    assert_eq!(stand.machine("web")["state"], "paused");
    assert_eq!(stand.ask("POST", "/v1/machines/web/resume", None).0, 204);
    await_event(&events, "machine_resumed");
    // What has changed since then.
    let later = json!({ "name": "later", "base": "warm" });
    let (status, saved) = stand.ask("POST", "/v1/machines/web/snapshot", Some(later));
    assert_eq!(status, 201, "{saved}");
    let later = PathBuf::from(saved["directory"].as_str().unwrap());
    let machine = fs::read_to_string(later.join("machine.json")).unwrap();
    let machine: Value = serde_json::from_str(&machine).unwrap();
    assert_eq!(machine["base"]["path"], json!(dir));
    let none = json!({ "name": "none", "base": "absent" });
    let (status, problem) = stand.ask("POST", "/v1/machines/web/snapshot", Some(none));
    assert_eq!(status, 422, "{problem}");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("absent"), "{problem}");
    // By the command it is the same, and is told the same.
    let pid = vm.broker_pid().to_string();
    stand.bed.have(&["pause", &pid]);
    await_event(&events, "machine_paused");
    assert_eq!(stand.machine("web")["state"], "paused");

    let (status, problem) = stand.ask("POST", "/v1/machines/web/snapshot", Some(warm));
    assert_eq!(status, 409, "{problem}");
    for name in ["../warm", "a/b", ""] {
        let body = json!({ "name": name });
        let (status, problem) = stand.ask("POST", "/v1/machines/web/snapshot", Some(body));
        assert_eq!(status, 422, "{problem}");
    }
    let (status, problem) = stand.ask("POST", "/v1/machines/none/pause", None);
    assert_eq!(status, 404, "{problem}");
    let read = stand.path("read.sock");
    assert_eq!(ask(&read, "POST", "/v1/machines/web/kill", None).0, 403);
    assert_eq!(ask(&read, "GET", "/v1/machines", None).1[0]["name"], "web");

    assert_eq!(stand.ask("POST", "/v1/machines/web/kill", None).0, 204);
    let ended = await_event(&events, "machine_ended");
    assert_eq!(
        (&ended["outcome"], &ended["exit_code"]),
        (&json!("stopped"), &json!(143))
    );
    await_event(&events, "vm_removed");
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
    assert_eq!(stand.ask("GET", "/v1/machines", None).1, json!([]));

    // What was saved goes on.
    let restored = ["--restore", later.to_str().unwrap(), "--name", "again"];
    let again = stand.bed.start_with(&restored);
    eventually("it is served", || {
        stand.machine("again")["state"] == "running"
    });
    // One that is killed has ended without a word.
    signal(again.broker_pid(), libc::SIGKILL);
    let ended = await_event(&events, "machine_ended");
    assert_eq!(
        (&ended["vm"], &ended["outcome"]),
        (&json!("again"), &Value::Null)
    );
}

#[test]
fn a_machine_that_hangs_holds_up_nothing_but_its_own_orders() {
    require_root_and_tun!();
    require_kvm!();
    let stand = Stand::new(true);
    let (a, b) = (
        stand.start("a", "serve 7 600s"),
        stand.start("b", "serve 7 600s"),
    );
    let vmm = a.vmm_pid().unwrap();
    signal(vmm, libc::SIGSTOP);
    let saves = |name: &'static str| {
        let socket = stand.path("api.sock");
        let waiting = thread::spawn(move || {
            let body = json!({ "name": name });
            ask(&socket, "POST", "/v1/machines/a/snapshot", Some(body))
        });
        eventually("it is under way", || {
            stand.machine("a")["state"] == "saving"
        });
        waiting
    };
    let waiting = saves("slow");
    // A second one is refused, and all else goes on.
    let (status, problem) = stand.ask("POST", "/v1/machines/a/pause", None);
    assert_eq!(status, 409, "{problem}");
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("another order"),
        "{problem}"
    );
    assert_eq!(stand.ask("GET", "/v1/health", None).0, 200);
    assert_eq!(stand.ask("POST", "/v1/machines/b/pause", None).0, 204);
    assert_eq!(stand.machine("b")["state"], "paused");
    assert!(!waiting.is_finished());
    signal(vmm, libc::SIGCONT);
    let (status, saved) = waiting.join().unwrap();
    assert_eq!(status, 201, "{saved}");
    assert_eq!(stand.machine("a")["state"], "running");

    // One that hangs for good can be ended, and leaves nothing of what it was to write.
    signal(vmm, libc::SIGSTOP);
    let waiting = saves("never");
    assert!(stand.path("snapshots/never").exists());
    assert_eq!(stand.ask("POST", "/v1/machines/a/kill", None).0, 204);
    let (status, problem) = waiting.join().unwrap();
    assert_eq!(status, 404, "{problem}");
    assert!(!stand.path("snapshots/never").exists());
    drop((a, b));
}

#[test]
fn machines_are_known_to_the_next_daemon_and_snapshots_need_a_directory() {
    require_root_and_tun!();
    require_kvm!();
    let mut stand = Stand::new(false);
    let vm = stand.start("web", "serve 7 600s");
    let body = json!({ "name": "warm" });
    let (status, problem) = stand.ask("POST", "/v1/machines/web/snapshot", Some(body));
    assert_eq!(status, 422, "{problem}");
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("--snapshot-dir"),
        "{problem}"
    );
    assert_eq!(stand.ask("POST", "/v1/machines/web/pause", None).0, 204);

    stand.daemon.kill_both().unwrap();
    stand.daemon = stand.daemon.again().unwrap();
    eventually("the machine has come back", || {
        stand.machine("web")["state"] == "paused"
    });
    assert_eq!(stand.ask("POST", "/v1/machines/web/resume", None).0, 204);
    assert_eq!(stand.machine("web")["state"], "running");
    // A machine of its own is none of the daemon's.
    let own = stand
        .bed
        .start_with(&["--own", "--name", "own", "--cmdline", "serve 7 600s"]);
    assert_eq!(stand.ask("GET", "/v1/machines/own", None).0, 404);
    drop((own, vm));
}
