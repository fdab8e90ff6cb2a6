//! A policy file with two policies: each VM has its own rate and its own guard, before and after a
//! reload that changes them over.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    thread,
    time::Duration,
};

use serde_json::Value;
use slipgate_testbed::{
    Capture, Guest, GuestConfig, PinDir, Slipgate, World,
    accounting::FlowKey,
    clients::{tcp, udp, udp::UdpOutcome},
    frame::FrameBuilder,
    servers::{UdpServer, UdpService},
    world::UPLINK,
};

use crate::{
    Cell, GATEWAY_MAC, GUEST_MAC, WAIT, eventually,
    matrix::{at, matrix},
    rates::{PAYLOAD, offer},
    stand::give_ipv6,
};

matrix! {
    two_policies_of_a_file_hold_each_for_its_vm_and_change_over_by_apply: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its two VMs share a process; a socket has one guest";
}

const SLOW: u64 = 500_000;
const QUICK: u64 = 2_000_000;
/// Number of packets to a denied destination.
const FLOOD: u64 = 3_000;
const TAPS: [&str; 2] = ["tap0", "tap1"];

/// The first VM's policy denies a prefix, the second's does not.
fn write(
    file: &Path,
    cell: Cell,
    [denying, open]: [&str; 2],
    [rate_of_denying, rate_of_open]: [u64; 2],
) {
    let denied = cell.server_2();
    let text = format!(
        r#"
[vms]
{denying} = "denying"
{open} = "open"
[policy.denying]
default = "allow"
rules = [{{ deny = "{denied}" }}]
[policy.denying.quotas]
tx_bytes_per_second = {rate_of_denying}
[policy.open]
default = "allow"
[policy.open.quotas]
tx_bytes_per_second = {rate_of_open}
"#
    );
    fs::write(file, text).unwrap();
}

struct Stand {
    slipgate: Slipgate,
    guests: [Guest; 2],
    world: World,
    cell: Cell,
}

impl Stand {
    fn drops(&self, vm: usize, reason: &str) -> u64 {
        let stats = self.slipgate.stats().unwrap();
        let all = stats["vms"].as_array().unwrap();
        let row = all.iter().find(|row| row["vm"] == TAPS[vm]).unwrap();
        let count: &Value = &row["drops"][reason]["packets"];
        count.as_u64().unwrap_or(0)
    }

    /// Asserts that denied packets of this VM, and of this VM only, are dropped, by IPv4 at the guard;
    /// those of the other VM arrive.
    fn assert_denied_to(&self, vm: usize, denied: &UdpServer<IpAddr>) {
        let other = 1 - vm;
        // The first is answered: of a flood few are.
        self.guests[vm]
            .run(|| tcp::expect_refused(at(self.cell.server_2(), 7000)))
            .unwrap();
        // The engine refuses, and of a flood it gets as much as there are credits.
        let of = |vm| ["denied", "refused", "no_credit"].map(|reason| self.drops(vm, reason));
        let (before, before_other) = (of(vm), of(other));
        for _ in 0..FLOOD {
            let (vnet, frame) = self.cell.datagram(6000, denied.address()).build();
            self.guests[vm].inject(vnet, &frame).unwrap();
        }
        eventually("all of it is dropped", || {
            let now: u64 = of(vm).iter().sum();
            (now - before.iter().sum::<u64>() == FLOOD).then_some(())
        });
        // It knows denied destinations of IPv4 alone.
        if !self.cell.is_ipv6() {
            let by_guard = of(vm)[0] - before[0];
            assert!(by_guard > FLOOD * 9 / 10, "{by_guard} of {FLOOD}");
        }
        let probe = || udp::probe(denied.address(), b"x", WAIT).unwrap();
        let answer = self.guests[other].run(probe);
        assert!(matches!(answer, UdpOutcome::Answered(_)), "{answer:?}");
        assert_eq!(of(other), before_other, "of {}", TAPS[other]);
    }

    fn assert_rate(&self, vm: usize, server: &UdpServer<IpAddr>, bytes_per_second: u64) {
        let guest = &self.guests[vm];
        guest
            .run(|| udp::probe(server.address(), b"x", WAIT))
            .unwrap();
        let mut flows = self.slipgate.flows().unwrap();
        flows.retain(|flow| flow.vm == TAPS[vm] && flow.remote == server.address().to_string());
        // The last one that was opened.
        let flow = flows.iter().min_by_key(|flow| flow.age_ms).unwrap();
        let from: SocketAddr = flow.guest.parse().unwrap();
        let (vnet, frame) = FrameBuilder::udp(from, server.address())
            .macs(GUEST_MAC, GATEWAY_MAC)
            .payload(&PAYLOAD)
            .build();
        let watching = Capture::start(&self.world.host, UPLINK).unwrap();
        let offer = offer(|| guest.inject(vnet, &frame).unwrap());
        // What waits in the queue that shapes comes out within 70 ms.
        thread::sleep(Duration::from_millis(500));
        let key = FlowKey::udp(flow.nat.parse::<SocketAddr>().unwrap(), server.address());
        let sent = watching.finish().unwrap().sent.of(key);
        offer.assert_shaped(sent.bytes, bytes_per_second);
    }
}

fn two_policies_of_a_file_hold_each_for_its_vm_and_change_over_by_apply(cell: Cell) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("egress.toml");
    write(&file, cell, TAPS, [SLOW, QUICK]);
    let world = World::new().unwrap();
    let ipv6 = cell.give(&world);
    let guests = TAPS.map(|tap| {
        let config = GuestConfig {
            // Or the device would do TSO, which the guard's hook forgoes.
            offloads: false,
            ..GuestConfig::new(tap)
        };
        let guest = Guest::new(&world, config).unwrap();
        if cell.is_ipv6() {
            give_ipv6(&guest);
        }
        guest
    });
    let pins = PinDir::new().unwrap();
    let policy = file.to_str().unwrap();
    let mut args = vec!["--uplink", UPLINK, "--xdp", "on", "--policy", policy];
    args.extend(ipv6);
    args.extend(TAPS.iter().flat_map(|tap| ["--tap", *tap]));
    let slipgate = Slipgate::attach(&world.host, &pins, &args).unwrap();
    let stand = Stand {
        slipgate,
        guests,
        world,
        cell,
    };
    let serve = |ip, port| UdpServer::start(&stand.world.net, (ip, port), UdpService::Echo);
    let server = serve(cell.server(), 7).unwrap();
    let denied = serve(cell.server_2(), 9).unwrap();

    stand.assert_denied_to(0, &denied);
    stand.assert_rate(0, &server, SLOW);
    stand.assert_rate(1, &server, QUICK);

    // The other VM is the one that is denied now, and the rates change places.
    let [first, second] = TAPS;
    write(&file, cell, [second, first], [SLOW, QUICK]);
    let said = stand.slipgate.run(&["policy", "apply"]).unwrap().stdout;
    let said = String::from_utf8_lossy(&said);
    // The second VM's flow to what it may not reach any more.
    assert!(said.contains("in force: 1 flow cut"), "{said}");
    stand.assert_denied_to(1, &denied);
    stand.assert_rate(0, &server, QUICK);
    stand.assert_rate(1, &server, SLOW);

    // Rates alone, and nothing is cut.
    write(&file, cell, [second, first], [QUICK, SLOW]);
    let said = stand.slipgate.run(&["policy", "apply"]).unwrap().stdout;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("in force: 0 flows cut"), "{said}");
    stand.assert_rate(0, &server, SLOW);
    stand.assert_rate(1, &server, QUICK);
}
