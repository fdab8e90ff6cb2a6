//! `slipgate attach` from its first line to the last pin removed, in the testbed.
use std::{
    fs,
    net::{Ipv4Addr, SocketAddrV4},
    sync::Once,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Slipgate, World,
    clients::{dns, icmp, tcp},
    require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService},
    slipgate,
    world::{HOST, ROUTER, SERVER, UPLINK},
};

const WAIT: Duration = Duration::from_secs(5);
const MEGABYTE: u64 = 1_000_000;

/// The testbed is to run the binary that was built with this test.
fn this_build() {
    static ONCE: Once = Once::new();
    // SAFETY: every test of this file begins here and waits for the first; nothing else in the
    // process looks at the environment by then.
    ONCE.call_once(|| unsafe {
        std::env::set_var("SLIPGATE_BIN", env!("CARGO_BIN_EXE_slipgate"));
    });
}

struct Bed {
    guests: Vec<Guest>,
    server: TcpServer,
    slipgate: Slipgate,
    world: World,
}

impl Bed {
    /// A world, a server of streams, a guest on each of the TAPs, and slipgate with these flags.
    fn new(taps: &[&str], flags: &[&str]) -> Self {
        this_build();
        let world = World::new().unwrap();
        let server = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Streams).unwrap();
        let guests = taps
            .iter()
            .map(|tap| Guest::new(&world, GuestConfig::new(tap)).unwrap())
            .collect();
        let mut all: Vec<String> = vec!["--uplink".into(), UPLINK.into()];
        for tap in taps {
            all.extend(["--vm".into(), format!("name=vm-{tap},tap={tap}")]);
        }
        all.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let slipgate = Slipgate::attach(&world.host, &PinDir::new().unwrap(), &all).unwrap();
        Self {
            guests,
            server,
            slipgate,
            world,
        }
    }

    fn upload(&self, guest: usize, bytes: u64) {
        let server = self.server.address();
        self.guests[guest]
            .run(|| tcp::upload(server, bytes, 1, WAIT))
            .unwrap();
    }

    fn can_ping(&self, address: Ipv4Addr) -> bool {
        let ping = || icmp::ping(address, 1, 56, Duration::from_secs(1)).unwrap();
        !self.guests[0].run(ping).replies.is_empty()
    }

    /// Runs `slipgate ARGS`, which succeeds; what it wrote to stdout.
    fn run(&self, args: &[&str]) -> String {
        let output = self.slipgate.run(args).unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

fn status_field(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.and_then(|rest| rest.strip_prefix(':'))
        .unwrap()
        .trim()
        .to_owned()
}

/// The directory of the host's network namespace in /run. Processes that were killed leave theirs,
/// and inodes are given out again: it is the one with the newest control socket.
fn run_dir(bed: &Bed) -> std::path::PathBuf {
    let host = &bed.world.host;
    let namespace = host.run(|| fs::metadata("/proc/thread-self/ns/net"));
    let inode = std::os::unix::fs::MetadataExt::ino(&namespace.unwrap()).to_string();
    let dirs = fs::read_dir("/run/slipgate").unwrap();
    dirs.filter_map(|entry| {
        let dir = entry.ok()?.path();
        let ours = dir.file_name()?.to_string_lossy().starts_with(&inode);
        let socket = fs::metadata(dir.join("0.sock")).ok().filter(|_| ours)?;
        Some((socket.modified().unwrap(), dir))
    })
    .max()
    .expect("a directory with a control socket")
    .1
}

#[track_caller]
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + WAIT;
    while !done() {
        assert!(Instant::now() < until, "{what} did not happen in {WAIT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn without_dns_questions_are_refused_by_udp_and_tcp() {
    require_root_and_tun!();
    const REFUSED: u8 = 5;
    let mut bed = Bed::new(&["tap0"], &["--default", "deny", "--dns", "none"]);
    let lease = bed.guests[0].dhcp(WAIT).unwrap();
    let resolver = SocketAddrV4::new(lease.dns[0], 53);
    let udp = bed.guests[0].run(|| dns::query_udp(resolver, "example.com", WAIT));
    let tcp = bed.guests[0].run(|| dns::query_tcp(resolver, "example.com", WAIT));
    assert_eq!(udp.unwrap().reply.code, REFUSED);
    assert_eq!(tcp.unwrap().reply.code, REFUSED);
    assert!(bed.slipgate.stop().unwrap().success());
}

#[test]
fn sighup_opens_the_flow_log_again() {
    require_root_and_tun!();
    let name = format!("slipgate-flows-{}", std::process::id());
    let log = std::env::temp_dir().join(name);
    let moved = log.with_extension("1");
    let mut bed = Bed::new(&["tap0"], &["--flow-log", log.to_str().unwrap()]);
    bed.guests[0].dhcp(WAIT).unwrap();
    fs::rename(&log, &moved).unwrap();
    slipgate_testbed::signal(bed.slipgate.broker_pid(), libc::SIGHUP);
    eventually("a new flow log", || log.exists());
    bed.upload(0, MEGABYTE);
    assert!(bed.slipgate.stop().unwrap().success());
    let events = |file| -> Vec<String> {
        let text = fs::read_to_string(file).unwrap();
        let event = |line| {
            let record: serde_json::Value = serde_json::from_str(line).unwrap();
            record["event"].as_str().unwrap().to_owned()
        };
        text.lines().map(event).collect()
    };
    assert_eq!(events(&moved), [] as [&str; 0]);
    assert_eq!(events(&log), ["flow_start", "flow_end"]);
    fs::remove_file(&log).unwrap();
    fs::remove_file(&moved).unwrap();
}

#[test]
fn a_guest_is_served_and_nothing_is_left_behind() {
    require_root_and_tun!();
    let mut bed = Bed::new(&["tap0"], &["--dns", "198.18.0.1"]);
    let dns = DnsServer::start(
        &bed.world.net,
        (ROUTER, 53),
        [("example.com".to_owned(), Answer::a(SERVER, 60))].into(),
    )
    .unwrap();

    let lease = bed.guests[0].dhcp(WAIT).unwrap();
    assert_eq!(lease.address, Ipv4Addr::new(10, 0, 2, 15));
    assert_eq!(lease.dns, [Ipv4Addr::new(10, 0, 2, 3)]);
    let resolver = SocketAddrV4::new(lease.dns[0], 53);
    let ask = || dns::query_udp(resolver, "example.com", WAIT).unwrap();
    assert_eq!(bed.guests[0].run(ask).addresses(), [SERVER]);
    assert_eq!(dns.udp_queries("example.com"), 1);
    bed.upload(0, 10 * MEGABYTE);
    assert!(bed.can_ping(SERVER));

    let flows = bed.slipgate.flows().unwrap();
    let flow = flows.iter().find(|flow| flow.proto == "tcp").unwrap();
    assert_eq!(flow.remote, "203.0.113.10:7000");
    assert_eq!(
        (flow.vm.as_str(), flow.verdict.as_str()),
        ("vm-tap0", "fast")
    );
    assert!(flow.tx_bytes > 10 * MEGABYTE, "{flow:?}");
    let stats = bed.slipgate.stats().unwrap();
    let vm = &stats["vms"][0];
    assert_eq!(vm["dns_queries"], 1);
    assert!(
        vm["engine"]["from_guest"]["packets"].as_u64().unwrap() < 20,
        "{stats:#}"
    );

    let host = &bed.world.host;
    assert!(host.ifindex("sgport0").is_some());
    let run_dir = run_dir(&bed);
    assert!(
        bed.slipgate.stop().unwrap().success(),
        "{}",
        bed.slipgate.stderr()
    );
    assert_eq!(bed.slipgate.pins().pins(), Vec::<std::path::PathBuf>::new());
    assert!(!run_dir.exists(), "{run_dir:?}");
    assert!(host.ifindex("sgport0").is_none());
    assert!(host.ip("link show tap0").unwrap().contains("state DOWN"));
}

#[test]
fn the_engine_has_no_privileges() {
    require_root_and_tun!();
    let mut bed = Bed::new(&["tap0"], &[]);
    let engine = bed.slipgate.engine_pid().unwrap();
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status_field(engine, set), "0000000000000000", "{set}");
    }
    assert_eq!(status_field(engine, "Seccomp"), "2");
    assert_eq!(status_field(engine, "NoNewPrivs"), "1");
    // A user of its own, in all four.
    for ids in ["Uid", "Gid"] {
        let ids = status_field(engine, ids);
        let ids: Vec<u32> = ids.split('\t').map(|id| id.parse().unwrap()).collect();
        assert_eq!(ids, [ids[0]; 4]);
        assert!((0x7c00_0000..=0x7c00_ffff).contains(&ids[0]), "{ids:?}");
    }
    assert_eq!(status_field(engine, "Groups"), "");
    // It serves all the same.
    bed.upload(0, MEGABYTE);
}

