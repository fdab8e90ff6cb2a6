//! Pinned maps with live flows as a slipgate of this ABI version leaves them, in a file: each build
//! of the version has to take them over.
//!
//! `tests/fixtures/maps-VERSION.txt` has for each map a line with its shape, and a line for each
//! element that is not zero: key and value in hexadecimal, without the zeros at the end. The
//! ignored test `writes_the_fixture` writes it from a real run, once for each version.

use std::{
    fmt::Write as _,
    fs,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, UdpSocket},
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use serde_json::Value;
use slipgate_abi::{ABI_VERSION, NameValue, Slot, Vm6};
use slipgate_control::paths::netns_inode;
use slipgate_testbed::{
    GUEST_DEVICE, Guest, GuestConfig, NetNs, PinDir, Slipgate, World,
    clients::{dns, tcp},
    dns_wire::types,
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    slipgate::FlowRow,
    world::{SERVER, SERVER_2, UPLINK, WORLD_LINK},
};

use super::WAIT;

const DNS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 0, 2, 3), 53);
const NAME: &str = "www.example.test";
const NAME6: &str = "six.example.test";
/// Port of the guest's flows of datagrams.
const GUEST_PORT: u16 = 40_000;
/// Addresses of IPv6, of the default prefix and of the documentation's.
const GUEST6: &str = "fd73:6c69:7067::15";
const GATEWAY6: &str = "fe80::53:4cff:fe47:1";
const SERVER6: &str = "2001:db8:1::1";
const SERVER6_2: &str = "2001:db8:1::5";
const HOST6: &str = "2001:db8:1::2";

fn fixture() -> PathBuf {
    let file = format!("fixtures/maps-{ABI_VERSION}.txt");
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

/// Offsets of times in the values, which are those of the machine that wrote the fixture.
fn times_in(map: &str) -> &'static [usize] {
    use std::mem::offset_of;
    match map {
        "SLOTS" => &[
            offset_of!(Slot, tx_last_ns),
            offset_of!(Slot, rx_last_ns),
            offset_of!(Slot, created_ns),
        ],
        "NAMES" => &[offset_of!(NameValue, expires_ns)],
        // A guest has two addresses at most here.
        "VMS6" => &[
            offset_of!(Vm6, used_ns),
            offset_of!(Vm6, used_ns) + 8,
            offset_of!(Vm6, used_ns) + 16,
        ],
        _ => &[],
    }
}

/// Gives a namespace's device an address of IPv6.
fn address6(ns: &NetNs, device: &str, address: &str) {
    for device in ["all", "default", device] {
        ns.sysctl(&format!("net.ipv6.conf.{device}.disable_ipv6"), "0")
            .unwrap();
    }
    ns.ip(&format!("-6 addr add {address}/64 dev {device} nodad"))
        .unwrap();
}

/// A guest with a slipgate that lets it reach a server by its addresses, and another by its name.
struct Stand {
    guest: Guest,
    pins: PinDir,
    udp: UdpServer,
    by_name: TcpServer,
    by_name6: TcpServer<Ipv6Addr>,
    resolver: DnsServer,
    world: World,
}

impl Stand {
    fn new() -> Self {
        let world = World::new().unwrap();
        address6(&world.host, UPLINK, HOST6);
        for server in [SERVER6, SERVER6_2] {
            address6(&world.net, WORLD_LINK, server);
        }
        let route = format!("-6 route add default via {SERVER6} dev {UPLINK}");
        world.host.ip(&route).unwrap();
        let server6: Ipv6Addr = SERVER6_2.parse().unwrap();
        let zone = Zone::from([
            (NAME.to_owned(), Answer::a(SERVER_2, 86_400)),
            (NAME6.to_owned(), Answer::address(server6, 86_400)),
        ]);
        Self {
            guest: Guest::new(&world, GuestConfig::new("tap0")).unwrap(),
            pins: PinDir::new().unwrap(),
            udp: UdpServer::start(&world.net, (SERVER, 7002), UdpService::Echo).unwrap(),
            by_name: TcpServer::start(&world.net, (SERVER_2, 7000), TcpService::Close).unwrap(),
            by_name6: TcpServer::start(&world.net, (server6, 7000), TcpService::Close).unwrap(),
            resolver: DnsServer::start(&world.net, (SERVER, 53), zone).unwrap(),
            world,
        }
    }

