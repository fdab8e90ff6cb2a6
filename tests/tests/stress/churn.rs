//! A daemon whose VMs, policies and forwards come and go through the API, 50 changes a second, while
//! VMs that stay talk, those that come and go talk as long as they may, and its engine is killed.

mod changes;
mod left_over;

use std::{
    net::{IpAddr, Ipv6Addr},
    ops::Range,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Capture, Captured, Direction, Guest, GuestConfig, NetNs, PinDir, Slipgate, World,
    accounting::{FlowCounts, FlowKey},
    clients::{
        api::{ApiAnswer, ApiClient},
        tcp,
        tcp::EchoSession,
        udp::PacedReport,
    },
    impairment::SplitMix64,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::UPLINK,
};

use self::{
    changes::{Clients, FORWARDED, POLICIES, SERVERS, WITH_TAP},
    left_over::{
        Footprint, assert_as_before, assert_ports_free, assert_tables_empty, assert_taps_bare,
        footprint, kept_files, rows,
    },
};
use super::{
    BOTH_HOSTS, BOTH_SERVERS, at, below,
    books::FlowBooks,
    eventually, in_turn, knob, random,
    scene::{Record, assert_empty, maps, records_of, roomy_guest},
    traffic::{Churn, Stream, expect_whole, paced},
};

/// VMs that stay, which are also their TAPs' names.
const FIXED: [&str; 2] = ["f0", "f1"];
/// Patience of those whose connections may be refused or cut.
const BRIEFLY: Duration = Duration::from_millis(300);

/// A daemon with its API; fields go in order.
struct Stand {
    daemon: Slipgate,
    workers: usize,
    api: ApiClient,
    world: World,
    pins: PinDir,
    scratch: tempfile::TempDir,
}

impl Stand {
    fn new(workers: usize) -> Self {
        let world = World::new().unwrap();
        world.give_ipv6().unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name).display().to_string();
        let (api, log) = (path("api.sock"), path("flows.jsonl"));
        let args = ["--uplink", UPLINK, "--api", &api, "--flow-log", &log];
        let args = [&args[..], &["--ipv6", "nat"]].concat();
        let number = workers.to_string();
        let args = [&args[..], &["--on-exit", "detach", "--workers", &number]].concat();
        let pins = PinDir::new().unwrap();
        let daemon = Slipgate::serve(&world.host, &pins, &args).unwrap();
        let api = ApiClient::connect(api.as_ref()).unwrap();
        Self {
            daemon,
            workers,
            api,
            world,
            pins,
            scratch,
        }
    }

    fn ask(&mut self, method: &str, path: &str, body: &str) -> ApiAnswer {
        self.api.ask(method, path, body).unwrap()
    }

    fn socket(&self) -> PathBuf {
        self.scratch.path().join("api.sock")
    }

    fn records(&self) -> Vec<Record> {
        records_of(&self.scratch.path().join("flows.jsonl"))
    }

    /// Kills one of the engines, if one runs. Another one is started.
    fn kill_engine(&self, random: &mut SplitMix64) {
        let engines = self.daemon.children_named("slipgate-engine");
        if !engines.is_empty() {
            let victim = below(random, engines.len() as u64) as usize;
            slipgate_testbed::signal(engines[victim], libc::SIGKILL);
        }
    }

    /// Waits until all processes run; returns the resources that they hold.
    fn footprint(&self) -> Footprint {
        let running = || self.daemon.children_named("slipgate-engine").len();
        eventually("all engines", || running() == self.workers);
        footprint(&self.daemon)
    }
}

/// A VM that stays, and its traffic.
struct Fixed {
    name: &'static str,
    guest: Guest,
    tap: Capture,
    servers: Range<u16>,
    _servers: (TcpServer<IpAddr>, TcpServer<IpAddr>, UdpServer<IpAddr>),
    streams: [Stream; 2],
    connections: Churn,
    datagrams: JoinHandle<PacedReport>,
}

/// Independent counts of a fixed VM's flows.
struct Counted {
    name: &'static str,
    servers: Range<u16>,
    from_guest: FlowCounts,
    into_guest: FlowCounts,
    stats: serde_json::Value,
}

impl Fixed {
    fn start(stand: &mut Stand, index: usize, span: Duration) -> Self {
        let name = FIXED[index];
        let guest = roomy_guest(&stand.world, GuestConfig::new(name));
        let body = format!("{{\"tap\": \"{name}\"}}");
        let answer = stand.ask("PUT", &format!("/v1/vms/{name}"), &body);
        assert_eq!(answer.status, 201, "{answer:?}");
        let tap = Capture::start(&stand.world.host, name).unwrap();
        let first = 7_000 + 10 * index as u16;
        let net = &stand.world.net;
        // One of them talks by IPv4, the other by IPv6.
        let server = BOTH_SERVERS[index];
        let echo = TcpServer::start(net, (server, first), TcpService::Echo).unwrap();
        let close = TcpServer::start(net, (server, first + 1), TcpService::Close).unwrap();
        let udp = UdpServer::start(net, (server, first + 2), UdpService::Echo).unwrap();
        let pause = Duration::from_millis;
        let streams = [
            Stream::start(&guest, echo.address(), 64 << 10, pause(20)),
            Stream::start(&guest, echo.address(), 100, pause(5)),
        ];
        let datagrams = paced(&guest, udp.address(), span, pause(5));
        let connections = Churn::start(&guest, close.address(), pause(50));
        Self {
            name,
            guest,
            tap,
            servers: first..first + 3,
            _servers: (echo, close, udp),
            streams,
            connections,
            datagrams,
        }
    }

