//! The built-in guest under an independent VMM: its driver works with QEMU's virtio-net-pci, and it
//! reaches the world through QEMU's own networks. The tests of `slipgate run` show that slipgate's
//! card works with the same driver.

mod random_reads;

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use slipgate_testbed::{
    PinDir, Slipgate, World,
    builtin_guest::{Accelerator, Boot, GuestOutput, Network, Passage, Qemu, SocketNetwork},
    require_kvm, require_root_and_tun,
    rig::Machine,
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    skipped,
    turns::{self, Turn},
    world::{SERVER, UPLINK},
    world_ipv6::{GATEWAY6, SERVER6, SERVER6_2},
};

/// Time limit: several times the duration on a machine under load.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Number of the guest's checks, so that a missing one is noticed.
const CHECKS: usize = 18;
const MTU: u32 = 1500;

/// The world, and its servers for the guest. QEMU is told to end in time, so its tests run alone.
struct Stand {
    world: World,
    _servers: [TcpServer; 3],
    _turn: Turn,
}

impl Stand {
    fn new() -> Stand {
        let turn = turns::alone("a machine boots within a time limit");
        let world = World::new().unwrap();
        let servers = [
            (7000, TcpService::Streams),
            (7001, TcpService::Close),
            (7002, TcpService::Echo),
        ]
        .map(|(port, service)| TcpServer::start(&world.net, (SERVER, port), service).unwrap());
        Stand {
            world,
            _servers: servers,
            _turn: turn,
        }
    }

    fn qemu<'a>(&'a self, accelerator: Accelerator, network: Network, line: &'a str) -> Qemu<'a> {
        let boot = Boot {
            timeout: TIMEOUT,
            ..Boot::new(&self.world.host, line)
        };
        Qemu {
            boot,
            accelerator,
            network,
        }
    }

    fn boot(&self, accelerator: Accelerator, network: Network, line: &str) -> GuestOutput {
        let qemu = self.qemu(accelerator, network, line);
        qemu.run().unwrap().expect_well().unwrap()
    }
}

/// Connections, messages and checked streams each way.
fn to_the_world() -> String {
    to(&SERVER.to_string())
}

fn to(host: &str) -> String {
    format!(
        "crr {host}:7001 100 x4 close; rr {host}:7002 50; \
         stream {host}:7000 2000000 up; stream {host}:7000 2000000 down"
    )
}

/// All checks were made and hold; the features that the device has not.
fn lacking(output: &GuestOutput) -> Vec<String> {
    let checks: Vec<Value> = output
        .lines()
        .filter(|line| line.get("selftest").is_some())
        .collect();
    assert_eq!(checks.len(), CHECKS, "{output}");
    assert!(checks.iter().all(|check| check["ok"] == true), "{output}");
    let lacks = checks.iter().filter_map(|check| check["lacks"].as_str());
    lacks.map(str::to_owned).collect()
}

/// libslirp, in QEMU's process.
#[test]
fn under_qemu_with_libslirp() {
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    let stand = Stand::new();
    let line = format!("selftest; ping 10.0.2.2 2; {}", to_the_world());
    let output = stand.boot(Accelerator::Kvm, Network::User, &line);
    assert!(
        lacking(&output).iter().any(|lacks| lacks == "MQ"),
        "libslirp has one queue pair: {output}"
    );
}

/// passt, by its socket.
#[test]
fn under_qemu_with_passt() {
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    let stand = Stand::new();
    let host = &stand.world.host;
    let passt = SocketNetwork::passt(host, "passt".as_ref(), MTU, Passage::Stream).unwrap();
    stand.boot(Accelerator::Kvm, passt.network(), &to_the_world());
}