#[test]
fn flows_outlive_slipgate_and_are_taken_over() {
    require_root_and_tun!();
    let mut bed = Bed::new(&["tap0"], &[]);
    let server = bed.server.address();
    let before = bed.guests[0].run(|| tcp::connect(server, WAIT)).unwrap();
    bed.slipgate.kill_both().unwrap();
    eventually("their end", || bed.slipgate.engine_pid().is_none());
    let new = bed.guests[0].run(|| tcp::connect_outcome(server, Duration::from_millis(300)));
    assert!(
        matches!(new.unwrap(), tcp::ConnectOutcome::TimedOut(_)),
        "a new flow got in without an engine"
    );
    assert!(
        bed.slipgate
            .flows()
            .unwrap()
            .iter()
            .any(|flow| flow.state == "established")
    );

    bed.slipgate = bed.slipgate.again().unwrap();
    let flows = bed.slipgate.flows().unwrap();
    let local = before.local_addr().unwrap().to_string();
    assert!(flows.iter().any(|flow| flow.guest == local), "{flows:?}");
    bed.upload(0, MEGABYTE);

    // The engine alone: the broker starts another one.
    let engine = bed.slipgate.kill_engine().unwrap();
    bed.upload(0, MEGABYTE);
    assert_ne!(bed.slipgate.engine_pid(), Some(engine));

    bed.slipgate.kill_broker().unwrap();
    eventually("the engine's end", || bed.slipgate.engine_pid().is_none());
    bed.slipgate = bed.slipgate.again().unwrap();
    bed.upload(0, MEGABYTE);
    assert!(bed.slipgate.stop().unwrap().success());
}

