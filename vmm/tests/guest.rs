//! The built-in guest on a machine with a network card, on a TAP in a namespace of its own.
use std::{
    fs::File,
    io::{self, Read, Write, pipe},
    net::TcpListener,
    os::fd::{AsRawFd, OwnedFd},
    path::PathBuf,
    sync::mpsc,
    thread,
    time::Duration,
};

use slipgate_testbed::{NetNs, require_kvm, require_root_and_tun, skipped};
use slipgate_vmm::{
    Devices, Machine, MachineConfig, Origin, Outcome, SerialIo, ThreadSetup,
    boot::{BootSource, Kernel},
    counters::Snapshot,
    virtio::net::NetConfig,
};

/// Opens the guest's image, which xtask builds.
fn image() -> Option<File> {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    File::open(workspace.join("target/guest/slipgate-guest")).ok()
}

/// Opens the queues of one new TAP in the calling thread's namespace.
fn tap(name: &str, queues: usize) -> io::Result<Vec<OwnedFd>> {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
    // SAFETY: an ifreq is plain data, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    (0..queues)
        .map(|_| {
            let queue = File::options()
                .read(true)
                .write(true)
                .open("/dev/net/tun")?;
            // SAFETY: TUNSETIFF reads and writes an ifreq.
            match unsafe { libc::ioctl(queue.as_raw_fd(), TUNSETIFF, &raw mut request) } {
                0 => Ok(queue.into()),
                _ => Err(io::Error::last_os_error()),
            }
        })
        .collect()
}

/// Runs the guest to its end. Returns its outcome, its output, and the machine's counters.
fn run(net: Option<NetConfig>, cmdline: &str, image: File) -> (Outcome, String, Snapshot) {
    let (mut printed, output) = pipe().unwrap();
    let kvm = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .unwrap();
    let machine = Machine::new(MachineConfig {
        template: slipgate_vmm::cpuid::Template::Host,
        huge_pages: false,
        cpus: 2,
        memory_bytes: 64 << 20,
        origin: Origin::Boot(BootSource {
            kernel: Kernel::File(image),
            initrd: None,
            cmdline: cmdline.into(),
        }),
        devices: Devices {
            net,
            disks: Vec::new(),
            vsock: None,
            balloon: None,
            serial: SerialIo {
                input: None,
                limit_bytes: None,
                output: output.into(),
            },
        },
        kvm: kvm.into(),
        threads: ThreadSetup::new(|_| Ok(())),
    })
    .unwrap();
    let counters = machine.counters();
    let stop = machine.stop_handle().unwrap();
    let (ended, wait) = mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        if wait.recv_timeout(Duration::from_secs(40)).is_err() {
            stop.stop();
        }
    });
    let reading = thread::spawn(move || {
        let mut text = String::new();
        printed.read_to_string(&mut text).unwrap();
        text
    });
    let outcome = machine.run();
    ended.send(()).ok();
    watchdog.join().unwrap();
    (outcome, reading.join().unwrap(), counters.snapshot())
}

/// Echoes the bytes of each connection.
fn echo(listener: TcpListener) {
    for connection in listener.incoming() {
        let Ok(mut connection) = connection else {
            return;
        };
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = connection.read(&mut bytes) {
                if connection.write_all(&bytes[..read]).is_err() {
                    return;
                }
            }
        });
    }
}

#[test]
fn carries_its_connections_on_both_queue_pairs() {
    require_kvm!();
    require_root_and_tun!();
    let Some(image) = image() else {
        return skipped!("it needs target/guest/slipgate-guest: cargo xtask build");
    };
    let host = NetNs::new("guest-test").unwrap();
    let queues = host.run(|| tap("vm0", 2)).unwrap();
    host.ip("addr add 10.9.0.1/24 dev vm0").unwrap();
    host.ip("link set vm0 up").unwrap();
    let listener = host.run(|| TcpListener::bind("10.9.0.1:7")).unwrap();
    // Sockets stay in the namespace in which they were created.
    thread::spawn(move || echo(listener));

    let net = NetConfig::new([0x02, 0, 0, 0, 0, 2], 1500, queues);
    let workloads = "address 10.9.0.2/24 10.9.0.1; ping 10.9.0.1 5; \
                     rr 10.9.0.1:7 200; crr 10.9.0.1:7 200 x4 echo; flood 10.9.0.1:9 2000 64 x2";
    let (outcome, printed, counters) = run(Some(net), workloads, image);
    let all = || format!("{outcome:?}\n{printed}\n{counters:#?}");
    assert!(matches!(outcome, Outcome::GuestExit(0)), "{}", all());

    let card = counters.net.as_ref().unwrap();
    let drops: u64 = card.pairs.iter().flat_map(|pair| pair.drops.values()).sum();
    assert_eq!(drops, 0, "{}", all());
    assert_eq!(card.pairs.len(), 2);
    for pair in &card.pairs {
        assert!(pair.rx_frames > 100 && pair.tx_frames > 100, "{}", all());
        assert!(pair.interrupts > 0 && pair.kicks > 0, "{}", all());
    }
    let transport = counters.net_transport.as_ref().unwrap();
    assert_eq!((transport.needs_reset, transport.bad_queues), (0, 0));
    // Notifications go by ioeventfds, interrupts by irqfds; exits are rare.
    assert_eq!(transport.notify_exits, 0, "{}", all());
    let exits: u64 = counters
        .vcpus
        .iter()
        .map(|vcpu| vcpu.mmio_reads + vcpu.mmio_writes)
        .sum();
    assert!(exits < 1000, "{}", all());
}
