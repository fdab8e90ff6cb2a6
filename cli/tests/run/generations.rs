//! A machine that is saved, killed and restored on the same TAP, whose VM another process serves all the
//! while: what becomes of its connections.
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead as _, BufReader, PipeReader, PipeWriter, pipe},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    sync::{atomic::AtomicBool, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, SystemTime},
};

use slipgate_testbed::{
    Capture, CapturedFrame, NetNs, Slipgate, builtin_guest,
    frame::Packet,
    require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService},
    skipped,
    world::{SERVER, UPLINK},
};
use slipgate_vmm::{
    Control, Devices, Machine, MachineConfig, Origin, Outcome, SerialIo, SnapshotFiles, StopHandle,
    ThreadSetup,
    boot::{BootSource, Kernel},
    virtio::net::NetConfig,
};

use crate::{Bed, eventually};

const TAP: &str = "vm0";
/// The TAP of a clone, which is another VM.
const CLONES_TAP: &str = "vm1";
const CONNECTIONS: u64 = 64;
/// Time after which nobody was told at once, on a machine that does other things too. An end that is told
/// nothing waits for seconds at least.
const AT_ONCE: Duration = Duration::from_secs(1);
/// A RST among the flags of a TCP header.
const RST: u8 = 4;

/// A machine of the VMM's library, on the TAP.
struct Running {
    control: Control,
    stop: StopHandle,
    thread: JoinHandle<Outcome>,
    printed: JoinHandle<Vec<Line>>,
    _typed: PipeWriter,
}

/// A line of the guest's console, and when it came.
struct Line {
    at: SystemTime,
    text: String,
}

/// How a guest ended, and what it said.
struct End {
    outcome: Outcome,
    lines: Vec<Line>,
}

impl End {
    fn text(&self) -> String {
        let texts: Vec<_> = self.lines.iter().map(|line| line.text.as_str()).collect();
        texts.join("\n")
    }

    /// The workload's line, and when it came.
    fn workload(&self) -> (SystemTime, serde_json::Value) {
        let mut lines = self.lines.iter().filter_map(|line| {
            let said: serde_json::Value = serde_json::from_str(&line.text).ok()?;
            said["workload"].is_string().then_some((line.at, said))
        });
        let said = lines.next();
        said.unwrap_or_else(|| panic!("{:?}: {}", self.outcome, self.text()))
    }
}

impl Running {
    fn start(host: &NetNs, tap: &str, origin: Origin) -> Self {
        let (input, typed) = pipe().unwrap();
        let (printed, output) = pipe().unwrap();
        let kvm = File::options().read(true).write(true).open("/dev/kvm");
        let queue = host.run(|| queue(tap));
        let machine = Machine::new(MachineConfig {
            template: slipgate_vmm::cpuid::Template::Host,
            huge_pages: false,
            cpus: 1,
            memory_bytes: 64 << 20,
            origin,
            devices: Devices {
                net: Some(NetConfig::new([0x02, 0, 0, 0, 0, 2], 1500, vec![queue])),
                disks: Vec::new(),
                vsock: None,
                balloon: None,
                serial: SerialIo {
                    input: Some(input.into()),
                    output: output.into(),
                    limit_bytes: None,
                },
            },
            kvm: kvm.unwrap().into(),
            threads: ThreadSetup::new(|_| Ok(())),
        })
        .unwrap();
        Self {
            control: machine.control(),
            stop: machine.stop_handle().unwrap(),
            thread: thread::spawn(move || machine.run()),
            printed: thread::spawn(move || read(printed)),
            _typed: typed,
        }
    }

    /// Saves the machine and ends it, without a frame in between.
    fn save_and_kill(self, dir: &Path) {
        self.control.pause().unwrap();
        let file = |name| File::create_new(dir.join(name)).unwrap();
        let files = SnapshotFiles {
            state: file("state"),
            memory: file("memory"),
        };
        let wanted = AtomicBool::new(false);
        self.control.snapshot(&files, &wanted).unwrap();
        self.stop.stop();
        assert!(matches!(self.end().outcome, Outcome::Stopped));
    }