#[test]
fn guests_with_one_address_are_told_apart() {
    require_root_and_tun!();
    let bed = Bed::new(&["tap0", "tap1", "tap2"], &[]);
    std::thread::scope(|scope| {
        for guest in 0..3 {
            let bed = &bed;
            scope.spawn(move || bed.upload(guest, 5 * MEGABYTE));
        }
    });
    let flows = bed.slipgate.flows().unwrap();
    for tap in ["tap0", "tap1", "tap2"] {
        let vm = format!("vm-{tap}");
        let of_vm: Vec<_> = flows.iter().filter(|flow| flow.vm == vm).collect();
        assert_eq!(of_vm.len(), 1, "{flows:?}");
        assert!(of_vm[0].tx_bytes > 5 * MEGABYTE);
    }
}

#[test]
fn a_tap_that_comes_again_is_served_again() {
    require_root_and_tun!();
    let mut bed = Bed::new(&["tap0"], &[]);
    assert!(bed.can_ping(SERVER));
    bed.guests[0].unplug();
    eventually("the notice", || {
        bed.slipgate.stderr().contains("tap0 is gone")
    });
    bed.guests[0].plug().unwrap();
    eventually("the notice", || {
        bed.slipgate.stderr().contains("the TAP tap0 is there")
    });
    assert!(bed.can_ping(SERVER));
    bed.upload(0, MEGABYTE);
}

#[test]
fn forwarding_turned_on_for_all_is_turned_off_again() {
    require_root_and_tun!();
    let bed = Bed::new(&["tap0"], &[]);
    let forwards = |device: &str| {
        let path = format!("/proc/sys/net/ipv4/conf/{device}/forwarding");
        let read = bed.world.host.run(|| fs::read_to_string(&path));
        read.unwrap().trim() == "1"
    };
    bed.world
        .host
        .run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "0"))
        .unwrap();
    bed.world
        .host
        .run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1"))
        .unwrap();
    // The broker may have followed the kernel's notice by now.
    assert!(forwards(UPLINK), "it is on for every device");
    let until = Instant::now() + Duration::from_secs(15);
    while forwards("tap0") || forwards("sgport0") {
        assert!(Instant::now() < until, "the host still routes for the TAP");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(forwards(UPLINK), "nothing else is changed");
    bed.upload(0, MEGABYTE);
}

#[test]
fn why_and_stats_name_the_rule_that_refused() {
    require_root_and_tun!();
    let bed = Bed::new(&["tap0"], &["--deny", "203.0.113.10:7000/tcp"]);
    let server = bed.server.address();
    bed.guests[0].run(|| tcp::expect_refused(server)).unwrap();
    // The positive control: ping is not what the rule says.
    assert!(bed.can_ping(SERVER));
    let text = bed.run(&["why", "vm-tap0", "203.0.113.10:7000"]);
    assert!(text.starts_with("no: "), "{text}");
    let status = |to: &str| bed.slipgate.run(&["why", "vm-tap0", to]).unwrap().status;
    assert_eq!(status("203.0.113.10:7000").code(), Some(3));
    assert_eq!(status("203.0.113.10:7001").code(), Some(0));
    assert!(
        text.contains("refused by rule 1, `--deny 203.0.113.10:7000/tcp`"),
        "{text}"
    );
    let text = bed.run(&["why", "vm-tap0", "203.0.113.10:7001"]);
    assert!(text.starts_with("yes: admitted"), "{text}");
    let stats = bed.slipgate.stats().unwrap();
    assert_eq!(stats["total"]["refused"]["rule"], 1, "{stats:#}");
}

