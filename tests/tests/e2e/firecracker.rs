//! Firecracker's machines on TAPs that a daemon serves, as `docs/deploy/vmms.md` says: booted,
//! restored from a snapshot, cloned, jailed. `SLIPGATE_FIRECRACKER` names the binary.

use std::{
    io::Read as _,
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use slipgate_testbed::{
    builtin_guest::{Boot, Firecracker, JAILER, OtherVmm, jailer, run_jailed},
    clients::{tcp, tcp::EchoSession},
    left_out, require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService},
    world::{HOST, SERVER},
};

use crate::{WAIT, api::Stand, at, eventually};

/// Port of the guest's echo.
const ECHO: u16 = 7;
/// Port of the world's echo.
const WORLD_ECHO: u16 = 7000;

/// A daemon with the VM `name` on a TAP of its own, whose echo is at a port of the host.
fn put(stand: &Stand, name: &str, tap: &str, port: u16) {
    let body = json!({ "tap": tap, "forwards": [format!("tcp:{port}:{ECHO}")] });
    let (status, vm) = stand.ask("PUT", &format!("/v1/vms/{name}"), Some(body));
    assert_eq!(status, 201, "{vm}");
}

fn make_tap(stand: &Stand, tap: &str, more: &str) {
    let made = format!("tuntap add {tap} mode tap vnet_hdr {more}");
    stand.world().host.ip(&made).unwrap();
}

/// A connection from the world to the guest's echo, once the guest serves it.
fn to_guest(stand: &Stand, vmm: &Firecracker, port: u16) -> TcpStream {
    let connected = || {
        let mut stream = tcp::connect(at(HOST, port), WAIT).ok()?;
        let answered = EchoSession::new(&mut stream).round(1_000);
        answered.ok().map(|_| stream)
    };
    let net = &stand.world().net;
    let deadline = Instant::now() + WAIT;
    loop {
        if let Some(stream) = net.run(connected) {
            return stream;
        }
        let late = Instant::now() >= deadline;
        // What it has printed by then.
        assert!(!late, "no answer of the guest: {}", vmm.console());
        thread::sleep(Duration::from_millis(10));
    }
}

fn flows_of(stand: &Stand, name: &str) -> Vec<serde_json::Value> {
    let (_, flows) = stand.ask("GET", &format!("/v1/flows?vm={name}"), None);
    flows.as_array().unwrap().clone()
}

#[test]
fn a_firecracker_goes_on_from_a_snapshot_and_its_clones_have_flows_of_their_own() {
    require_root_and_tun!();
    require_kvm!();
    let binary = OtherVmm::Firecracker.binary();
    if !OtherVmm::Firecracker.is_named() {
        return left_out!("{}", binary.unwrap_err());
    }
    binary.unwrap();
    let stand = Stand::new();
    let host = &stand.world().host;
    let server = TcpServer::start(&stand.world().net, (SERVER, WORLD_ECHO), TcpService::Echo);
    let _server = server.unwrap();
    for (name, tap, port) in [
        ("a", "tap0", 8000),
        ("b", "tap1", 8001),
        ("c", "tap2", 8002),
    ] {
        make_tap(&stand, tap, "");
        put(&stand, name, tap, port);
    }
    // A connection that outlives the snapshot; the echo comes when it has failed.
    let line = format!("rr {SERVER}:{WORLD_ECHO} 100000000; serve {ECHO} 1000s");
    let vmm = Firecracker::boot(&Boot::new(host, &line), "tap0").unwrap();
    let remote = at(SERVER, WORLD_ECHO).to_string();
    eventually("the guest's connection", || {
        let flows = flows_of(&stand, "a");
        let exchanged = |flow: &serde_json::Value| flow["rx_packets"].as_u64() > Some(100);
        flows
            .iter()
            .any(|flow| flow["remote"] == remote && exchanged(flow))
            .then_some(())
    });
    let snapshot = vmm.save().unwrap();
    drop(vmm);

    // The same machine, on the same TAP: its peer is told before it runs on.
    let again = Firecracker::load(&snapshot, host, None).unwrap();
    let (status, ended) = stand.ask("POST", "/v1/vms/a/generation", None);
    assert_eq!((status, &ended["flows"]), (200, &json!(1)), "{ended}");
    again.resume().unwrap();
    let mut of_a = to_guest(&stand, &again, 8000);
    assert!(
        again.console().contains("\"reset\":1"),
        "{}",
        again.console()
    );

    // Two clones beside it, with the same address and MAC.
    let [b, c] = ["tap1", "tap2"].map(|tap| {
        let clone = Firecracker::load(&snapshot, host, Some(tap)).unwrap();
        clone.resume().unwrap();
        clone
    });
    let (mut of_b, mut of_c) = (to_guest(&stand, &b, 8001), to_guest(&stand, &c, 8002));
    for clone in [&b, &c] {
        let console = clone.console();
        assert!(console.contains("\"reset\":1"), "{console}");
    }
    stand.world().net.run(|| {
        for stream in [&mut of_a, &mut of_b, &mut of_c] {
            EchoSession::new(stream).round(1_000).unwrap();
        }
    });
    for name in ["a", "b", "c"] {
        let flows = flows_of(&stand, name);
        let guests: Vec<_> = flows.iter().map(|flow| &flow["guest"]).collect();
        assert!(!guests.is_empty() && guests.iter().all(|guest| *guest == guests[0]));
        assert_eq!(
            guests[0],
            &json!(format!("10.0.2.15:{ECHO}")),
            "{name}: {flows:?}"
        );
    }

    // The end of one is nobody else's.
    drop(b);
    assert_eq!(stand.ask("DELETE", "/v1/vms/b", None).0, 204);
    stand.world().net.run(|| {
        for stream in [&mut of_a, &mut of_c] {
            EchoSession::new(stream).round(1_000).unwrap();
        }
        let gone = of_b.read(&mut [0; 1]);
        assert!(matches!(gone, Ok(0) | Err(_)), "{gone:?}");
    });
}

#[test]
fn a_firecracker_in_its_jailer_has_a_tap_of_the_namespace_that_is_served() {
    /// User of the jail.
    const USER: u32 = 61_234;
    require_root_and_tun!();
    require_kvm!();
    let jailer = jailer();
    if std::env::var_os(JAILER).is_none() {
        return left_out!("{}", jailer.unwrap_err());
    }
    jailer.unwrap();
    let stand = Stand::new();
    let server = TcpServer::start(&stand.world().net, (SERVER, WORLD_ECHO), TcpService::Echo);
    let _server = server.unwrap();
    make_tap(&stand, "tap0", &format!("user {USER}"));
    put(&stand, "a", "tap0", 8000);
    let line = format!("rr {SERVER}:{WORLD_ECHO} 100; ping 10.0.2.2 1");
    let boot = Boot::new(&stand.world().host, &line);
    let output = run_jailed(&boot, "tap0", USER).unwrap();
    output.expect_well().unwrap();
}
