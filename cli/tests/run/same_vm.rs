//! A machine that is saved and ended, and restored as the VM that it was: the daemon keeps the VM, its
//! TAP's name, flows and forwards.
use std::{fs, net::SocketAddr, path::PathBuf, thread, time::Duration};

use serde_json::{Value, json};
use slipgate_testbed::{
    MicroVm, MicroVmEnd, Slipgate,
    clients::tcp::{self, EchoSession},
    require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService},
    signal,
    world::{HOST, SERVER, UPLINK},
};

use crate::{
    Bed, WAIT, eventually,
    ordered_by_api::{Stand, await_event},
};

const CONNECTIONS: u64 = 64;

/// The VMs as the daemon lists them.
pub(crate) fn vms(daemon: &Slipgate) -> Value {
    let listed = daemon.run(&["vm", "ls", "--json"]).unwrap();
    serde_json::from_slice(&listed.stdout).unwrap()
}

/// Runs a command that has to succeed.
#[track_caller]
pub(crate) fn have(daemon: &Slipgate, args: &[&str]) -> String {
    let output = daemon.run(args).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command that has to be refused, and returns what it says.
#[track_caller]
fn refused(bed: &Bed, daemon: &Slipgate, args: &[&str]) -> String {
    let command = daemon.command(args).unwrap();
    let output = bed.world.host.output_with(command, &[1, 2]).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{args:?}: {stderr}");
    stderr
}

/// Whether a process has ended, and at most its parent has not noticed yet.
fn has_ended(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| stat.contains(") Z "))
}

/// A VM that sleeps by a snapshot, amid its connections.
struct Asleep {
    daemon: Slipgate,
    servers: TcpServer,
    dir: PathBuf,
    bed: Bed,
}

impl Asleep {
    fn new() -> Self {
        let bed = Bed::new();
        // As in `generations`: what lies unread in a TAP is lost with it.
        let route = "198.18.0.0/24 dev w0 proto kernel scope link src 198.18.0.1 initcwnd 100";
        bed.world.net.ip(&format!("route change {route}")).unwrap();
        let servers =
            TcpServer::start(&bed.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
        let daemon = Slipgate::serve(&bed.world.host, &bed.pins, &["--uplink", UPLINK]).unwrap();
        let work = format!("stream {} 4000000 mixed x{CONNECTIONS}", servers.address());
        let vm = bed.start_with(&["--memory", "64", "--name", "vm", "--cmdline", &work]);
        eventually("all are connected", || servers.accepted() == CONNECTIONS);
        let dir = bed.folder.path().join("asleep");
        have(
            &daemon,
            &["snapshot", "vm", dir.to_str().unwrap(), "--sleep"],
        );
        // The command has waited for it.
        assert!(has_ended(vm.broker_pid()));
        let end = vm.finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(143), "{}", end.stderr);
        let listed = vms(&daemon);
        assert_eq!(listed[0]["state"], "asleep", "{listed}");
        let live = daemon.flows().unwrap().len() as u64;
        assert_eq!(live, CONNECTIONS, "some had ended before it was saved");
        Self {
            daemon,
            servers,
            dir,
            bed,
        }
    }

    /// Restores the machine as the VM, and waits for its end.
    fn restore(&self, flags: &[&str]) -> MicroVmEnd {
        let flags = [&["--as", "vm"], flags].concat();
        self.bed
            .restore(&self.dir, &flags)
            .finish(2 * WAIT)
            .unwrap()
    }
}

/// What its guest said of its streams.
fn streams(end: &MicroVmEnd) -> Value {
    let mut said = end.said("workload").into_iter();
    let found = said.find(|line| line["workload"] == "stream");
    found.unwrap_or_else(|| panic!("{:?}: {}", end.lines, end.stderr))
}

