//! VMs that a daemon keeps while their machines come and go: what else happens meanwhile.
use std::{
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use serde_json::json;
use slipgate_testbed::{
    Slipgate,
    clients::{tcp, tcp::EchoSession},
    require_kvm, require_root_and_tun, signal,
    world::{HOST, UPLINK},
};

use crate::{
    Bed, WAIT, eventually,
    ordered_by_api::{Stand, await_event},
    same_vm::{have, vms},
};

/// Adds the VM `web` with a forward to its echo, runs it, and has it sleep by a snapshot.
fn put_to_sleep(daemon: &Slipgate, bed: &Bed, dir: &Path) {
    let add = ["vm", "add", "web", "--tap", "tapweb"];
    have(daemon, &[&add[..], &["--forward", "tcp:8007:7"]].concat());
    let work = ["--memory", "64", "--cmdline", "serve 7 600s"];
    let mut vm = bed.start_with(&[&["--as", "web"], &work[..]].concat());
    vm.await_line("\"serving\"", WAIT).unwrap();
    let to = dir.to_str().unwrap();
    have(daemon, &["snapshot", "web", to, "--sleep"]);
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
    assert_eq!(vms(daemon)[0]["state"], "asleep");
}

/// The engine that is to deliver what was held hangs: the machine takes orders meanwhile, and ends.
#[test]
fn a_machine_takes_orders_while_its_vm_is_being_woken() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut daemon = Slipgate::serve(&bed.world.host, &bed.pins, &["--uplink", UPLINK]).unwrap();
    let ip = |text: &str| bed.world.host.ip(text).unwrap();
    // One that stays, so that no engine is asked to serve it.
    ip("tuntap add tapweb mode tap vnet_hdr multi_queue");
    let dir = bed.folder.path().join("warm");
    put_to_sleep(&daemon, &bed, &dir);
    // The daemon replaces an engine that does not answer for 8 s, and what waited for that has failed. A
    // machine that is very busy may take as long once; such a round shows nothing.
    let is_prompt = (0..3).any(|_| {
        let engine = daemon.engine_pid().unwrap();
        signal(engine, libc::SIGSTOP);
        let vm = bed.restore(&dir, &["--as", "web"]);
        eventually("it runs", || bed.status(&vm)["state"] == "running");
        let pid = vm.broker_pid().to_string();
        bed.have(&["pause", &pid]);
        assert_eq!(bed.status(&vm)["state"], "paused");
        bed.have(&["resume", &pid]);
        bed.have(&["kill", &pid]);
        let end = vm.finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(143), "{}", end.stderr);
        let state = vms(&daemon)[0]["state"].clone();
        if daemon.engine_pid() == Some(engine) {
            // The engine hung all the while, so nobody can have woken the VM.
            assert_eq!(state, "asleep");
            // It is awake once the engine goes on.
            let said = "`slipgate sleep web` has it sleep";
            assert!(end.stderr.contains(said), "{}", end.stderr);
            signal(engine, libc::SIGCONT);
            eventually("what is said has it sleep", || {
                daemon.run(&["sleep", "web"]).unwrap().status.success()
                    && vms(&daemon)[0]["state"] == "asleep"
            });
            return true;
        }
        eventually("it sleeps again", || {
            daemon.run(&["sleep", "web"]).unwrap().status.success()
                && vms(&daemon)[0]["state"] == "asleep"
        });
        false
    });
    assert!(is_prompt, "the orders waited until the VM was woken");
}