    fn attach(&self) -> Slipgate {
        let (dns, server) = (self.resolver.address().to_string(), SERVER.to_string());
        let rules = ["--default", "deny", "--allow", NAME, "--allow", &server];
        let ipv6 = ["--allow", SERVER6, "--allow", NAME6, "--ipv6", "nat"];
        let args = ["--tap", "tap0", "--uplink", UPLINK, "--on-exit", "keep"];
        let more = ["--dns", &dns, "--flow-table", "1024"];
        let args = [&args[..], &more, &rules, &ipv6].concat();
        Slipgate::attach(&self.world.host, &self.pins, &args).unwrap()
    }

    /// A datagram there and back, always by the same flow.
    fn exchange(&self) {
        self.guest.run(|| {
            let socket = UdpSocket::bind(("0.0.0.0", GUEST_PORT)).unwrap();
            socket.connect(self.udp.address()).unwrap();
            socket.set_read_timeout(Some(WAIT)).unwrap();
            socket.send(b"hello").unwrap();
            assert_eq!(socket.recv(&mut [0; 16]).unwrap(), 5);
        });
    }

    /// The same by IPv6. The guest has its addresses as if it had configured itself.
    fn exchange6(&self) {
        let ns = &self.guest.ns;
        if !ns.ip("-6 addr").unwrap().contains(GUEST6) {
            address6(ns, GUEST_DEVICE, GUEST6);
            ns.ip(&format!(
                "-6 route add default via {GATEWAY6} dev {GUEST_DEVICE}"
            ))
            .unwrap();
        }
        let server = self
            .world
            .net
            .run(|| UdpSocket::bind((SERVER6, 7002)))
            .unwrap();
        server.set_read_timeout(Some(WAIT)).unwrap();
        let guest = self
            .guest
            .run(|| UdpSocket::bind((GUEST6, GUEST_PORT)))
            .unwrap();
        guest.set_read_timeout(Some(WAIT)).unwrap();
        guest.connect(server.local_addr().unwrap()).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let (len, from) = server.recv_from(&mut [0; 16]).unwrap();
                server.send_to(&[7; 16][..len], from).unwrap();
            });
            guest.send(b"hello").unwrap();
            assert_eq!(guest.recv(&mut [0; 16]).unwrap(), 5);
        });
    }

    /// Asks for both names.
    fn ask(&self) {
        for question in [
            dns::question(NAME, types::A),
            dns::question(NAME6, types::AAAA),
        ] {
            let ask = || dns::ask_udp(DNS, &question, WAIT);
            self.guest.run(ask).unwrap();
        }
    }

    /// Connects to the addresses of both names, once the guest has one of IPv6.
    fn connect_by_name(&self) {
        for to in [
            SocketAddr::from(self.by_name.address()),
            self.by_name6.address(),
        ] {
            let connect = || tcp::connect_close(to, WAIT);
            self.guest.run(connect).unwrap();
        }
    }

    /// Directory in which this network namespace's maps are pinned.
    fn directory(&self) -> PathBuf {
        let inode = self.world.host.run(netns_inode).unwrap();
        self.pins.path().join(inode.to_string())
    }
}

/// The flow of a guest's address.
fn flow_of_datagrams(slipgate: &Slipgate, guest: &str) -> FlowRow {
    let flows = slipgate.flows().unwrap();
    let ours = format!("{guest}:{GUEST_PORT}");
    let found = flows
        .iter()
        .find(|flow| flow.proto == "udp" && flow.guest == ours);
    found.unwrap_or_else(|| panic!("{flows:?}")).clone()
}