    fn end(self) -> End {
        End {
            outcome: self.thread.join().unwrap(),
            lines: self.printed.join().unwrap(),
        }
    }
}

fn read(printed: PipeReader) -> Vec<Line> {
    let lines = BufReader::new(printed).lines().map(|text| Line {
        at: SystemTime::now(),
        text: text.unwrap(),
    });
    lines.collect()
}

/// Opens the TAP, which is there. Who had it before may have ended a moment ago: the kernel closes the
/// descriptors of an io_uring later.
fn queue(tap: &str) -> OwnedFd {
    let mut opened = None;
    eventually("the TAP is free", || {
        opened = try_queue(tap);
        opened.is_some()
    });
    opened.unwrap()
}

fn try_queue(tap: &str) -> Option<OwnedFd> {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    let queue = File::options().read(true).write(true).open("/dev/net/tun");
    let queue = queue.unwrap();
    // SAFETY: an ifreq is plain data, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(tap.bytes()) {
        *to = from as _;
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes an ifreq.
    let set = unsafe { libc::ioctl(queue.as_raw_fd(), TUNSETIFF, &raw mut request) };
    if set != 0 {
        let error = std::io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY), "{error}");
        return None;
    }
    Some(queue.into())
}

/// A saved machine with live connections, and what serves them.
struct Saved {
    slipgate: Slipgate,
    servers: TcpServer,
    dir: tempfile::TempDir,
    bed: Bed,
}

impl Saved {
    /// Streams of all kinds. `None`: the guest's image is not there.
    fn streams() -> Option<Self> {
        let work = format!("stream {SERVER}:7000 4000000 mixed x{CONNECTIONS}");
        Self::new(TcpService::Streams, &work)
    }

    /// `None`: the guest's image is not there. Its workload connects to port 7000.
    fn new(service: TcpService, work: &str) -> Option<Self> {
        // The path fails for no other reason.
        let image = File::open(builtin_guest::image().ok()?).unwrap();
        let bed = Bed::new();
        let host = &bed.world.host;
        for tap in [TAP, CLONES_TAP] {
            host.ip(&format!("tuntap add dev {tap} mode tap vnet_hdr"))
                .unwrap();
        }
        // The servers send all that a guest has room for at once. What lies there unread is lost with the
        // machine, and an RST behind it is none that the guest accepts.
        let route = "198.18.0.0/24 dev w0 proto kernel scope link src 198.18.0.1 initcwnd 100";
        bed.world.net.ip(&format!("route change {route}")).unwrap();
        let servers = TcpServer::start(&bed.world.net, (SERVER, 7000), service).unwrap();
        let [vm, clone] = [("vm", TAP), ("clone", CLONES_TAP)]
            .map(|(name, tap)| format!("name={name},tap={tap}"));
        let flags = ["--uplink", UPLINK, "--vm", &vm, "--vm", &clone];
        let slipgate = Slipgate::attach(host, &bed.pins, &flags).unwrap();
        let vm = Running::start(
            host,
            TAP,
            Origin::Boot(BootSource {
                kernel: Kernel::File(image),
                initrd: None,
                cmdline: work.to_owned(),
            }),
        );
        eventually("all are connected", || servers.accepted() == CONNECTIONS);
        let dir = tempfile::tempdir().unwrap();
        vm.save_and_kill(dir.path());
        let live = slipgate.flows().unwrap().len() as u64;
        assert_eq!(live, CONNECTIONS, "some had ended before it was saved");
        Some(Self {
            slipgate,
            servers,
            dir,
            bed,
        })
    }

    fn restore(&self, tap: &str) -> Running {
        let file = |name| File::open(self.dir.path().join(name)).unwrap();
        let origin = Origin::Snapshot {
            state: file("state"),
            memory: file("memory"),
            bases: Vec::new(),
        };
        Running::start(&self.bed.world.host, tap, origin)
    }
}