#[test]
fn a_forward_leads_to_the_guest_from_the_world_and_from_the_host() {
    require_root_and_tun!();
    let bed = Bed::new(&["tap0"], &["--forward", "tcp:8080:7000"]);
    let guest = &bed.guests[0];
    let inside = (guest.config().address, 7000);
    let service = TcpServer::start(&guest.ns, inside, TcpService::Streams).unwrap();
    // The guest has not sent anything: its MAC is asked for, a second later at most.
    let at = |address| SocketAddrV4::new(address, 8080);
    bed.world
        .net
        .run(|| tcp::upload(at(HOST), MEGABYTE, 1, WAIT))
        .unwrap();
    assert_eq!(service.accepted(), 1);
    for address in [Ipv4Addr::LOCALHOST, HOST] {
        bed.world
            .host
            .run(|| tcp::upload(at(address), MEGABYTE, 1, WAIT))
            .unwrap();
    }
    assert_eq!(service.accepted(), 3);
    let flows = bed.slipgate.flows().unwrap();
    let from_world: Vec<_> = flows
        .iter()
        .filter(|flow| flow.guest == "10.0.2.15:7000" && flow.path == "kernel")
        .collect();
    assert_eq!(
        from_world.len(),
        1,
        "the host's own go by the relay: {flows:?}"
    );
    assert_eq!(from_world[0].rule, "--forward tcp:8080:7000");

    // The port is taken, and it is known by whom.
    let pins = bed.slipgate.pins();
    let second = Guest::new(&bed.world, GuestConfig::new("tap9")).unwrap();
    let flags = [
        "attach",
        "--tap",
        second.tap(),
        "--forward",
        "tcp:8080:80",
        "--uplink",
        UPLINK,
    ];
    let said = slipgate::run(&bed.world.host, pins, &flags)
        .unwrap_err()
        .to_string();
    let by = format!("taken by slipgate (process {})", bed.slipgate.broker_pid());
    assert!(said.contains(&by), "{said}");
    assert!(!said.contains("--mode auto"), "{said}");
}

#[test]
fn what_is_no_tap_is_left_alone() {
    require_root_and_tun!();
    this_build();
    let world = World::new().unwrap();
    let pins = PinDir::new().unwrap();
    for (flags, parts) in [
        (
            ["--tap", UPLINK],
            ["it is a veth device, not a TAP", "--tap"],
        ),
        (["--tap", "lo"], ["it is the loopback device", "not a TAP"]),
        (["--tap", "sgport0"], ["--tap sgport0", "own devices"]),
    ] {
        let args = ["attach", flags[0], flags[1]];
        let said = slipgate::run(&world.host, &pins, &args);
        let said = said.unwrap_err().to_string();
        for part in parts {
            assert!(said.contains(part), "{said}");
        }
        assert!(!said.contains("--mode auto"), "{said}");
    }
    let link = world.host.ip(&format!("link show {UPLINK}")).unwrap();
    assert!(link.contains("state UP"), "{link}");
}

#[test]
fn after_a_killed_broker_why_says_one_thing() {
    require_root_and_tun!();
    let mut bed = Bed::new(&["tap0"], &[]);
    let why = |bed: &Bed| {
        let asked = bed.slipgate.run(&["why", "nope", "203.0.113.10:80"]);
        asked.unwrap_err().to_string()
    };
    let said = why(&bed);
    assert!(
        said.contains("no VM \"nope\" is served; there is vm-tap0"),
        "{said}"
    );
    bed.slipgate.kill_broker().unwrap();
    eventually("the engine's end", || bed.slipgate.engine_pid().is_none());
    let said = why(&bed);
    assert!(said.contains("no slipgate runs"), "{said}");
    assert!(
        !said.contains("refused") && !said.contains("nope\" is"),
        "{said}"
    );
}

#[test]
fn kept_flows_are_there_for_the_next() {
    require_root_and_tun!();
    let mut bed = Bed::new(&["tap0"], &["--on-exit", "keep"]);
    let server = bed.server.address();
    let stream = bed.guests[0].run(|| tcp::connect(server, WAIT)).unwrap();
    assert!(bed.slipgate.stop().unwrap().success());
    let local = stream.local_addr().unwrap().to_string();
    let has = |bed: &Bed| {
        bed.slipgate
            .flows()
            .unwrap()
            .iter()
            .any(|f| f.guest == local)
    };
    assert!(has(&bed), "{:?}", bed.slipgate.flows());
    bed.slipgate = bed.slipgate.again().unwrap();
    assert!(has(&bed));
    bed.upload(0, MEGABYTE);
}