/// slipgate in user mode, by its socket and by the card's rings, with a policy by name; MTUs of Ethernet
/// and of passt.
#[test]
fn under_qemu_with_slipgate_by_its_sockets() {
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    let stand = Stand::new();
    let name = "api.example.test";
    let zone = Zone::from([(name.into(), Answer::a(SERVER, 300))]);
    let _dns = DnsServer::start(&stand.world.net, (SERVER, 53), zone).unwrap();
    let resolver = SERVER.to_string();
    for passage in [Passage::Stream, Passage::VhostUser] {
        for mtu in [MTU, 65_520] {
            let rules = ["--default", "deny", "--allow", "*.example.test:7000-7002"];
            let flags = [&rules[..], &["--dns", &resolver]].concat();
            let host = &stand.world.host;
            let slipgate = SocketNetwork::slipgate(host, mtu, passage, &flags).unwrap();
            let line = format!("ping 10.0.2.2 2; {}", to(name));
            let output = stand.boot(Accelerator::Kvm, slipgate.network(), &line);
            let lease = output.results("lease");
            assert_eq!(lease[0]["mtu"], mtu, "{passage:?}: {output}");
        }
    }
}

/// A TAP with two queue pairs and all offloads, served by `slipgate attach`. `card` has further
/// properties of the card, and `lacking_too` what it lacks by them.
fn on_a_tap(accelerator: Accelerator, card: &str, lacking_too: &[&str]) {
    let stand = Stand::new();
    let made = "tuntap add tap0 mode tap multi_queue vnet_hdr";
    stand.world.host.ip(made).unwrap();
    let pins = PinDir::new().unwrap();
    let args = ["--tap", "tap0", "--uplink", UPLINK];
    let slipgate = Slipgate::attach(&stand.world.host, &pins, &args).unwrap();
    let hint = "tap0: made with multi_queue; Firecracker refuses such a TAP";
    let until = Instant::now() + Duration::from_secs(10);
    while !slipgate.stderr().contains(hint) {
        assert!(Instant::now() < until, "{}", slipgate.stderr());
        std::thread::sleep(Duration::from_millis(10));
    }
    let line = format!("selftest; {}", to_the_world());
    let qemu = stand.qemu(accelerator, Network::Tap("tap0".into(), MTU), &line);
    let command = changed(&qemu, |args| {
        let plain = |arg: &&mut String| arg.starts_with("virtio-net-pci");
        args.iter_mut().find(plain).unwrap().push_str(card);
    });
    let output = qemu.run_by(command).unwrap().expect_well().unwrap();
    let is_known = |lacks: &String| lacks == "CTRL_VLAN" || lacking_too.contains(&&**lacks);
    assert!(lacking(&output).iter().all(is_known), "{output}");
    let carried: Vec<u64> = output
        .lines()
        .filter(|line| line.get("pair").is_some())
        .map(|pair| {
            pair["rx_frames"]
                .as_u64()
                .unwrap()
                .min(pair["tx_frames"].as_u64().unwrap())
        })
        .collect();
    assert!(
        carried.len() == 2 && carried.iter().all(|frames| *frames > 0),
        "each pair carries frames each way: {output}"
    );
}

#[test]
fn under_qemu_on_a_tap() {
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    on_a_tap(Accelerator::Kvm, "", &[]);
}

/// As with Cloud Hypervisor's card: each large frame needs a buffer of its own.
#[test]
fn under_qemu_on_a_tap_without_mergeable_buffers() {
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    on_a_tap(Accelerator::Kvm, ",mrg_rxbuf=off", &["MRG_RXBUF"]);
}

