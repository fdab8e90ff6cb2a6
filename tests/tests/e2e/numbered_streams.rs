//! Streams whose every byte is known, where their way is bad, long or cut: the ideas of passt's own tests,
//! of which docs/testing.md has the list.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    process::{Command, Stdio},
    time::Duration,
};

use slipgate_testbed::{
    GuestConfig, WorldConfig,
    clients::tcp,
    impairment::Impairment,
    require_root_and_tun,
    servers::{TcpServer, TcpService},
    signal,
    world::SERVER_2,
};

use crate::{
    Cell, GATEWAY, GUEST, Stand, WAIT, at, eventually,
    matrix::matrix,
    unprivileged::{Attached, Place},
};

const STREAMS: u16 = 7001;
const FORBIDDEN: u16 = 7100;
const FORWARDED: u16 = 8080;
/// Bytes of a stream: many times every queue on the way.
const BYTES: u64 = 20_000_000;
const BAD_LINK_BYTES: u64 = 4_000_000;
/// Reconnections during a download.
const RECONNECTIONS: usize = 4;
/// Time that a stream takes at least whose guest is cut off meanwhile.
const SECONDS: u64 = 10;
const MINUTE: Duration = Duration::from_secs(60);

matrix! {
    a_numbered_stream_over_a_bad_link_is_whole_each_way: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "the ends' own TCP repairs it";
}

fn a_numbered_stream_over_a_bad_link_is_whole_each_way(cell: Cell) {
    let mut guest = GuestConfig::new("tap0");
    guest.impairment = Some(Impairment::rough(7));
    let stand = Stand::of_guest(
        cell,
        guest,
        WorldConfig::default(),
        &[],
        &[],
        &["--dns", "none"],
    );
    let place = (cell.server(), STREAMS);
    let server = TcpServer::start(&stand.world.net, place, TcpService::Streams).unwrap();
    let to = server.address();
    stand.run(|| {
        tcp::download(to, BAD_LINK_BYTES, 1, 2 * MINUTE).unwrap();
        tcp::upload(to, BAD_LINK_BYTES, 2, 2 * MINUTE).unwrap();
    });
}

fn serve(place: &Place, port: u16) -> TcpServer<Ipv4Addr> {
    TcpServer::start(&place.world.net, (SERVER_2, port), TcpService::Streams).unwrap()
}

/// QEMU's `reconnect-ms`: the VMM's connection is cut in the middle of frames, and made again. The guest
/// does not notice but by what it has to send again.
#[test]
fn a_stream_goes_on_over_reconnections_of_its_guest() {
    require_root_and_tun!();
    let place = Place::new();
    let _server = serve(&place, STREAMS);
    // So that each stream takes seconds, however fast the machine is.
    let policy = place.file("policy.toml");
    let rate = BYTES / SECONDS;
    let rates = format!(
        "default = \"allow\"\n[quotas]\ntx_bytes_per_second = {rate}\nrx_bytes_per_second = {rate}\n"
    );
    fs::write(&policy, rates).unwrap();
    let flags = ["--dns", "none", "--policy", policy.to_str().unwrap()];
    let attached = Attached::start(&place, &flags);
    let mut guest = attached.guest();
    guest.dhcp(WAIT).unwrap();
    let ns = guest.ns.clone();
    let streams = [true, false].map(|down| {
        let ns = ns.clone();
        std::thread::spawn(move || {
            ns.run(|| match down {
                true => tcp::download(at(SERVER_2, STREAMS), BYTES, 1, 2 * MINUTE).map(drop),
                false => tcp::upload(at(SERVER_2, STREAMS), BYTES, 2, 2 * MINUTE).map(drop),
            })
        })
    });
    let carried = || -> u64 {
        let flows = place.output(&["flows", "--json"]);
        let flows: serde_json::Value = serde_json::from_str(&flows).unwrap();
        let flows = flows.as_array().unwrap();
        let bytes = |flow: &serde_json::Value| {
            flow["rx_bytes"].as_u64().unwrap() + flow["tx_bytes"].as_u64().unwrap()
        };
        flows.iter().map(bytes).sum()
    };
    for round in 1..=RECONNECTIONS as u64 {
        // In the middle: a part is carried, and neither is over.
        let part = BYTES / 10 * round;
        eventually("a part is carried", || (carried() >= part).then_some(()));
        let is_over = streams.each_ref().map(|stream| stream.is_finished());
        assert_eq!(is_over, [false; 2], "cut {round} finds no stream");
        guest.reconnect(&attached.socket).unwrap();
    }
    for stream in streams {
        stream.join().unwrap().unwrap();
    }
    signal(attached.child.id(), libc::SIGTERM);
    assert_eq!(attached.end(&place), Some(0));
}