    fn expect_progress(&self) {
        self.streams.iter().for_each(Stream::expect_progress);
    }

    /// Ends the traffic, of which nothing was lost, cut or changed.
    fn finish(self, stand: &mut Stand) -> Counted {
        expect_whole(&self.datagrams.join().unwrap());
        self.streams.into_iter().for_each(Stream::finish);
        let connections = self.connections.finish(&[]);
        println!("{}: {connections} connections came and went", self.name);
        let frames = || [Direction::Out, Direction::In].map(|way| self.guest.moved(way).frames);
        let mut before = frames();
        eventually("quiet", || {
            std::thread::sleep(Duration::from_millis(500));
            let now = frames();
            now == std::mem::replace(&mut before, now)
        });
        let stats = stand.daemon.stats().unwrap();
        let of_all = stats["vms"].as_array().unwrap();
        let ours = of_all.iter().find(|vm| vm["vm"] == self.name);
        let answer = stand.ask("DELETE", &format!("/v1/vms/{}", self.name), "");
        assert_eq!(answer.status, 204, "{answer:?}");
        Counted {
            name: self.name,
            servers: self.servers,
            from_guest: self.tap.finish().unwrap().received,
            into_guest: self.guest.flows(Direction::In),
            stats: ours.unwrap().clone(),
        }
    }
}

impl Counted {
    /// Returns the disagreements of the counts with the flow log and the uplink, as text.
    fn disagreements(&self, records: &[Record], uplink: &Captured, kills: u64) -> String {
        let ours = records.iter().filter(|record| record.vm == self.name);
        let is_server = |port: u16| self.servers.contains(&port);
        let of_ours = |counts: &FlowCounts| {
            let mut counts = counts.clone();
            let is_ours =
                |key: &FlowKey| is_server(key.source.port()) || is_server(key.destination.port());
            counts.flows.retain(|key, _| is_ours(key));
            counts.resets.retain(|key, _| is_ours(key));
            counts
        };
        let uplink = Captured {
            received: of_ours(&uplink.received),
            sent: of_ours(&uplink.sent),
            missed: 0,
        };
        // A SYN that was sent twice may come when the connection has been closed.
        let is_of_stream = |key: &&FlowKey| {
            [key.source.port(), key.destination.port()].contains(&self.servers.start)
        };
        for resets in [&uplink.received.resets, &uplink.sent.resets] {
            assert_eq!(resets.keys().find(is_of_stream), None);
        }
        let books = FlowBooks {
            records: &ours.cloned().collect::<Vec<_>>(),
            uplink: &uplink,
            from_guest: &self.from_guest,
            into_guest: &self.into_guest,
            stats: &self.stats,
            late_copies: false,
            kills,
        };
        books.disagreements()
    }
}