/// The segment of a frame on a guest's link: whether it goes to the guest, the guest's port, and the flags.
fn segment(frame: &CapturedFrame) -> Option<(bool, u16, u8)> {
    let packet = Packet::parse_ethernet(&frame.bytes)?;
    if packet.protocol != 6 {
        return None;
    }
    let guest = match frame.sent {
        true => packet.destination,
        false => packet.source,
    };
    // Behind the Ethernet header.
    let flags = *frame.bytes.get(14 + packet.header_len + 13)?;
    Some((frame.sent, guest.port(), flags))
}

/// For each of the guest's ports the time of the first frame that is one of these.
fn first_of(
    frames: &[CapturedFrame],
    is_one: impl Fn(bool, u8) -> bool,
) -> BTreeMap<u16, SystemTime> {
    let mut first = BTreeMap::new();
    for frame in frames {
        if let Some((to_guest, port, flags)) = segment(frame)
            && is_one(to_guest, flags)
        {
            first.entry(port).or_insert(frame.at);
        }
    }
    first
}

/// For each of so many connections the time of the first RST to the guest.
fn resets_in(link: &Capture, connections: u64) -> BTreeMap<u16, SystemTime> {
    let mut resets = BTreeMap::new();
    eventually("a RST for each connection was captured", || {
        resets = first_of(&link.frames(), |to_guest, flags| {
            to_guest && flags & RST != 0
        });
        resets.len() as u64 >= connections
    });
    resets
}

/// Time from one moment to another; none where the other was before.
fn between(from: SystemTime, to: SystemTime) -> Duration {
    to.duration_since(from).unwrap_or_default()
}

/// Prints the median, the 99th percentile and the longest of these times, and returns the last.
fn told(who: &str, mut times: Vec<Duration>) -> Duration {
    times.sort();
    let last = times.len() - 1;
    let [p50, p99] = [50, 99].map(|percent| times[last * percent / 100]);
    println!(
        "{who}: {} times, p50 {p50:.1?}, p99 {p99:.1?}, at most {:.1?}",
        times.len(),
        times[last]
    );
    times[last]
}

#[test]
fn connections_of_a_machine_that_is_restored_on_its_tap_go_on() {
    require_root_and_tun!();
    require_kvm!();
    let Some(saved) = Saved::streams() else {
        return skipped!("it needs target/guest/slipgate-guest: cargo xtask build");
    };
    // For some time nobody answers the servers.
    thread::sleep(Duration::from_secs(5));
    let end = saved.restore(TAP).end();
    let (_, said) = end.workload();
    // The guest checks each byte that it gets, and the servers each that they get.
    assert!(
        matches!(end.outcome, Outcome::GuestExit(0)),
        "{}",
        end.text()
    );
    assert_eq!(said["done"], CONNECTIONS, "{said}");
    // A third has 4,096 bytes at the end.
    let idle = CONNECTIONS / 3;
    let bytes = (CONNECTIONS - idle) * 4_000_000 + idle * 4096;
    assert_eq!(said["bytes"], bytes, "{said}");
}