/// Through slipgate's NAT66, with an address of the prefix that it advertises.
#[test]
fn under_qemu_by_ipv6() {
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    let stand = Stand::new();
    stand.world.give_ipv6().unwrap();
    let net = &stand.world.net;
    let tcp = |at, port, service| TcpServer::start(net, (at, port), service).unwrap();
    let _servers = [
        tcp(SERVER6, 7000, TcpService::Streams),
        tcp(SERVER6, 7001, TcpService::Close),
        tcp(SERVER6, 7002, TcpService::Echo),
    ];
    let denied = tcp(SERVER6_2, 7001, TcpService::Close);
    let name = "www.example.test";
    let zone = Zone::from([(name.into(), Answer::address(SERVER6, 300))]);
    let _dns = DnsServer::start(net, (SERVER, 53), zone).unwrap();
    let made = "tuntap add tap0 mode tap multi_queue vnet_hdr";
    stand.world.host.ip(made).unwrap();
    let pins = PinDir::new().unwrap();
    let (deny, resolver) = (format!("{SERVER6_2}/128"), SERVER.to_string());
    let flags = ["--ipv6", "nat", "--deny", &deny, "--dns", &resolver];
    let args = [&["--tap", "tap0", "--uplink", UPLINK], &flags[..]].concat();
    let _slipgate = Slipgate::attach(&stand.world.host, &pins, &args).unwrap();
    let line = format!(
        "ping {GATEWAY6} 2; dns6 {name}; {}; {}; crr [{SERVER6_2}]:7001 2",
        to(&format!("[{name}]")),
        to(&format!("[{SERVER6}]")),
    );
    let network = Network::Tap("tap0".into(), MTU);
    let output = stand.qemu(Accelerator::Kvm, network, &line).run().unwrap();
    let only = |workload| {
        let first = output.results(workload).into_iter().next();
        first.unwrap_or_else(|| panic!("no {workload}: {output}"))
    };
    let address = only("ipv6")["address"].as_str().map(str::to_owned);
    // All is reached by the router.
    let is_own = |address: String| address.starts_with("fd73:") && address.ends_with("/128");
    assert!(address.is_some_and(is_own), "{output}");
    assert_eq!(only("ping")["lost"], 0, "{output}");
    let found = &only("dns6")["addresses"];
    assert_eq!(found, &json!([SERVER6.to_string()]), "{output}");
    let done = |workload| {
        output
            .results(workload)
            .into_iter()
            .map(|line| line["failed"].clone())
    };
    assert!(
        done("rr").chain(done("stream")).all(|failed| failed == 0),
        "{output}"
    );
    let connections = output.results("crr");
    let failures: Vec<_> = connections.iter().map(|line| &line["failures"]).collect();
    assert_eq!(failures[..2], [&json!({}), &json!({})], "{output}");
    let refused =
        failures[2] == &json!({"refused": 2}) || failures[2] == &json!({"unreachable": 2});
    assert!(refused && denied.accepted() == 0, "{output}");
    let merged = |pair: Value| pair["rx_merged"].as_u64() > Some(0);
    assert!(output.lines().any(merged), "no large frame came: {output}");
}

/// Without KVM: another implementation of the processor, too.
#[test]
fn under_qemu_s_translator_on_a_tap() {
    require_root_and_tun!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    on_a_tap(Accelerator::Tcg, "", &[]);
}

/// Without an exit port, and with a VMM that boots the guest again at a reset, as Cloud Hypervisor
/// does: by PM1a_CNT of a PC, and by the sleep register in memory of a hardware-reduced machine.
#[test]
fn it_powers_off_where_a_reset_would_boot_it_again() {
    require_root_and_tun!();
    require_kvm!();
    if let Err(why) = Machine::is_possible() {
        return skipped!("{why}");
    }
    let stand = Stand::new();
    for (kind, line) in [("q35", "wait 1"), ("microvm,acpi=on,pcie=on", "")] {
        let qemu = stand.qemu(Accelerator::Kvm, Network::User, line);
        let command = changed(&qemu, |args| {
            args.retain(|arg| arg != "-no-reboot");
            let is_exit = |arg: &String| arg.starts_with("isa-debug-exit");
            let exit = args.iter().position(is_exit).unwrap();
            args.drain(exit - 1..=exit);
            let machine = args.iter().position(|arg| arg == "-M").unwrap();
            args[machine + 1] = kind.into();
        });
        let output = qemu.run_by(command).unwrap();
        let ended = output.status.is_some_and(|status| status.success());
        assert!(ended && !output.console.is_empty(), "{kind}: {output}");
    }
}

/// Returns QEMU's command with changed arguments.
fn changed(qemu: &Qemu<'_>, change: impl FnOnce(&mut Vec<String>)) -> Command {
    let command = qemu.command().unwrap();
    let args = command.get_args().map(|arg| arg.to_str().unwrap().into());
    let mut args = args.collect();
    change(&mut args);
    let mut changed = Command::new(command.get_program());
    changed
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    changed
}