fn bpftool(args: &[&str]) -> String {
    let output = Command::new("bpftool").args(args).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "bpftool {args:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn monotonic_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a place for the time.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The bytes that bpftool shows, in hexadecimal.
fn hex(bytes: &Value) -> String {
    let byte = |byte: &Value| byte.as_str().unwrap().trim_start_matches("0x").to_owned();
    bytes.as_array().unwrap().iter().map(byte).collect()
}

#[test]
#[ignore = "of a release: writes the fixture of its maps into the source tree"]
fn writes_the_fixture() {
    begin!();
    let stand = Stand::new();
    let mut slipgate = stand.attach();
    stand.exchange();
    stand.exchange6();
    stand.ask();
    stand.connect_by_name();
    assert!(slipgate.stop().unwrap().success());

    let mut text = format!("now_ns {}\n", monotonic_ns());
    let mut maps: Vec<_> = fs::read_dir(stand.directory()).unwrap().flatten().collect();
    maps.sort_by_key(fs::DirEntry::file_name);
    for pin in maps {
        let name = pin.file_name().into_string().unwrap();
        if name.chars().any(|c| c.is_lowercase()) {
            continue; // a program or a link
        }
        let path = pin.path().display().to_string();
        let shown = bpftool(&["-j", "map", "show", "pinned", &path]);
        let shown: Value = serde_json::from_str(&shown).unwrap();
        if shown["type"] == "prog_array" {
            continue; // programs, which are the build's
        }
        writeln!(
            text,
            "map {name} {} {} {} {} {}",
            shown["type"].as_str().unwrap(),
            shown["bytes_key"],
            shown["bytes_value"],
            shown["max_entries"],
            shown["flags"]
        )
        .unwrap();
        let elements = bpftool(&["-j", "map", "dump", "pinned", &path]);
        let elements: Value = serde_json::from_str(&elements).unwrap();
        for element in elements.as_array().unwrap() {
            let (key, value) = (hex(&element["key"]), hex(&element["value"]));
            let value = value.trim_end_matches('0');
            // Of an array the rest is zero anyway.
            if !value.is_empty() || shown["type"] != "array" {
                let even = value.len() + value.len() % 2;
                writeln!(text, "{key} {value:0<even$}").unwrap();
            }
        }
    }
    fs::create_dir_all(fixture().parent().unwrap()).unwrap();
    fs::write(fixture(), text).unwrap();
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    pairs.map(byte).collect()
}

/// Pins the fixture's maps in a directory, with its times moved to this machine's.
fn pin(text: &str, directory: &Path) {
    let mut lines = text.lines();
    let then_ns = lines.next().unwrap().strip_prefix("now_ns ").unwrap();
    let later_ns = monotonic_ns().wrapping_sub(then_ns.parse().unwrap());
    let (mut batch, mut map, mut value_bytes) = (String::new(), "", 0);
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        if let ["map", name, kind, key, value, entries, flags] = words[..] {
            let path = directory.join(name);
            writeln!(
                batch,
                "map create {} type {kind} key {key} value {value} entries {entries} name {name} \
                 flags {flags}",
                path.display()
            )
            .unwrap();
            (map, value_bytes) = (name, value.parse().unwrap());
            continue;
        }
        let mut value = bytes_of(words[1]);
        value.resize(value_bytes, 0);
        for offset in times_in(map) {
            let time = &mut value[*offset..offset + 8];
            let there = u64::from_ne_bytes(time.try_into().unwrap());
            if there != 0 {
                time.copy_from_slice(&there.wrapping_add(later_ns).to_ne_bytes());
            }
        }
        let text = |bytes: &[u8]| {
            let all = bytes.iter().map(|byte| format!("{byte:02x}"));
            all.collect::<Vec<_>>().join(" ")
        };
        let (key, value) = (text(&bytes_of(words[0])), text(&value));
        let path = directory.join(map);
        writeln!(
            batch,
            "map update pinned {} key hex {key} value hex {value}",
            path.display()
        )
        .unwrap();
    }
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("batch");
    fs::write(&file, batch).unwrap();
    bpftool(&["batch", "file", &file.display().to_string()]);
}

#[test]
fn live_flows_in_maps_of_a_former_build_of_this_version_go_on() {
    begin!();
    let stand = Stand::new();
    let text = fs::read_to_string(fixture()).unwrap_or_else(|e| {
        panic!(
            "{}: {e}: run the ignored test `writes_the_fixture`",
            fixture().display()
        )
    });
    let directory = stand.directory();
    fs::create_dir_all(&directory).unwrap();
    pin(&text, &directory);

    let slipgate = stand.attach();
    assert!(
        slipgate.stderr().contains("of a predecessor"),
        "{}",
        slipgate.stderr()
    );
    for guest in ["10.0.2.15".to_owned(), format!("[{GUEST6}]")] {
        let before = flow_of_datagrams(&slipgate, &guest);
        assert_eq!((before.tx_packets, before.rx_packets), (1, 1));
        match guest.starts_with('[') {
            true => stand.exchange6(),
            false => stand.exchange(),
        }
        let after = flow_of_datagrams(&slipgate, &guest);
        assert_eq!((&after.id, &after.nat), (&before.id, &before.nat));
        assert_eq!((after.tx_packets, after.rx_packets), (2, 2));
    }
    // Addresses are open by names for which the guest asked the other slipgate.
    stand.connect_by_name();
    for name in [NAME, NAME6] {
        assert_eq!(stand.resolver.udp_queries(name), 0, "{name}");
    }
}