/// Connections one after another, each of which may be refused or cut at any moment. What arrives
/// must be right.
struct Talk {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Talk {
    fn start(from: &NetNs, to: IpAddr, ports: Range<u16>, seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = stop.clone();
        let mut random = SplitMix64(seed);
        let thread = from.thread("talk", move || {
            let mut rounds = 0;
            while !theirs.load(SeqCst) {
                let port = ports.start + below(&mut random, ports.len() as u64) as u16;
                if let Ok(mut stream) = tcp::connect(at(to, port), BRIEFLY) {
                    let mut session = EchoSession::new(&mut stream);
                    for _ in 0..10 {
                        match session.round(2_000) {
                            Ok(_) => rounds += 1,
                            Err(error) => {
                                let error = error.to_string();
                                assert!(!error.contains("not what was sent"), "{error}");
                                break;
                            }
                        }
                        std::thread::sleep(Duration::from_millis(20));
                    }
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            rounds
        });
        Self { stop, thread }
    }

    /// Ends it. Returns how often bytes went there and back.
    fn finish(self) -> u64 {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap()
    }
}

#[test]
fn vms_policies_and_forwards_come_and_go_and_no_other_vm_is_harmed() {
    begin!();
    come_and_go(1);
}

#[test]
fn vms_policies_and_forwards_come_and_go_with_several_engines() {
    begin!();
    come_and_go(2);
}

/// The whole story, with so many engines.
fn come_and_go(workers: usize) {
    let mut random = random();
    let span = Duration::from_secs(knob("SLIPGATE_STRESS_CHURN", 12));
    let mut stand = Stand::new(workers);
    let run_dir = stand.daemon.run_dir().unwrap();
    let uplink = Capture::start(&stand.world.host, UPLINK).unwrap();
    for policy in POLICIES {
        let path = format!("/v1/policies/{policy}");
        assert_eq!(stand.ask("PUT", &path, "default = \"allow\"\n").status, 200);
    }
    let fixed = [0, 1].map(|index| Fixed::start(&mut stand, index, span));
    let guests: Vec<Guest> = (0..WITH_TAP)
        .map(|vm| roomy_guest(&stand.world, GuestConfig::new(&changes::name(vm))))
        .collect();
    let echo = |ns: &NetNs, at| TcpServer::start(ns, at, TcpService::Echo).unwrap();
    let any = IpAddr::from(Ipv6Addr::UNSPECIFIED);
    let _in_guests: Vec<_> = guests.iter().map(|it| echo(&it.ns, (any, 80))).collect();
    let _in_world: Vec<_> = SERVERS
        .flat_map(|port| BOTH_SERVERS.map(|ip| echo(&stand.world.net, (ip, port))))
        .collect();
    let settled = stand.footprint();

    let began = Instant::now();
    let clients = Clients::start(&stand.socket(), span, &mut random);
    let mut outbound = Vec::new();
    for (number, guest) in guests.iter().enumerate() {
        let server = *in_turn(&BOTH_SERVERS, number);
        outbound.push(Talk::start(&guest.ns, server, SERVERS, random.next()));
    }
    let inbound =
        BOTH_HOSTS.map(|host| Talk::start(&stand.world.net, host, FORWARDED, random.next()));
    let mut kills = 0;
    loop {
        let next = Instant::now() + Duration::from_millis(1_000 + below(&mut random, 2_000));
        while !clients.are_done() && Instant::now() < next {
            std::thread::sleep(Duration::from_millis(20));
        }
        if clients.are_done() {
            break;
        }
        stand.kill_engine(&mut random);
        kills += 1;
        fixed.iter().for_each(Fixed::expect_progress);
    }
    let (tally, took) = (clients.finish(), began.elapsed());
    let per_second = tally.changes() as f64 / took.as_secs_f64();
    println!(
        "{kills} engines killed; {per_second:.1} changes a second: {:?}",
        tally.made
    );
    println!("refused: {:?}", tally.refused);
    let [p50, p99, all] = [50, 99, 100].map(|percent| tally.percentile(percent));
    println!("answered within {p50:?} (p50), {p99:?} (p99), {all:?} (all)");
    assert_eq!(tally.unexpected, Vec::<String>::new());
    assert!(took < 4 * span, "{took:?}");
    let outbound: Vec<u64> = outbound.into_iter().map(Talk::finish).collect();
    let inbound = inbound.map(Talk::finish);
    println!("rounds of the VMs that came and went: {outbound:?}, by forwards {inbound:?}");
    assert!(outbound.iter().chain(&inbound).all(|rounds| *rounds > 0));

    // What came is removed, and leaves nothing.
    let vms = stand.ask("GET", "/v1/vms", "").body;
    let vms: Vec<serde_json::Value> = serde_json::from_str(&vms).unwrap();
    for vm in vms {
        let name = vm["name"].as_str().unwrap().to_owned();
        if !FIXED.contains(&name.as_str()) {
            let answer = stand.ask("DELETE", &format!("/v1/vms/{name}"), "");
            assert_eq!(answer.status, 204, "{name}: {answer:?}");
        }
    }
    let maps = maps(&stand.world, &stand.pins);
    assert_eq!(rows(&maps), FIXED);
    let taps: Vec<String> = (0..WITH_TAP).map(changes::name).collect();
    assert_taps_bare(&stand.world, &taps);
    assert_ports_free(&stand.world, FORWARDED);
    let policies = POLICIES.map(|name| format!("{name}.toml"));
    let vms = FIXED.map(|name| format!("{name}.json"));
    let mut files = [vms.to_vec(), policies.to_vec()].concat();
    files.sort();
    assert_eq!(kept_files(&run_dir), files);
    assert_as_before(&settled, &stand.footprint());

    let counted = fixed.map(|fixed| fixed.finish(&mut stand));
    assert_tables_empty(&maps);
    let status = stand.daemon.stop().unwrap();
    assert!(status.success(), "{status}");
    assert_eq!(stand.pins.pins(), Vec::<PathBuf>::new());
    assert!(!run_dir.exists(), "{}", run_dir.display());
    assert_empty(&maps);
    let (uplink, records) = (uplink.finish().unwrap(), stand.records());
    for vm in &counted {
        let wrong = vm.disagreements(&records, &uplink, kills);
        assert!(wrong.is_empty(), "{}:\n{wrong}\n{:#}", vm.name, vm.stats);
    }
}
