use std::{
    collections::BTreeMap,
    io::{IoSlice, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::socket::{ControlMessage, MsgFlags, Shutdown, sendmsg, shutdown};
use serde_json::{Value, json};
use slipgate_ipc::{
    api::{ApiRequest, Event, FromApi, ToApi},
    client::{
        ClientAnswer, MachineStatus, PassedOrder, Replaces, SavedSnapshot, Target, Version,
        VmChange, VmDefinition, VmState, VmStatus,
    },
    engine::{
        ActivityPage, EngineInventory, EngineReply, FlowLogEvent, FlowLogEvents, Silence, VmId,
    },
};

use super::*;
use crate::{
    flows::{FlowList, PART_BYTES, Written},
    response::PCAPNG,
};

struct NoFigures;

impl Figures for NoFigures {
    fn flows(&self, vm: Option<String>) -> Box<dyn FlowList> {
        let vm = vm.unwrap_or_default();
        LISTS.lock().unwrap().entry(vm.clone()).or_default().0 += 1;
        Box::new(FakeList {
            left: if vm == "a" { 1 } else { MANY },
            vm,
            named: Some(Vec::new()),
            is_begun: false,
        })
    }

    fn stats(&self, _: &[EngineInventory]) -> Value {
        json!({})
    }

    fn silences(&self) -> BTreeMap<u32, Silence> {
        let silence = Silence {
            last_from_guest_ms: Some(5),
            last_to_guest_ms: None,
            flows: 2,
        };
        BTreeMap::from([(7, silence)])
    }

    fn metrics(&self, _: &[EngineInventory]) -> String {
        format!("made {}\n", PAGES.fetch_add(1, Relaxed))
    }
}

/// Flows of a VM with many.
const MANY: usize = 400_000;

/// Lists of flows of each VM that are being made, and bytes of them that were.
static LISTS: Mutex<BTreeMap<String, (usize, usize)>> = Mutex::new(BTreeMap::new());

fn lists_of(vm: &str) -> (usize, usize) {
    LISTS.lock().unwrap().get(vm).copied().unwrap_or_default()
}

/// A list of a VM's flows, before them those that the engines name.
struct FakeList {
    vm: String,
    left: usize,
    /// Names from the engines' pages; `None` after the last.
    named: Option<Vec<String>>,
    is_begun: bool,
}

impl FakeList {
    fn put(&mut self, flow: &Value, text: &mut Vec<u8>) {
        text.push(if self.is_begun { b',' } else { b'[' });
        self.is_begun = true;
        text.extend_from_slice(flow.to_string().as_bytes());
    }
}

impl FlowList for FakeList {
    fn write(&mut self, text: &mut Vec<u8>) -> Written {
        let before = text.len();
        match &mut self.named {
            Some(named) if named.is_empty() => return Written::ToPage,
            Some(named) => {
                for name in std::mem::take(named) {
                    self.put(&json!({ "dns_name": name }), text);
                }
                return Written::InPart;
            }
            None => {}
        }
        match &*self.vm {
            "broken" if self.left < MANY - 2_000 => panic!("this list breaks off"),
            // It goes on and on without a flow.
            "searched" => return Written::InPart,
            _ => {}
        }
        let flow = json!({ "vm": self.vm });
        while self.left > 0 && text.len() < PART_BYTES {
            self.put(&flow, text);
            self.left -= 1;
        }
        let mut lists = LISTS.lock().unwrap();
        lists.entry(self.vm.clone()).or_default().1 += text.len() - before;
        if self.left > 0 {
            return Written::InPart;
        }
        text.push(b']');
        Written::Whole
    }

    fn add(&mut self, page: Option<EngineInventory>) {
        self.named = page.map(|page| page.flows.into_iter().map(|(.., name)| name).collect());
    }
}

impl Drop for FakeList {
    fn drop(&mut self) {
        LISTS.lock().unwrap().entry(self.vm.clone()).or_default().0 -= 1;
    }
}

/// Number of pages of metrics that were made.
static PAGES: AtomicU32 = AtomicU32::new(0);

/// A server on a socket of its own, and the broker's end of its channel.
struct Rig {
    dir: tempfile::TempDir,
    /// The requests that the broker got.
    asked: Arc<Mutex<Vec<ApiRequest>>>,
    /// The engine's end of its socket.
    engine: UnixStream,
}

impl Rig {
    fn new(may_change: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("api.sock")).unwrap();
        let (mut ours, theirs) = Channel::pair().unwrap();
        if may_change {
            ours.take_descriptors();
        }
        thread::spawn(move || {
            let settings = Settings {
                listener,
                channel: theirs,
                figures: Box::new(NoFigures),
                may_change,
            };
            run(settings, || Ok::<_, io::Error>(())).unwrap();
        });
        let asked = Arc::new(Mutex::new(Vec::new()));
        let kept = asked.clone();
        let (engine, records) = UnixStream::pair().unwrap();
        records.set_nonblocking(true).unwrap();
        ours.send(ToApi::<OwnedFd>::Records(records.into()))
            .unwrap();
        thread::spawn(move || serve_as_broker(&ours, &kept));
        Self { dir, asked, engine }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("api.sock")
    }

    /// Status and body of the answer to a request.
    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let body = body.map(Value::to_string).unwrap_or_default();
        let text = format!(
            "{method} {path} HTTP/1.1\r\nHost: slipgate\r\nConnection: close\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        exchange(&self.path(), text.as_bytes())
    }
}

fn exchange(path: &Path, request: &[u8]) -> (u16, Value) {
    let mut stream = UnixStream::connect(path).unwrap();
    // A server that refuses early may not read it all.
    let _ = stream.write_all(request);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    (status, serde_json::from_str(body).unwrap_or_default())
}

fn status(name: &str) -> VmStatus {
    let definition: VmDefinition =
        serde_json::from_value(json!({ "name": name, "tap": "tap0", "labels": { "a": "1" } }))
            .unwrap();
    VmStatus {
        definition,
        id: VmId::new(7),
        generation: 4,
        worker: 1,
        state: VmState::Served,
        idle: false,
        lacks_uplink: false,
        guest_ipv6: None,
        unserved_forwards: Vec::new(),
    }
}

/// Reads the file behind a descriptor, from its start.
fn content(fd: &OwnedFd) -> String {
    let mut text = [0; 8];
    let length = nix::unistd::read(fd, &mut text).unwrap();
    String::from_utf8(text[..length].to_vec()).unwrap()
}

fn machine() -> MachineStatus {
    let status = json!({
        "name": "a", "pid": 7, "state": "paused", "cpus": 2, "memory_mib": 64, "tap": "sgvm0",
        "netns": 1, "runs_s": 3,
    });
    serde_json::from_value(status).unwrap()
}

fn serve_as_broker(channel: &Channel, asked: &Mutex<Vec<ApiRequest>>) {
    // Captures without a number of packets have none and do not end.
    let mut silent = Vec::new();
    while let Some(FromApi { id, request }) = channel.receive::<FromApi>().unwrap() {
        let mut stream = None;
        let answer = match &request {
            ApiRequest::Capture { what, packets, .. } if *what == Target::Vm("a".into()) => {
                let (ours, mut theirs) = UnixStream::pair().unwrap();
                ours.set_nonblocking(true).unwrap();
                match packets {
                    Some(packets) => theirs.write_all(&vec![7; *packets as usize]).unwrap(),
                    None => silent.push(theirs),
                }
                stream = Some(ours.into());
                ClientAnswer::Done
            }
            ApiRequest::GetVm { name } if ["a", "b", "hangs", "other"].contains(&&**name) => {
                ClientAnswer::Vm {
                    vm: Box::new(status(name)),
                    change: VmChange::Unchanged,
                }
            }
            ApiRequest::Activity { vm, .. } | ApiRequest::Sleep { vm } if vm == "hangs" => {
                asked.lock().unwrap().push(request);
                continue;
            }
            // The broker's last.
            ApiRequest::Sleep { vm } if vm == "last" => {
                shutdown(channel.as_fd().as_raw_fd(), Shutdown::Write).unwrap();
                continue;
            }
            // Of "a" in two pages; that of "b" has no engine now, and "other" is another's name by now.
            ApiRequest::Activity { vm, from } if vm != "b" => ClientAnswer::Engine {
                reply: EngineReply::Activity(ActivityPage {
                    vm: VmId::new(if vm == "a" { 7 } else { 8 }),
                    silence: Silence {
                        last_from_guest_ms: Some(9 - from),
                        last_to_guest_ms: (*from == 0).then_some(3),
                        flows: 5_000 + from,
                    },
                    next: (*from == 0).then_some(4),
                }),
            },
            // Two pages, of which the second leads nowhere.
            ApiRequest::Inventory { from } => ClientAnswer::Engine {
                reply: EngineReply::Inventory(EngineInventory {
                    flows: serde_json::from_value(json!([[0, 1, format!("{from}.test")]])).unwrap(),
                    next: Some(5),
                    ..EngineInventory::default()
                }),
            },
            ApiRequest::ListVms => ClientAnswer::VmList {
                vms: vec![status("a"), status("b")],
                room: slipgate_ipc::client::Room {
                    vms: slipgate_ipc::client::Filled { used: 2, most: 9 },
                    ..Default::default()
                },
                displaced: vec!["eth0".into()],
            },
            ApiRequest::PutVm { vm, replaces, .. }
                if !replaces
                    .permits((vm.name != "new").then(|| status(&vm.name).definition.version())) =>
            {
                ClientAnswer::replaced("it", true)
            }
            ApiRequest::PutVm { vm, .. } if vm.tap == "taken" => {
                ClientAnswer::error("tap taken: why")
            }
            ApiRequest::PutVm { vm, tap, .. } => ClientAnswer::Vm {
                vm: Box::new(VmStatus {
                    definition: VmDefinition {
                        // What came is a pipe: the first byte in it.
                        tap: tap.as_ref().map_or(vm.tap.clone(), content),
                        ..(**vm).clone()
                    },
                    ..status("a")
                }),
                change: VmChange::Created,
            },
            ApiRequest::PutPolicy { replaces, .. }
                if !replaces.permits(Some(Version::of(b"p"))) =>
            {
                ClientAnswer::replaced("it", true)
            }
            ApiRequest::PutPolicy { text, .. } => ClientAnswer::PolicyPut {
                generation: 8,
                version: Version::of(text.as_bytes()),
                cut: 1,
                kept: 2,
            },
            ApiRequest::RemovePolicy { replaces, .. }
                if !replaces.permits(Some(Version::of(b"p"))) =>
            {
                ClientAnswer::replaced("it", true)
            }
            ApiRequest::RemovePolicy { name, .. } => match &**name {
                "p" => ClientAnswer::Done,
                "used" => ClientAnswer::taken("the policy used is that of a: why"),
                _ => ClientAnswer::unknown("no policy none was put"),
            },
            ApiRequest::RemoveVm { name } if name == "a" => ClientAnswer::Done,
            ApiRequest::Freeze { .. } => ClientAnswer::busy("later"),
            ApiRequest::ListMachines => ClientAnswer::MachineList {
                machines: vec![machine()],
            },
            ApiRequest::OrderMachine { vm, .. } if vm != "a" => ClientAnswer::unknown("no machine"),
            ApiRequest::OrderMachine { order, .. } => match order {
                PassedOrder::Resume => ClientAnswer::taken("another order is under way"),
                PassedOrder::Snapshot { to, .. } => ClientAnswer::SnapshotSaved {
                    snapshot: SavedSnapshot {
                        name: to.clone(),
                        directory: "/snapshots/warm".into(),
                    },
                },
                _ => ClientAnswer::Done,
            },
            _ => ClientAnswer::UnknownVm { served: Vec::new() },
        };
        asked.lock().unwrap().push(request);
        let event = Event::VmAdded { vm: "a".into() };
        channel.send(ToApi::<OwnedFd>::Event(event)).unwrap();
        let answer = Box::new(answer);
        channel
            .send(ToApi::<OwnedFd>::Answer { id, answer, stream })
            .unwrap();
    }
}

#[test]
fn machines_are_listed_and_given_orders() {
    let rig = Rig::new(true);
    let (status, machine) = rig.ask("GET", "/v1/machines/a", None);
    assert_eq!(status, 200);
    assert_eq!(rig.ask("GET", "/v1/machines", None).1, json!([machine]));
    assert_eq!(
        (&machine["state"], &machine["pid"]),
        (&json!("paused"), &json!(7))
    );
    let (status, problem) = rig.ask("GET", "/v1/machines/b", None);
    assert_eq!(status, 404, "{problem}");
    let warm = json!({ "name": "warm" });
    for (name, verb, body, expected) in [
        ("a", "pause", None, 204),
        ("a", "resume", None, 409),
        ("a", "kill", None, 204),
        ("a", "balloon", Some(&json!({ "mib": 64 })), 204),
        ("a", "balloon", Some(&json!({ "mib": -1 })), 400),
        ("a", "balloon", None, 400),
        ("b", "kill", None, 404),
        ("a", "snapshot", Some(&warm), 201),
        ("a", "snapshot", None, 400),
        (
            "a",
            "snapshot",
            Some(&json!({ "name": "warm", "x": 1 })),
            400,
        ),
        ("a", "dance", None, 404),
    ] {
        let path = format!("/v1/machines/{name}/{verb}");
        let (status, answer) = rig.ask("POST", &path, body);
        assert_eq!(status, expected, "{path} {answer}");
        if status == 201 {
            let saved = json!({ "name": "warm", "directory": "/snapshots/warm" });
            assert_eq!(answer, saved);
        }
    }
    // Readers see, and give no orders.
    let reader = Rig::new(false);
    assert_eq!(reader.ask("GET", "/v1/machines", None).0, 200);
    for verb in ["pause", "resume", "balloon", "snapshot", "kill"] {
        let path = format!("/v1/machines/a/{verb}");
        assert_eq!(reader.ask("POST", &path, Some(&warm)).0, 403, "{verb}");
    }
    assert_eq!(reader.asked.lock().unwrap().len(), 1);
}

#[test]
fn what_get_gave_is_a_definition_and_no_other_vms() {
    let rig = Rig::new(true);
    let (_, vm) = rig.ask("GET", "/v1/vms/a", None);
    assert!(vm["activity"].is_object() && vm["id"] == 7, "{vm}");
    assert_eq!(rig.ask("PUT", "/v1/vms/a", Some(&vm)).0, 201);
    let put = || match rig.asked.lock().unwrap().pop() {
        Some(ApiRequest::PutVm { vm, .. }) => *vm,
        other => panic!("{other:?}"),
    };
    assert_eq!(put(), status("a").definition);
    let (status, problem) = rig.ask("PUT", "/v1/vms/b", Some(&vm));
    assert_eq!(status, 400, "{problem}");
    // As in user mode.
    assert_eq!(rig.ask("PUT", "/v1/vms/a", Some(&json!({}))).0, 201);
    assert_eq!(put(), VmDefinition::new("a", ""));
}

/// A connection that stays open.
fn connected(rig: &Rig) -> UnixStream {
    let stream = UnixStream::connect(rig.path()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    stream
}

#[test]
fn who_has_connected_is_answered_when_the_broker_ends() {
    let rig = Rig::new(true);
    let get = b"GET /v1/vms HTTP/1.1\r\nHost: slipgate\r\n\r\n";
    let mut idle = connected(&rig);
    idle.write_all(get).unwrap();
    let mut begin = [0; 12];
    idle.read_exact(&mut begin).unwrap();
    assert_eq!(begin, *b"HTTP/1.1 200");
    let mut late = connected(&rig);
    thread::scope(|scope| {
        let waits = scope.spawn(|| rig.ask("POST", "/v1/vms/hangs/sleep", None));
        let waits_there = |request: &ApiRequest| match request {
            ApiRequest::Sleep { vm } => vm == "hangs",
            _ => false,
        };
        while !rig.asked.lock().unwrap().iter().any(waits_there) {
            thread::sleep(Duration::from_millis(5));
        }
        let last = rig.ask("POST", "/v1/vms/last/sleep", None);
        for (status, problem) in [last, waits.join().unwrap()] {
            let detail = problem["detail"].as_str().unwrap_or_default();
            assert!(
                status == 503 && detail.contains("slipgate ends"),
                "{problem}"
            );
        }
    });
    late.write_all(get).unwrap();
    let mut answer = String::new();
    late.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    // It has asked for nothing more.
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).unwrap();
}

#[test]
fn vms_are_put_patched_and_removed() {
    let rig = Rig::new(true);
    let body = json!({ "tap": "tap9", "quotas": { "max_flows": 5 } });
    let (status, vm) = rig.ask("PUT", "/v1/vms/x", Some(&body));
    assert_eq!(
        (status, &vm["name"], &vm["tap"]),
        (201, &json!("x"), &json!("tap9"))
    );
    let patch = json!({ "policy": "p", "labels": { "a": null, "b": "2" } });
    let (status, vm) = rig.ask("PATCH", "/v1/vms/b", Some(&patch));
    assert_eq!((status, &vm["tap"]), (201, &json!("tap0")));
    assert_eq!(vm["labels"], json!({ "b": "2" }));
    assert_eq!(rig.ask("DELETE", "/v1/vms/a", None).0, 204);
    let (status, problem) = rig.ask("DELETE", "/v1/vms/none", None);
    assert_eq!(status, 404);
    assert!(
        problem["detail"].as_str().unwrap().contains("none"),
        "{problem}"
    );
    let health = rig.ask("GET", "/v1/health", None).1;
    assert_eq!(health["served"], 2);
    assert_eq!(health["displaced"][0], "eth0");
    assert_eq!(
        rig.ask("GET", "/v1/flows?vm=a", None).1,
        json!([{ "dns_name": "0.test" }, { "dns_name": "5.test" }, { "vm": "a" }])
    );
    let asked = rig.asked.lock().unwrap();
    assert!(
        matches!(&asked[0], ApiRequest::PutVm { vm, .. } if vm.name == "x"),
        "{asked:?}"
    );
}

/// The answer to a request with this header, and its ETag.
fn conditional(
    rig: &Rig,
    (method, path): (&str, &str),
    header: &str,
    body: &str,
) -> (u16, Value, Option<String>) {
    let text = format!(
        "{method} {path} HTTP/1.1\r\nHost: slipgate\r\nConnection: close\r\n{header}\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = UnixStream::connect(rig.path()).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut lines = head.lines();
    let etag = lines.find_map(|line| line.strip_prefix("etag: ").map(str::to_owned));
    (status, serde_json::from_str(body).unwrap_or_default(), etag)
}

#[test]
fn a_vm_is_shown_with_its_last_packets() {
    let rig = Rig::new(false);
    let activity = json!({ "last_from_guest_ms": 5, "last_to_guest_ms": null, "flows": 2 });
    // Its engine does not tell.
    let (status, vm, _) = conditional(&rig, ("GET", "/v1/vms/b"), "X: y", "");
    assert_eq!((status, &vm["activity"]), (200, &activity), "{vm}");
    // It is another VM by now, of which it tells.
    let (status, vm, _) = conditional(&rig, ("GET", "/v1/vms/other"), "X: y", "");
    assert_eq!((status, &vm["activity"]), (200, &activity), "{vm}");
    // Its engine hangs. That of a request waits 150 s otherwise.
    let begun = Instant::now();
    let (status, vm, _) = conditional(&rig, ("GET", "/v1/vms/hangs"), "X: y", "");
    assert_eq!((status, &vm["activity"]), (200, &activity), "{vm}");
    assert!(begun.elapsed() < Duration::from_secs(60));
    let (status, vms, _) = conditional(&rig, ("GET", "/v1/vms"), "X: y", "");
    assert_eq!((status, &vms[0]["activity"]), (200, &activity), "{vms}");
}

#[test]
fn a_vm_is_changed_only_in_the_version_that_the_client_knows() {
    let rig = Rig::new(true);
    let vm = ("GET", "/v1/vms/a");
    let etag = conditional(&rig, vm, "X: y", "").2.unwrap();
    assert_eq!(etag, format!("\"{}\"", status("a").definition.version()));
    let known = format!("If-Match: {etag}");
    let patch =
        json!({ "mac": null, "labels": { "a": null, "b": "2" }, "quotas": { "max_flows": 3 } });
    let (status, vm, new) = conditional(&rig, ("PATCH", vm.1), &known, &patch.to_string());
    assert_eq!((status, &vm["generation"]), (201, &json!(4)), "{vm}");
    assert_eq!(vm["labels"], json!({ "b": "2" }));
    assert!(new.is_some_and(|new| new != etag), "it is another version");
    let asked = rig.asked.lock().unwrap().pop();
    let Some(ApiRequest::PutVm { replaces, .. }) = asked else {
        panic!("{asked:?}");
    };
    let read = Version::parse(etag.trim_matches('"')).unwrap();
    assert_eq!(replaces, Replaces::AnyOf(vec![read]));
    let body = json!({ "tap": "tap0" }).to_string();
    for (method, name, header, expected) in [
        ("PATCH", "a", "If-Match: \"3\"", 412),
        ("PUT", "a", "If-Match: \"3\"", 412),
        ("PUT", "a", &known, 201),
        ("PUT", "a", "If-Match: *", 201),
        ("PUT", "new", "If-Match: *", 412),
        ("PUT", "a", "If-None-Match: *", 412),
        ("PUT", "new", "If-None-Match: *", 201),
        ("PUT", "a", "If-Match: nonsense", 400),
        ("PUT", "a", "If-Match: \"\u{e9}\"", 400),
    ] {
        let path = format!("/v1/vms/{name}");
        let (status, ..) = conditional(&rig, (method, &path), header, &body);
        assert_eq!(status, expected, "{method} {name} {header}");
    }
    // What a patch leaves must be a definition.
    let patch = json!([]).to_string();
    let (status, ..) = conditional(&rig, ("PATCH", "/v1/vms/a"), "If-Match: *", &patch);
    assert_eq!(status, 400);
}

#[test]
fn a_policy_is_replaced_only_in_the_version_that_the_client_knows() {
    let rig = Rig::new(true);
    let text = "default = \"deny\"\n";
    let put = |header: &str| conditional(&rig, ("PUT", "/v1/policies/p"), header, text);
    let known = format!("If-Match: \"{}\"", Version::of(b"p"));
    let (status, answer, etag) = put(&known);
    assert_eq!(
        (status, &answer["generation"]),
        (200, &json!(8)),
        "{answer}"
    );
    assert_eq!(etag, Some(format!("\"{}\"", Version::of(text.as_bytes()))));
    for (header, expected) in [
        ("If-Match: \"0123456789abcdef\"", 412),
        ("If-Match: *", 200),
        ("If-None-Match: *", 412),
        ("If-Match: nonsense", 400),
    ] {
        assert_eq!(put(header).0, expected, "{header}");
    }
}

#[test]
fn a_policy_is_removed_unless_it_is_used_or_another() {
    let rig = Rig::new(true);
    let remove = |name: &str, header: &str| {
        let path = format!("/v1/policies/{name}");
        conditional(&rig, ("DELETE", &path), header, "").0
    };
    let known = format!("If-Match: \"{}\"", Version::of(b"p"));
    for (name, header, expected) in [
        ("p", "X: y", 204),
        ("p", &known, 204),
        ("p", "If-Match: \"0123456789abcdef\"", 412),
        ("p", "If-Match: nonsense", 400),
        ("used", "X: y", 409),
        ("none", "X: y", 404),
    ] {
        assert_eq!(remove(name, header), expected, "{name} {header}");
    }
}

#[test]
fn what_can_not_be_done_is_a_problem() {
    let rig = Rig::new(true);
    for (method, path, body, wanted) in [
        ("GET", "/v1/nothing", None, 404),
        ("POST", "/v1/vms", None, 405),
        ("PUT", "/v1/vms/x", Some(json!({ "tap": "taken" })), 422),
        ("PUT", "/v1/vms/x", Some(json!({ "tap": 1 })), 400),
        (
            "PUT",
            "/v1/vms/x",
            Some(json!({ "tap": "t", "colour": 1 })),
            400,
        ),
        ("PUT", "/v1/vms/x", None, 400),
        ("GET", "/v1/flows?colour=1", None, 400),
        ("GET", "/v1/vms/a/why?address=nonsense", None, 400),
        (
            "GET",
            "/v1/vms/a/why?address=192.0.2.1&proto=sctp",
            None,
            400,
        ),
        ("POST", "/v1/vms/a/freeze", None, 503),
    ] {
        let (status, problem) = rig.ask(method, path, body.as_ref());
        assert_eq!(status, wanted, "{method} {path}: {problem}");
        assert_eq!(problem["status"], wanted);
        assert!(!problem["detail"].as_str().unwrap().is_empty());
    }
}

#[test]
fn a_reader_changes_nothing() {
    let rig = Rig::new(false);
    let document = crate::openapi::document();
    let paths = document["paths"].as_object().unwrap();
    let mut changes = 0;
    for (path, operations) in paths {
        let path = path.replace("{name}", "a").replace("{id}", "f");
        let body = json!({ "tap": "tap0" });
        for method in ["PUT", "PATCH", "DELETE", "POST"] {
            let is_there = operations.get(method.to_lowercase()).is_some();
            let wanted = if is_there { 403 } else { 405 };
            let (status, problem) = rig.ask(method, &path, Some(&body));
            assert_eq!(status, wanted, "{method} {path}: {problem}");
            changes += u32::from(is_there);
        }
    }
    assert!(changes >= 8, "{changes}");
    assert_eq!(rig.ask("GET", "/v1/vms", None).0, 200);
    // Not one of them reached the broker.
    assert!(matches!(
        rig.asked.lock().unwrap()[..],
        [ApiRequest::ListVms]
    ));
}

#[test]
fn bodies_and_heads_are_bounded() {
    let rig = Rig::new(true);
    let long = "x".repeat(MAX_BODY + 1);
    let body = json!({ "tap": long });
    assert_eq!(rig.ask("PUT", "/v1/vms/x", Some(&body)).0, 413);
    let head = format!(
        "GET /v1/vms HTTP/1.1\r\nX: {}\r\n\r\n",
        "x".repeat(2 * MAX_HEAD)
    );
    let mut stream = UnixStream::connect(rig.path()).unwrap();
    let _ = stream.write_all(head.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/1.1 200"));
    // Others are served all the same.
    assert_eq!(rig.ask("GET", "/v1/vms", None).0, 200);
}

#[test]
fn many_idle_connections_delay_others_for_a_while_at_most() {
    let rig = Rig::new(true);
    let idle: Vec<_> = (0..MOST_CONNECTIONS + 5)
        .map(|_| UnixStream::connect(rig.path()).unwrap())
        .collect();
    let began = Instant::now();
    assert_eq!(rig.ask("GET", "/v1/vms", None).0, 200);
    assert!(began.elapsed() < REQUEST_WITHIN + Duration::from_secs(5));
    drop(idle);
}

#[test]
fn events_are_read_as_they_come() {
    let rig = Rig::new(true);
    rig.ask("GET", "/v1/vms", None);
    let mut events = Reading::of(&rig, "after=0&kind=vm_added");
    events.until("\"seq\":1");
    rig.ask("GET", "/v1/vms", None);
    events.until("\"seq\":2");
}

/// A client that reads an answer that may have no end.
struct Reading {
    stream: UnixStream,
    seen: String,
}

impl Reading {
    fn of(rig: &Rig, query: &str) -> Self {
        let request = format!("GET /v1/events?{query} HTTP/1.1\r\nHost: slipgate\r\n\r\n");
        Self::of_answer(rig, &request)
    }

    fn of_answer(rig: &Rig, request: &str) -> Self {
        let mut stream = UnixStream::connect(rig.path()).unwrap();
        let within = Some(Duration::from_secs(5));
        stream.set_read_timeout(within).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let seen = String::new();
        Self { stream, seen }
    }

    fn until(&mut self, part: &str) {
        let mut buffer = [0; 4_096];
        while !self.seen.contains(part) {
            let n = self.stream.read(&mut buffer).unwrap();
            assert!(n > 0, "{}", self.seen);
            let text = str::from_utf8(&buffer[..n]).unwrap();
            self.seen.push_str(text);
        }
    }
}

/// Who has read the head knows that it misses nothing of the daemon's from then on.
#[test]
fn a_reader_gets_the_head_before_any_event_and_all_events_after_it() {
    let rig = Rig::new(true);
    for (seq, version) in [(1, "1.0"), (2, "1.1")] {
        let request = format!("GET /v1/events?kind=vm_added HTTP/{version}\r\nHost: x\r\n\r\n");
        let mut events = Reading::of_answer(&rig, &request);
        assert_head_alone(&mut events, NDJSON);
        rig.ask("GET", "/v1/vms", None);
        events.until(&format!("\"seq\":{seq}"));
    }
}

#[test]
fn a_capture_has_its_head_before_any_packet() {
    let rig = Rig::new(true);
    let body = json!({ "seconds": 60 }).to_string();
    let length = body.len();
    let request = format!(
        "POST /v1/vms/a/capture HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    let mut capture = Reading::of_answer(&rig, &request);
    assert_head_alone(&mut capture, PCAPNG);
}

/// Reads the head of an answer, which has no body so far.
fn assert_head_alone(answer: &mut Reading, media_type: &str) {
    answer.until("\r\n\r\n");
    let (head, body) = answer.seen.split_once("\r\n\r\n").unwrap();
    assert_eq!(head.split(' ').nth(1), Some("200"), "{head}");
    let media_type = format!("content-type: {media_type}");
    assert!(head.contains(&media_type), "{head}");
    assert_eq!(body, "");
}

#[test]
fn the_engine_is_asked_for_records_that_a_reader_wants_and_only_while_it_reads() {
    let mut rig = Rig::new(true);
    let within = Some(Duration::from_secs(5));
    rig.engine.set_read_timeout(within).unwrap();
    let asked = |rig: &mut Rig| {
        let mut bits = [0];
        rig.engine.read_exact(&mut bits).unwrap();
        FlowLogEvents::from_bits(bits[0])
    };
    assert_eq!(asked(&mut rig), FlowLogEvents::default());
    let mut events = Reading::of(&rig, "kind=flow_end,dns&vm=a");
    let wanted = FlowLogEvents::of(&[FlowLogEvent::FlowEnd, FlowLogEvent::Dns]);
    assert_eq!(asked(&mut rig), wanted);
    // In pieces, as a stream socket has them.
    for piece in [
        "{\"event\":\"flow_end\",\"vm\":\"b\"}\n{\"event\":\"flow",
        "_end\",\"vm\":\"a\",\"tx_bytes\":5}\n",
    ] {
        rig.engine.write_all(piece.as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(20));
    }
    events.until("{\"event\":\"flow_end\",\"vm\":\"a\",\"tx_bytes\":5,\"seq\":2}");
    assert!(!events.seen.contains("\"vm\":\"b\""), "{}", events.seen);
    drop(events);
    assert_eq!(asked(&mut rig), FlowLogEvents::default());
    // What is no record ends the connection.
    rig.engine.write_all(b"nonsense\n").unwrap();
    assert_eq!(rig.engine.read(&mut [0]).unwrap(), 0);
    assert_eq!(rig.ask("GET", "/v1/events?kind=colour", None).0, 400);
}

/// The text of the body of an answer.
fn body(rig: &Rig, request: &str) -> String {
    let mut stream = UnixStream::connect(rig.path()).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
    answer.split_once("\r\n\r\n").unwrap().1.to_owned()
}

#[test]
fn a_page_of_metrics_is_made_once_a_second_at_most() {
    let rig = Rig::new(false);
    let page = body(&rig, "GET /v1/metrics HTTP/1.0\r\n\r\n");
    assert!(page.starts_with("made "), "{page}");
    assert_eq!(body(&rig, "GET /v1/metrics HTTP/1.0\r\n\r\n"), page);
    thread::sleep(Duration::from_millis(1_100));
    assert_ne!(body(&rig, "GET /v1/metrics HTTP/1.0\r\n\r\n"), page);
}

#[test]
fn a_capture_is_passed_on_to_its_end() {
    let rig = Rig::new(true);
    let wanted = json!({ "packets": 100_000 }).to_string();
    let length = wanted.len();
    let head = format!("POST /v1/vms/a/capture HTTP/1.0\r\nContent-Length: {length}\r\n\r\n");
    assert_eq!(body(&rig, &(head + &wanted)), "\u{7}".repeat(100_000));
    let nothing = json!({ "seconds": 0 });
    assert_eq!(rig.ask("POST", "/v1/vms/a/capture", Some(&nothing)).0, 400);
    assert_eq!(rig.ask("POST", "/v1/vms/b/capture", None).0, 404);
}

/// Status and body of the answer to a PUT that descriptors come with, each in a message of its own
/// with as many of them.
fn put_with(rig: &Rig, method: &str, path: &str, tap: &Value, counts: &[usize]) -> (u16, Value) {
    let (reader, writer) = nix::unistd::pipe().unwrap();
    nix::unistd::write(&writer, b"tap7").unwrap();
    let body = json!({ "tap": tap }).to_string();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nHost: slipgate\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = UnixStream::connect(rig.path()).unwrap();
    for (at, count) in counts.iter().enumerate() {
        let fds = vec![reader.as_raw_fd(); *count];
        let byte = [IoSlice::new(&text.as_bytes()[at..=at])];
        let rights = [ControlMessage::ScmRights(&fds)];
        sendmsg::<()>(stream.as_raw_fd(), &byte, &rights, MsgFlags::empty(), None).unwrap();
    }
    stream.write_all(&text.as_bytes()[counts.len()..]).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    (status, serde_json::from_str(body).unwrap_or_default())
}

#[test]
fn a_tap_is_passed_as_a_descriptor_and_nothing_else_is() {
    let rig = Rig::new(true);
    let passed = json!({ "descriptor": true });
    let put = |tap: &Value, counts: &[usize]| put_with(&rig, "PUT", "/v1/vms/new", tap, counts);
    let (status, vm) = put(&passed, &[1]);
    assert_eq!((status, &vm["tap"]), (201, &json!("tap7")), "{vm}");
    for (tap, counts, part) in [
        (&passed, &[][..], "by SCM_RIGHTS"),
        (&passed, &[2], "more than one"),
        (&passed, &[200], "more than one"),
        (&passed, &[1, 1], "more than one"),
        (&json!("tap0"), &[1], "in place of a name"),
        (&json!({ "descriptor": false }), &[1], "by SCM_RIGHTS"),
    ] {
        let (status, problem) = put(tap, counts);
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert_eq!(status, 400, "{tap} {counts:?}: {problem}");
        assert!(detail.contains(part), "{tap} {counts:?}: {problem}");
    }
    for (method, path) in [("PATCH", "/v1/vms/a"), ("GET", "/v1/vms/a")] {
        let (status, problem) = put_with(&rig, method, path, &json!("tap0"), &[1]);
        assert_eq!(status, 400, "{method}: {problem}");
    }
    let reader = Rig::new(false);
    let (status, _) = put_with(&reader, "GET", "/v1/vms/a", &passed, &[200]);
    assert_eq!(status, 200);
}

#[test]
fn one_vm_is_read_without_the_others() {
    let rig = Rig::new(false);
    let (status, vm) = rig.ask("GET", "/v1/vms/a", None);
    assert_eq!(status, 200, "{vm}");
    let activity = json!({
        "last_from_guest_ms": 5,
        "last_to_guest_ms": 3,
        "flows": 5_004,
    });
    assert_eq!(vm["activity"], activity);
    let asked = std::mem::take(&mut *rig.asked.lock().unwrap());
    assert!(
        matches!(
            &asked[..],
            [
                ApiRequest::GetVm { name },
                ApiRequest::Activity { vm: first, from: 0 },
                ApiRequest::Activity { vm: second, from: 4 },
            ] if [name, first, second] == ["a", "a", "a"]
        ),
        "{asked:?}"
    );
    // Without its engine the tables tell, as they do of all.
    let (_, vm) = rig.ask("GET", "/v1/vms/b", None);
    assert_eq!(vm["activity"]["flows"], 2, "{vm}");
    assert_eq!(rig.ask("GET", "/v1/vms/c", None).0, 404);
}

/// A client that has begun to read the flows of a VM.
fn reading_flows(rig: &Rig, vm: &str) -> Reading {
    let request = format!("GET /v1/flows?vm={vm} HTTP/1.1\r\nHost: x\r\n\r\n");
    Reading::of_answer(rig, &request)
}

/// Waits until something is so.
fn until(what: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !what() {
        assert!(Instant::now() < end);
        thread::sleep(Duration::from_millis(10));
    }
}

/// The bytes of a VM's lists that were made when no more are.
fn made_at_rest(vm: &str) -> usize {
    loop {
        let made = lists_of(vm).1;
        thread::sleep(Duration::from_millis(300));
        if lists_of(vm).1 == made {
            return made;
        }
    }
}

#[test]
fn a_list_of_flows_is_made_as_its_reader_takes_it_and_ends_with_the_reader() {
    let rig = Rig::new(false);
    let mut slow = reading_flows(&rig, "slow");
    slow.until("{\"vm\":\"slow\"}");
    let made = made_at_rest("slow");
    assert!(made < 1 << 20, "{made}");
    // Nobody waits for it.
    let mut other = reading_flows(&rig, "a");
    other.until("[{\"dns_name\":\"0.test\"}");
    // It goes on where it was.
    let mut taken = 0;
    while taken < 2 << 20 {
        taken += slow.stream.read(&mut [0; 4_096]).unwrap();
    }
    let made = made_at_rest("slow");
    assert!((2 << 20..3 << 20).contains(&made), "{made}");
    assert_eq!(lists_of("slow").0, 1);
    drop(slow);
    until(|| lists_of("slow").0 == 0);
}

#[test]
fn many_flows_are_one_document() {
    let rig = Rig::new(false);
    let text = body(&rig, "GET /v1/flows?vm=read HTTP/1.0\r\n\r\n");
    let flows: Vec<BTreeMap<String, String>> = serde_json::from_str(&text).unwrap();
    assert_eq!(flows.len(), 2 + MANY);
    assert_eq!(flows[MANY + 1]["vm"], "read");
    until(|| lists_of("read").0 == 0);
}

#[test]
fn a_list_of_flows_that_breaks_off_is_no_whole_document() {
    let rig = Rig::new(false);
    let mut broken = reading_flows(&rig, "broken");
    let mut answer = Vec::new();
    broken.stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.contains("transfer-encoding: chunked"), "{answer}");
    assert!(answer.len() > PART_BYTES, "{answer}");
    assert!(!answer.ends_with("\r\n0\r\n\r\n"), "{answer}");
    assert_eq!(rig.ask("GET", "/v1/vms", None).0, 200);
}

#[test]
fn a_long_search_for_flows_delays_nobody_and_ends_with_its_client() {
    let rig = Rig::new(false);
    let searched = reading_flows(&rig, "searched");
    until(|| lists_of("searched").0 == 1);
    let mut other = reading_flows(&rig, "a");
    other.until("[{\"dns_name\":\"0.test\"}");
    drop(searched);
    until(|| lists_of("searched").0 == 0);
}

#[test]
fn lists_of_flows_are_read_by_some_clients_at_a_time() {
    let rig = Rig::new(false);
    let status = || rig.ask("GET", "/v1/flows?vm=a", None).0;
    let mut readers: Vec<Reading> = (0..MOST_FLOW_LISTS)
        .map(|_| {
            let mut reader = reading_flows(&rig, "crowd");
            reader.until("{\"vm\":\"crowd\"}");
            reader
        })
        .collect();
    assert_eq!(status(), 503);
    readers.pop();
    until(|| status() == 200);
}