/// The engine that is to end the flows hangs: that it is waited for is said, and no longer than the user
/// or the daemon wants.
#[test]
fn a_restore_that_waits_for_the_daemon_says_so_and_is_stopped_at_once() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut daemon = Slipgate::serve(&bed.world.host, &bed.pins, &["--uplink", UPLINK]).unwrap();
    bed.world
        .host
        .ip("tuntap add tapweb mode tap vnet_hdr multi_queue")
        .unwrap();
    let dir = bed.folder.path().join("warm");
    put_to_sleep(&daemon, &bed, &dir);
    // As above: a daemon replaces such an engine after 8 s.
    let hangs = |daemon: &mut Slipgate| {
        let engine = daemon.engine_pid().unwrap();
        signal(engine, libc::SIGSTOP);
        let vm = bed.restore(&dir, &["--as", "web", "--generation"]);
        eventually("it is said", || {
            vm.stderr()
                .contains("waits until the daemon has ended its former flows, 20 s at most")
        });
        (engine, vm)
    };
    let is_prompt = (0..3).any(|_| {
        let (engine, vm) = hangs(&mut daemon);
        let pid = vm.broker_pid().to_string();
        assert_eq!(bed.status(&vm)["state"], "starting");
        let early = bed.slipgate(&["pause", &pid]);
        let early = String::from_utf8_lossy(&early.stderr).into_owned();
        assert!(early.contains("does not run yet"), "{early}");
        signal(vm.broker_pid(), libc::SIGTERM);
        let end = vm.finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(143), "{}", end.stderr);
        assert_eq!(end.lines.len(), 0, "{:?}", end.lines);
        let is_same = daemon.engine_pid() == Some(engine);
        signal(engine, libc::SIGCONT);
        eventually("it sleeps", || {
            daemon.run(&["sleep", "web"]).unwrap().status.success()
                && vms(&daemon)[0]["state"] == "asleep"
        });
        is_same
    });
    assert!(is_prompt, "it went on until there was another engine");

    let (_, vm) = hangs(&mut daemon);
    daemon.kill_both().unwrap();
    let end = vm.finish(Duration::from_secs(8)).unwrap();
    assert_eq!(end.status.code(), Some(123), "{}", end.stderr);
    let is_told = ["the daemon has ended before", "no daemon is at"]
        .iter()
        .any(|why| end.stderr.contains(why));
    assert!(is_told, "{}", end.stderr);
}

/// A restart of the daemon loses neither the VM nor that it sleeps: who connects then wakes it.
#[test]
fn a_vm_that_sleeps_by_a_snapshot_is_woken_by_traffic_after_a_restart_of_the_daemon() {
    require_root_and_tun!();
    require_kvm!();
    let mut stand = Stand::new(false);
    let dir = stand.bed.folder.path().join("warm");
    put_to_sleep(&stand.daemon, &stand.bed, &dir);
    let id = vms(&stand.daemon)[0]["id"].clone();
    for kills in [false, true] {
        match kills {
            true => stand.daemon.kill_both().unwrap(),
            false => drop(stand.daemon.stop().unwrap()),
        }
        stand.daemon = stand.daemon.again().unwrap();
        let listed = vms(&stand.daemon);
        assert_eq!(
            (&listed[0]["id"], &listed[0]["state"]),
            (&id, &json!("asleep")),
            "{listed}"
        );
    }
    let events = stand.events();
    let bed = &stand.bed;
    let address = SocketAddr::from((HOST, 8007));
    thread::scope(|scope| {
        let connects = scope.spawn(|| bed.world.net.run(|| tcp::connect(address, WAIT)));
        let wake = await_event(&events, "wake");
        assert_eq!(
            (&wake["vm"], &wake["proto"]),
            (&json!("web"), &json!("tcp"))
        );
        assert!(!connects.is_finished(), "somebody answered for the guest");
        let restored = bed.restore(&dir, &["--as", "web"]);
        await_event(&events, "vm_awake");
        let mut stream = connects.join().unwrap().unwrap();
        EchoSession::new(&mut stream).round(1_000).unwrap();
        bed.have(&["kill", &restored.broker_pid().to_string()]);
        assert_eq!(restored.finish(WAIT).unwrap().status.code(), Some(143));
    });
}

/// A TAP that is made for a restored guest has the MTU that the guest knows, and a new VM's has no name
/// that is a VM's whose TAP is away. A guest on a TAP that is there is told the MTU of that.
#[test]
fn a_tap_has_the_mtu_of_its_guest_and_the_name_of_no_other_vm() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let daemon = Slipgate::serve(&bed.world.host, &bed.pins, &["--uplink", UPLINK]).unwrap();
    let ip = |text: &str| bed.world.host.ip(text).unwrap();
    let mtu_of = |tap: &str| {
        let link = ip(&format!("-o link show {tap}"));
        let mtu = link.split_once(" mtu ").unwrap().1;
        mtu.split(' ').next().unwrap().to_owned()
    };
    let work = ["--memory", "64", "--cmdline", "serve 7 600s"];
    let start = |flags: &[&str]| {
        let mut vm = bed.start_with(&[&work[..], flags].concat());
        vm.await_line("\"serving\"", WAIT).unwrap();
        vm
    };
    let one = start(&["--name", "one"]);
    let tap = bed.status(&one)["tap"].as_str().unwrap().to_owned();
    ip(&format!("link set {tap} mtu 1400"));
    let dir = bed.folder.path().join("one");
    have(
        &daemon,
        &["snapshot", "one", dir.to_str().unwrap(), "--sleep"],
    );
    assert_eq!(one.finish(WAIT).unwrap().status.code(), Some(143));
    assert!(!ip("-brief link").contains(&tap));

    // The name is the VM's that sleeps.
    let two = start(&["--name", "two"]);
    let others = bed.status(&two)["tap"].as_str().unwrap().to_owned();
    assert_ne!(others, tap);
    assert_eq!(mtu_of(&others), "1500");
    let again = bed.restore(&dir, &["--as", "one"]);
    eventually("it runs", || bed.status(&again)["state"] == "running");
    assert_eq!(bed.status(&again)["tap"], tap.as_str());
    assert_eq!(mtu_of(&tap), "1400");
    // A clone's too.
    let clone = bed.restore(&dir, &["--name", "clone"]);
    eventually("it runs", || bed.status(&clone)["state"] == "running");
    assert_eq!(mtu_of(bed.status(&clone)["tap"].as_str().unwrap()), "1400");

    ip("tuntap add tapweb mode tap vnet_hdr multi_queue");
    ip("link set tapweb mtu 1600");
    have(&daemon, &["vm", "add", "web", "--tap", "tapweb"]);
    let told = bed.start_with(&["--as", "web", "--cmdline", "wait 1"]);
    let told = told.finish(WAIT).unwrap();
    told.assert_success();
    let lease = &told.said("mtu_by_dhcp")[0];
    assert_eq!(lease["mtu"], 1600, "{lease}");
    for vm in [two, again, clone] {
        signal(vm.broker_pid(), libc::SIGTERM);
        assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
    }
}