#[test]
fn connections_of_the_former_generation_end_at_both_ends_at_once() {
    require_root_and_tun!();
    require_kvm!();
    let Some(saved) = Saved::streams() else {
        return skipped!("it needs target/guest/slipgate-guest: cargo xtask build");
    };
    let restored = saved.restore(TAP);
    // So that it is not the time that its streams take which counts.
    restored.control.pause().unwrap();
    let link = Capture::keeping(&saved.bed.world.host, TAP).unwrap();
    let (done, is_done) = mpsc::channel::<()>();
    let (ordered, resumed, end, servers) = thread::scope(|scope| {
        let servers = &saved.servers;
        let watched = scope.spawn(move || ends_of(servers, &is_done));
        let ordered = SystemTime::now();
        let said = saved.slipgate.run(&["generation", "vm"]).unwrap();
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(
            said.contains(&format!("ended {CONNECTIONS} flows")),
            "{said}"
        );
        let resumed = SystemTime::now();
        restored.control.resume().unwrap();
        let end = restored.end();
        drop(done);
        (ordered, resumed, end, watched.join().unwrap())
    });
    // Idle ones, too, which the guest would not have used for long.
    let (said_at, said) = end.workload();
    assert_eq!(said["failures"]["reset"], CONNECTIONS, "{said}");
    assert!(
        matches!(end.outcome, Outcome::GuestExit(1)),
        "{}",
        end.text()
    );
    eventually("the servers have noticed", || saved.servers.open() == 0);

    // Told by the order, too: it goes on with them in its queue.
    let resets: Vec<_> = resets_in(&link, CONNECTIONS).into_values().collect();
    let since = |from| resets.iter().map(|at| between(from, *at)).collect();
    told("order to a RST on the guest's link", since(ordered));
    let resets = told("resume to a RST on the guest's link", since(resumed));
    let said_after = between(resumed, said_at);
    println!("resume to the guest's line that all were reset: {said_after:.1?}");
    // The servers are told by the order, before the guest goes on.
    assert_eq!(servers.len() as u64, CONNECTIONS, "not noticed in time");
    let after_order = servers.iter().map(|at| between(ordered, *at)).collect();
    let after_order = told("order to a server's end", after_order);
    told(
        "resume to a server's end",
        servers.iter().map(|at| between(resumed, *at)).collect(),
    );
    // Without being told an end would wait for minutes.
    let most = 10 * AT_ONCE;
    assert!(
        resets < most && said_after < most,
        "{resets:?}, {said_after:?}"
    );
    assert!(after_order < most, "{after_order:?}");
}

/// Watches how the connections of servers end, until `is_done` has no sender and a moment longer. Returns
/// when each did.
fn ends_of(servers: &TcpServer, is_done: &mpsc::Receiver<()>) -> Vec<SystemTime> {
    let mut ends = Vec::new();
    let mut open = servers.open();
    let mut over = None;
    while open > 0 && over.is_none_or(|over| between(over, SystemTime::now()) < AT_ONCE) {
        thread::sleep(Duration::from_micros(200));
        let now = servers.open();
        ends.extend(std::iter::repeat_n(SystemTime::now(), open - now));
        open = now;
        if over.is_none() && is_done.try_recv() == Err(mpsc::TryRecvError::Disconnected) {
            over = Some(SystemTime::now());
        }
    }
    ends
}

/// A clone is another VM, which has none of the original's flows.
#[test]
fn a_clones_old_connections_are_each_reset_at_the_first_segment() {
    require_root_and_tun!();
    require_kvm!();
    let work = format!("rr {SERVER}:7000 10000000 x{CONNECTIONS}");
    let Some(saved) = Saved::new(TcpService::Echo, &work) else {
        return skipped!("it needs target/guest/slipgate-guest: cargo xtask build");
    };
    let link = Capture::keeping(&saved.bed.world.host, CLONES_TAP).unwrap();
    let end = saved.restore(CLONES_TAP).end();
    let (_, said) = end.workload();
    // A guest that waits for an answer has nothing to send, and so does not use its connection.
    let resets = said["failures"]["reset"].as_u64().unwrap();
    assert!(resets > 0, "{said}");
    let resets = resets_in(&link, resets);
    // One that it gives up ends with a RST of its own, which has no answer.
    let used = first_of(&link.frames(), |to_guest, flags| {
        !to_guest && flags & RST == 0
    });
    let ports = |times: &BTreeMap<u16, SystemTime>| times.keys().copied().collect::<Vec<_>>();
    assert_eq!(
        ports(&used),
        ports(&resets),
        "each that was used, and no other"
    );
    let times = used.iter().map(|(port, at)| between(*at, resets[port]));
    let longest = told(
        "a stale connection's first segment to its RST",
        times.collect(),
    );
    assert!(longest < AT_ONCE, "{longest:?}");
    // The original's flows are another VM's, and go on.
    let flows = saved.slipgate.flows().unwrap();
    let of_original = flows.iter().filter(|flow| flow.vm == "vm").count();
    assert_eq!(of_original as u64, CONNECTIONS);
}