/// Two VMMs of one user beside each other, each with an engine of its own and the same addresses.
#[test]
fn two_guests_of_a_user_stream_to_the_world_and_to_each_other() {
    require_root_and_tun!();
    let place = Place::new();
    let _server = serve(&place, STREAMS);
    let forward = format!("tcp:{FORWARDED}:80");
    let first = Attached::start(&place, &["--dns", "none", "--forward", &forward]);
    // The forward's port at the host's loopback is how the other one gets there.
    let listed = FORWARDED.to_string();
    let flags = ["--dns", "none", "--host-loopback", &listed];
    let second = Attached::start_as("other", "--socket", &place, &flags);
    let guests = [&first, &second].map(Attached::guest);
    for guest in &guests {
        assert_eq!(guest.dhcp(WAIT).unwrap().address, GUEST);
    }
    let _web = TcpServer::start(&guests[0].ns, (GUEST, 80), TcpService::Streams).unwrap();
    let both = |to: SocketAddr, seed| {
        tcp::download(to, BYTES, seed, MINUTE).unwrap();
        tcp::upload(to, BYTES, seed + 1, MINUTE).unwrap();
    };
    std::thread::scope(|scope| {
        for (seed, guest) in (1..).zip(&guests) {
            scope.spawn(move || guest.run(|| both(at(SERVER_2, STREAMS).into(), 10 * seed)));
        }
        scope.spawn(|| guests[1].run(|| both(at(GATEWAY, FORWARDED).into(), 50)));
    });
    let flows: serde_json::Value =
        serde_json::from_str(&place.output(&["flows", "--json"])).unwrap();
    let vms = flows
        .as_array()
        .unwrap()
        .iter()
        .map(|flow| flow["vm"].to_string());
    let vms: std::collections::BTreeSet<_> = vms.collect();
    assert_eq!(vms.len(), 2, "each has its flows: {flows:#}");
    drop(guests);
    for attached in [&first, &second] {
        signal(attached.child.id(), libc::SIGTERM);
    }
    assert_eq!(first.ended(), Some(0));
    assert_eq!(second.ended(), Some(0));
    assert!(place.user.has_nothing_left());
}

/// Exit status of the inner command.
const STATUS: i32 = 5;

/// `slipgate exec` in `slipgate exec`, as pasta in pasta: nested namespaces, and both policies hold.
#[test]
fn a_command_in_a_command_is_under_both_policies() {
    require_root_and_tun!();
    let place = Place::new();
    let _servers = [STREAMS, STREAMS + 1, FORBIDDEN].map(|port| serve(&place, port));
    let [slipgate, tests] =
        ["slipgate", "tests"].map(|name| place.file(name).to_str().unwrap().to_owned());
    let [outer_rule, inner_rule] = [
        format!("{SERVER_2}:{STREAMS}-{}", STREAMS + 1),
        format!("{SERVER_2}:{STREAMS}"),
    ];
    let outer = [
        "exec",
        "--name",
        "outer",
        "--dns",
        "none",
        "--default",
        "deny",
        "--allow",
        &outer_rule,
        "--",
    ];
    let within = [
        slipgate.as_str(),
        "exec",
        "--name",
        "inner",
        "--dns",
        "none",
    ];
    // The inner one lets the forbidden port pass, the outer one the port behind the first.
    let forbidden = format!("{SERVER_2}:{FORBIDDEN}");
    let rules = [
        "--default",
        "deny",
        "--allow",
        &inner_rule,
        "--allow",
        &forbidden,
        "--",
    ];
    let test = [
        "numbered_streams::a_command_within",
        "--exact",
        "--ignored",
        "--nocapture",
    ];
    let all = [&outer[..], &within, &rules, &[tests.as_str()], &test].concat();
    let mut exec = place.slipgate(&all);
    exec.stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let exec = place.world.host.spawn(exec).unwrap();
    let output = exec.wait_with_output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert_eq!(output.status.code(), Some(STATUS), "{said:?}");
    assert!(place.user.has_nothing_left());
}

/// The inner command of the test above.
#[test]
#[ignore = "the child of a_command_in_a_command_is_under_both_policies"]
fn a_command_within() {
    tcp::download(at(SERVER_2, STREAMS), BYTES, 1, MINUTE).unwrap();
    tcp::upload(at(SERVER_2, STREAMS), BYTES, 2, MINUTE).unwrap();
    tcp::expect_refused(at(SERVER_2, STREAMS + 1)).unwrap();
    tcp::expect_refused(at(SERVER_2, FORBIDDEN)).unwrap();
    // Its network is not the outer command's.
    let addresses = Command::new("ip").args(["-br", "-4", "addr"]).output();
    let addresses = String::from_utf8(addresses.unwrap().stdout).unwrap();
    assert!(addresses.contains(&GUEST.to_string()), "{addresses}");
    std::process::exit(STATUS);
}
