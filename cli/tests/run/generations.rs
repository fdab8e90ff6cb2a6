//! A machine that is saved, killed and restored on the same TAP, whose VM another process serves all the
//! while: what becomes of its connections.
use std::{
    fs::File,
    io::{PipeReader, PipeWriter, Read as _, pipe},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    sync::atomic::AtomicBool,
    thread::{self, JoinHandle},
};

use slipgate_testbed::{
    NetNs, Slipgate, builtin_guest, require_kvm, require_root_and_tun,
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
const CONNECTIONS: u64 = 64;

/// A machine of the VMM's library, on the TAP.
struct Running {
    control: Control,
    stop: StopHandle,
    thread: JoinHandle<Outcome>,
    printed: JoinHandle<String>,
    _typed: PipeWriter,
}

/// How a guest ended, and what it said.
struct End {
    outcome: Outcome,
    text: String,
}

impl Running {
    fn start(host: &NetNs, origin: Origin) -> Self {
        let (input, typed) = pipe().unwrap();
        let (printed, output) = pipe().unwrap();
        let kvm = File::options().read(true).write(true).open("/dev/kvm");
        let queue = host.run(queue);
        let machine = Machine::new(MachineConfig {
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
            text: self.printed.join().unwrap(),
        }
    }
}

fn read(mut printed: PipeReader) -> String {
    let mut text = String::new();
    printed.read_to_string(&mut text).unwrap();
    text
}

/// Opens the TAP, which is there. Who had it before may have ended a moment ago: the kernel closes the
/// descriptors of an io_uring later.
fn queue() -> OwnedFd {
    let mut opened = None;
    eventually("the TAP is free", || {
        opened = try_queue();
        opened.is_some()
    });
    opened.unwrap()
}

fn try_queue() -> Option<OwnedFd> {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    let queue = File::options().read(true).write(true).open("/dev/net/tun");
    let queue = queue.unwrap();
    // SAFETY: an ifreq is plain data, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(TAP.bytes()) {
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
    /// `None`: the guest's image is not there.
    fn new() -> Option<Self> {
        // The path fails for no other reason.
        let image = File::open(builtin_guest::image().ok()?).unwrap();
        let bed = Bed::new();
        let host = &bed.world.host;
        host.ip(&format!("tuntap add dev {TAP} mode tap vnet_hdr"))
            .unwrap();
        // The servers send all that a guest has room for at once. What lies there unread is lost with the
        // machine, and an RST behind it is none that the guest accepts.
        let route = "198.18.0.0/24 dev w0 proto kernel scope link src 198.18.0.1 initcwnd 100";
        bed.world.net.ip(&format!("route change {route}")).unwrap();
        let servers =
            TcpServer::start(&bed.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
        let vm = format!("name=vm,tap={TAP}");
        let flags = ["--uplink", UPLINK, "--vm", &vm];
        let slipgate = Slipgate::attach(host, &bed.pins, &flags).unwrap();
        let work = format!("stream {} 4000000 mixed x{CONNECTIONS}", servers.address());
        let vm = Running::start(
            host,
            Origin::Boot(BootSource {
                kernel: Kernel::File(image),
                initrd: None,
                cmdline: work,
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

    fn restore(&self) -> Running {
        let file = |name| File::open(self.dir.path().join(name)).unwrap();
        let origin = Origin::Snapshot {
            state: file("state"),
            memory: file("memory"),
            bases: Vec::new(),
        };
        Running::start(&self.bed.world.host, origin)
    }
}

/// The workload's line of what a guest said.
fn workload(end: &End) -> serde_json::Value {
    let mut lines = end
        .text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    let said = lines.find(|line: &serde_json::Value| line["workload"] == "stream");
    said.unwrap_or_else(|| panic!("{:?}: {}", end.outcome, end.text))
}

#[test]
fn connections_of_a_machine_that_is_restored_on_its_tap_go_on() {
    require_root_and_tun!();
    require_kvm!();
    let Some(saved) = Saved::new() else {
        return skipped!("it needs target/guest/slipgate-guest: cargo xtask build");
    };
    let end = saved.restore().end();
    let said = workload(&end);
    // The guest checks each byte that it gets, and the servers each that they get.
    assert!(matches!(end.outcome, Outcome::GuestExit(0)), "{}", end.text);
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
    let Some(saved) = Saved::new() else {
        return skipped!("it needs target/guest/slipgate-guest: cargo xtask build");
    };
    let restored = saved.restore();
    // So that it is not the time that its streams take which counts.
    restored.control.pause().unwrap();
    let said = saved.slipgate.run(&["generation", "vm"]).unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(
        said.contains(&format!("ended {CONNECTIONS} flows")),
        "{said}"
    );
    restored.control.resume().unwrap();
    let end = restored.end();
    // Idle ones, too, which the guest would not have used for long.
    let said = workload(&end);
    assert_eq!(said["failures"]["reset"], CONNECTIONS, "{said}");
    assert!(matches!(end.outcome, Outcome::GuestExit(1)), "{}", end.text);
    eventually("the servers have noticed", || saved.servers.open() == 0);
}