#[test]
fn connections_of_a_vm_that_slept_by_a_snapshot_go_on() {
    require_root_and_tun!();
    require_kvm!();
    let asleep = Asleep::new();
    // Seconds, in which the servers repeat what is not acknowledged.
    thread::sleep(Duration::from_secs(2));
    let id = vms(&asleep.daemon)[0]["id"].clone();
    let end = asleep.restore(&[]);
    end.assert_success();
    // The guest checks each byte that it gets, and the servers each that they get.
    let said = streams(&end);
    assert_eq!(said["done"], CONNECTIONS, "{said}");
    let idle = CONNECTIONS / 3;
    let bytes = (CONNECTIONS - idle) * 4_000_000 + idle * 4096;
    assert_eq!(said["bytes"], bytes, "{said}");
    let inherits = &end.report["inherits"];
    assert_eq!(inherits["vm"], "same", "{inherits}");
    assert_eq!(inherits["flows"], true, "{inherits}");
    let told = "vm is the VM that it was to the network: the default policy";
    assert!(end.stderr.contains(told), "{}", end.stderr);
    // It is kept for the next one, as the same VM.
    let listed = vms(&asleep.daemon);
    assert_eq!(listed[0]["id"], id, "{listed}");
    eventually("it waits for a TAP", || {
        vms(&asleep.daemon)[0]["state"] == "waiting"
    });
}

#[test]
fn with_generation_both_ends_of_each_are_told_before_the_guest_runs() {
    require_root_and_tun!();
    require_kvm!();
    let asleep = Asleep::new();
    let end = asleep.restore(&["--generation"]);
    assert_eq!(end.status.code(), Some(1), "{:?}", end.lines);
    // Idle ones, too, which the guest would not have used for long.
    let said = streams(&end);
    assert_eq!(said["failures"]["reset"], CONNECTIONS, "{said}");
    // By the guest's own clock, from its first instruction on, each of its sockets.
    let resets = &said["reset_after_restore"];
    assert_eq!(resets["n"], CONNECTIONS, "{said}");
    println!("the guest's sockets were reset, from its first instruction on: {resets}");
    // Without being told an end would wait for 10 s at least.
    assert!(resets["max_us"].as_f64() < Some(5e6), "{resets}");
    eventually("the servers have noticed", || asleep.servers.open() == 0);
    assert_eq!(end.report["inherits"]["flows"], false);
    let told = format!("ended {CONNECTIONS} flows of the former generation of vm");
    assert!(end.stderr.contains(&told), "{}", end.stderr);
}

/// The VMM of a VM that was added is killed while it sleeps: who connects to its forward waits, wakes it,
/// and is served by the guest that goes on.
#[test]
fn who_connects_to_a_vm_whose_vmm_was_killed_is_served_after_the_restore() {
    require_root_and_tun!();
    require_kvm!();
    let stand = Stand::new(false);
    let (daemon, bed) = (&stand.daemon, &stand.bed);
    have(
        daemon,
        &[
            "vm",
            "add",
            "web",
            "--tap",
            "tapweb",
            "--forward",
            "tcp:8007:7",
        ],
    );
    assert_eq!(vms(daemon)[0]["state"], "waiting");
    let work = ["--memory", "64", "--cmdline", "serve 7 600s"];
    let mut vm = bed.start_with(&[&["--as", "web"], &work[..]].concat());
    vm.await_line("10.0.2.15", WAIT).unwrap();
    assert_eq!(stand.machine("web")["tap"], "tapweb");
    // One that is open all the while.
    let address = SocketAddr::from((HOST, 8007));
    let net = &bed.world.net;
    let mut opened = None;
    eventually("the guest listens", || {
        opened = net.run(|| tcp::connect(address, WAIT)).ok();
        opened.is_some()
    });
    let mut open = opened.unwrap();
    EchoSession::new(&mut open).round(1_000).unwrap();
    have(daemon, &["sleep", "web"]);
    let pid = vm.broker_pid().to_string();
    bed.have(&["pause", &pid]);
    let dir = bed.snapshot(&vm, "warm");
    signal(vm.broker_pid(), libc::SIGKILL);
    drop(vm);
    eventually("its TAP is gone", || {
        !bed.world.host.ip("-brief link").unwrap().contains("tapweb")
    });
    assert_eq!(vms(daemon)[0]["state"], "asleep");

    let events = stand.events();
    thread::scope(|scope| {
        let connects = scope.spawn(|| net.run(|| tcp::connect(address, WAIT)));
        let wake = await_event(&events, "wake");
        assert_eq!(
            (&wake["vm"], &wake["to"]),
            (&json!("web"), &json!(address.to_string()))
        );
        assert!(!connects.is_finished());
        let _restored = bed.restore(&dir, &["--as", "web"]);
        await_event(&events, "vm_awake");
        let mut late = connects.join().unwrap().unwrap();
        EchoSession::new(&mut late).round(1_000).unwrap();
        EchoSession::new(&mut open).round(1_000).unwrap();
        // It may be resumed once more, as by a platform that gives the order itself.
        have(daemon, &["resume", "web"]);
    });
    eventually("it waits for a TAP", || {
        vms(daemon)[0]["state"] == "waiting"
    });
}