/// At whatever moment of `snapshot --sleep` the run is stopped by ^C: either the command succeeds, the
/// snapshot is whole and the VM is kept asleep, or it fails, and the VM went with the run. Then there is no
/// snapshot, or a whole one, where ^C came after it was written and before the daemon kept the VM. Nobody
/// waits for what is gone.
#[test]
fn a_run_that_is_stopped_while_it_is_saved_leaves_a_whole_snapshot_or_none() {
    require_root_and_tun!();
    require_kvm!();
    let stand = Stand::new(false);
    let bed = &stand.bed;
    let events = stand.events();
    let mut saved = 0;
    // The last one is not stopped.
    let delays_ms = [Some(0), Some(20), Some(60), Some(120), Some(250), None];
    for (round, delay_ms) in delays_ms.into_iter().enumerate() {
        let name = format!("vm{round}");
        let dir = bed.folder.path().join(&name);
        let tap = format!("tap{round}");
        let work = "fill 192; serve 7 600s";
        let flags = [
            "--name",
            &name,
            "--tap",
            &tap,
            "--memory",
            "256",
            "--cmdline",
            work,
        ];
        let mut vm = bed.start_with(&flags);
        vm.await_line("\"serving\"", WAIT).unwrap();
        let args = ["snapshot", &name, dir.to_str().unwrap(), "--sleep"];
        let mut command: Command = stand.daemon.command(&args).unwrap();
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let command = bed.world.host.spawn(command).unwrap();
        assert_eq!(await_event(&events, "vm_asleep")["vm"], name.as_str());
        if let Some(delay_ms) = delay_ms {
            thread::sleep(Duration::from_millis(delay_ms));
            signal(vm.broker_pid(), libc::SIGINT);
        }
        let output = command.wait_with_output().unwrap();
        let end = vm.finish(WAIT).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let all = format!("after {delay_ms:?} ms: {stderr}; {}", end.stderr);
        let is_whole = dir.join("machine.json").exists();
        // The snapshot's own end of the machine may have been first.
        assert!(matches!(end.status.code(), Some(130 | 143)), "{all}");
        assert!(delay_ms.is_some() || output.status.success(), "{all}");
        let (status, kept) = stand.ask("GET", &format!("/v1/vms/{name}"), None);
        if output.status.success() {
            assert!(is_whole, "{all}");
            assert_eq!((status, &kept["state"]), (200, &json!("asleep")), "{all}");
            saved += 1;
            let again = bed.restore(&dir, &["--as", &name]);
            assert_eq!(await_event(&events, "vm_awake")["vm"], name.as_str());
            signal(again.broker_pid(), libc::SIGTERM);
            assert_eq!(again.finish(WAIT).unwrap().status.code(), Some(143));
        } else {
            eventually("the VM has gone with its run", || {
                stand.ask("GET", &format!("/v1/vms/{name}"), None).0 == 404
            });
            assert!(!is_whole || dir.join("state").exists(), "{all}");
            if !is_whole {
                let left = dir.read_dir().map(Iterator::count).unwrap_or(0);
                assert_eq!(left, 0, "{all}");
            }
        }
    }
    println!("{saved} VMs were kept asleep, the one whose run was not stopped among them");
}