/// By the API: a VM that a machine has brought sleeps by one request, and its machine ends.
#[test]
fn a_vm_sleeps_by_a_snapshot_of_the_api() {
    require_root_and_tun!();
    require_kvm!();
    let stand = Stand::new(true);
    // Each on a TAP of its own name, which is the VM's while it has no machine.
    let start = |name: &str, more: &[&str]| {
        let tap = format!("tap{name}");
        let flags = ["--name", name, "--tap", &tap, "--cmdline", "serve 7 600s"];
        let mut vm = stand.bed.start_with(&[&flags[..], more].concat());
        vm.await_line("10.0.2.15", WAIT).unwrap();
        vm
    };
    let disk = stand.bed.folder.path().join("disk");
    fs::write(&disk, [0; 65_536]).unwrap();
    let vm = start("web", &["--disk", disk.to_str().unwrap()]);
    let events = stand.events();
    // What fails leaves it awake.
    let none = json!({ "name": "none", "base": "absent", "sleep": true });
    let (status, problem) = stand.ask("POST", "/v1/machines/web/snapshot", Some(none));
    assert_eq!(status, 422, "{problem}");
    assert_eq!(stand.machine("web")["state"], "running");
    assert_eq!(stand.ask("GET", "/v1/vms/web", None).1["state"], "served");

    let body = json!({ "name": "warm", "sleep": true });
    let (status, saved) = stand.ask("POST", "/v1/machines/web/snapshot", Some(body));
    assert_eq!(status, 201, "{saved}");
    let kept = stand.ask("GET", "/v1/vms/web", None).1;
    assert_eq!(
        (&kept["state"], &kept["tied"]),
        (&json!("asleep"), &Value::Null)
    );
    // At once: its machine has ended, and has let go of the disk.
    let dir = saved["directory"].as_str().unwrap().to_owned();
    let again = stand.bed.restore(dir.as_ref(), &["--as", "web"]);
    assert!(has_ended(vm.broker_pid()));
    for kind in ["vm_asleep", "machine_paused", "machine_saved", "vm_changed"] {
        assert_eq!(await_event(&events, kind)["vm"], "web");
    }
    let ended = await_event(&events, "machine_ended");
    assert_eq!(ended["exit_code"], 143, "{ended}");
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
    await_event(&events, "vm_awake");
    eventually("its machine is known", || {
        stand.machine("web")["state"] == "running"
    });
    assert_eq!(stand.ask("POST", "/v1/machines/web/kill", None).0, 204);
    await_event(&events, "machine_ended");
    assert_eq!(again.finish(WAIT).unwrap().status.code(), Some(143));
    assert_eq!(stand.ask("GET", "/v1/vms/web", None).0, 200);

    // One that is brought goes, unless it is kept before.
    for keeps in [false, true] {
        let vm = start("other", &[]);
        if keeps {
            let kept = stand.ask("POST", "/v1/vms/other/keep", None);
            assert_eq!((kept.0, &kept.1["tied"]), (200, &Value::Null), "{}", kept.1);
        }
        signal(vm.broker_pid(), libc::SIGKILL);
        drop(vm);
        await_event(&events, "machine_ended");
        let status = if keeps { 200 } else { 404 };
        eventually("it is gone or there", || {
            stand.ask("GET", "/v1/vms/other", None).0 == status
        });
        // Its VMM may have it for a moment longer.
        eventually("its TAP is gone", || {
            let links = stand.bed.world.host.ip("-brief link").unwrap();
            !links.contains("tapother")
        });
    }
    assert_eq!(stand.ask("POST", "/v1/vms/nobody/keep", None).0, 404);
}

#[test]
fn a_machine_that_can_not_be_the_vm_is_refused_with_a_remedy() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let without = bed.start_with(&["--as", "web", "--cmdline", "wait 1s"]);
    let without = without.finish(WAIT).unwrap();
    assert_eq!(without.status.code(), Some(2), "{}", without.stderr);
    assert!(
        without.stderr.contains("no daemon serves"),
        "{}",
        without.stderr
    );

    let daemon = Slipgate::serve(&bed.world.host, &bed.pins, &["--uplink", UPLINK]).unwrap();
    let failed = |flags: &[&str], part: &str| {
        let end = MicroVm::start(&bed.world.host, &bed.pins, flags).unwrap();
        let end = end.finish(WAIT).unwrap();
        assert!(end.stderr.contains(part), "{part}: {}", end.stderr);
        assert!(matches!(end.status.code(), Some(1 | 2)), "{}", end.stderr);
    };
    failed(&["--as", "web"], "no such VM; there is none");
    have(&daemon, &["vm", "add", "web", "--tap", "tapweb"]);
    failed(&["--as", "wab"], "no such VM; there is web");
    failed(&["--as", "web", "--forward", "tcp:1:1"], "slipgate vm set");
    failed(&["--as", "web", "--name", "other"], "cannot be used with");
    failed(&["--as", "web", "--generation"], "--restore");
    failed(&["--as", "web", "--mode", "userspace"], "user mode");

    let kept = |work: &str| {
        let work = ["--memory", "64", "--cpus", "2", "--cmdline", work];
        let flags = [&["--as", "web"], &work[..]].concat();
        MicroVm::start(&bed.world.host, &bed.pins, &flags).unwrap()
    };
    let mut vm = kept("serve 7 600s");
    vm.await_line("10.0.2.15", WAIT).unwrap();
    failed(&["--as", "web"], "its machine runs");
    let dir = bed.snapshot(&vm, "warm");
    bed.have(&["kill", "web"]);
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
    let restore = ["--as", "web", "--restore", dir.to_str().unwrap()];
    // Another VMM has the TAP; it has one queue; another MTU; the VM has another MAC.
    let ip = |text: &str| bed.world.host.ip(text).unwrap();
    ip("tuntap add tapweb mode tap vnet_hdr");
    failed(&restore, "was made for one queue");
    ip("link delete tapweb");
    ip("tuntap add tapweb mode tap vnet_hdr multi_queue");
    ip("link set tapweb mtu 1400");
    failed(&restore, "MTU");
    ip("link set tapweb mtu 1500");
    have(&daemon, &["vm", "set", "web", "--mac", "02:00:00:00:00:99"]);
    failed(&restore, "02:00:00:00:00:99");
    let mac = vms(&daemon)[0]["mac"].clone();
    assert_eq!(mac, "02:00:00:00:00:99");
    have(&daemon, &["vm", "set", "web", "--mac", "02:53:4c:47:00:02"]);
    // It fits, and the TAP, which is persistent, outlasts it.
    let again = MicroVm::start(&bed.world.host, &bed.pins, &restore).unwrap();
    eventually("it runs", || bed.status(&again)["state"] == "running");
    assert!(refused(&bed, &daemon, &["snapshot", "nobody", "/x", "--sleep"]).contains("nobody"));
    bed.have(&["kill", "web"]);
    assert_eq!(again.finish(WAIT).unwrap().status.code(), Some(143));
    assert!(ip("-brief link").contains("tapweb"));
    assert_eq!(vms(&daemon)[0]["state"], "served");

    // One that a command has brought is that command's.
    let brought = bed.start_with(&["--name", "mine", "--cmdline", "serve 7 600s"]);
    eventually("it runs", || bed.status(&brought)["state"] == "running");
    have(&daemon, &["vm", "keep", "mine"]);
    assert!(have(&daemon, &["vm", "keep", "mine"]).contains("kept already"));
    let gone = refused(&bed, &daemon, &["vm", "keep", "nobody"]);
    assert!(gone.contains("nobody"), "{gone}");
}
