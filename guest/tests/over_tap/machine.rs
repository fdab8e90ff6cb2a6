//! A machine for the workloads. Its CPUs are threads, and its queue pairs are those of a TAP, with
//! Linux on the other side.

use std::{
    cell::Cell,
    collections::VecDeque,
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Instant,
};

use serde_json::Value;
use slipgate_guest::{
    platform::{Nic, NicCounters, Platform},
    run::{Shared, run},
};
use slipgate_testbed::{NetNs, impairment::SplitMix64};
use smoltcp::{
    phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken},
    wire::{EthernetFrame, IpProtocol, Ipv4Packet, TcpOption, TcpPacket},
};

pub(crate) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 15];

/// Configuration of a run.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) cpus: usize,
    /// Factor by which the machine's clock runs faster than time: timeouts come sooner.
    pub(crate) speed: u64,
    /// If set, each pair receives from another's queue.
    pub(crate) crossed: bool,
    /// Faults of both directions of each pair.
    pub(crate) faults: Option<Faults>,
}

impl Config {
    pub(crate) fn cpus(cpus: usize) -> Self {
        Config {
            cpus,
            speed: 1,
            crossed: false,
            faults: None,
        }
    }
}

/// Rates of faults, in parts per 10,000.
#[derive(Clone, Copy)]
pub(crate) struct Faults {
    pub(crate) lose: u64,
    pub(crate) duplicate: u64,
    pub(crate) reorder: u64,
}

/// Time of day of every machine at time 0.
pub(crate) const BOOTED_UNIX_MS: u64 = 1_800_000_000_000;

/// Result of a run.
pub(crate) struct Ran {
    pub(crate) status: u8,
    pub(crate) lines: Vec<Value>,
    /// Length of the largest sent frame, bytes with the Ethernet header.
    pub(crate) largest_sent: usize,
    /// The last TCP timestamp that was sent.
    pub(crate) timestamp_ms: u32,
}

#[derive(Default)]
struct Sent {
    largest: AtomicUsize,
    timestamp_ms: AtomicU32,
}

impl Ran {
    /// Returns the lines of a workload.
    pub(crate) fn workload(&self, name: &str) -> Vec<&Value> {
        let is_it = |line: &&Value| line["workload"] == name;
        self.lines.iter().filter(is_it).collect()
    }

    /// Returns the sum of a counter over all pairs.
    pub(crate) fn pairs(&self, counter: &str) -> u64 {
        let pairs = self.lines.iter().filter(|line| line.get("pair").is_some());
        pairs.map(|pair| pair[counter].as_u64().unwrap()).sum()
    }
}

/// A multi-queue TAP in `ns`, up. It is removed when the value is dropped.
pub(crate) struct Tap(Vec<OwnedFd>);

impl Tap {
    pub(crate) fn new(ns: &NetNs, name: &str, queues: usize) -> Tap {
        let open = || (0..queues).map(|_| open_queue(name)).collect();
        let tap = Tap(ns.run(open));
        ns.ip(&format!("link set {name} up")).unwrap();
        tap
    }
}

fn open_queue(name: &str) -> OwnedFd {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    let tun = File::options().read(true).write(true).open("/dev/net/tun");
    let fd = OwnedFd::from(tun.expect("open /dev/net/tun"));
    // SAFETY: ifreq is plain data, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = byte as libc::c_char;
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_MULTI_QUEUE;
    request.ifr_ifru.ifru_flags = flags as i16;
    // SAFETY: the request outlives the call; F_SETFL takes its argument by value.
    let results = unsafe {
        [
            libc::ioctl(fd.as_raw_fd(), TUNSETIFF, &raw mut request),
            libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK),
        ]
    };
    assert_eq!(results, [0, 0], "{}", io::Error::last_os_error());
    fd
}

/// Runs a command line to its end over a TAP.
pub(crate) fn run_over(tap: &Tap, command_line: &str, config: Config) -> Ran {
    let shared = Shared::parse(command_line, config.cpus);
    let machine = Machine::new(tap, config);
    let sent = Arc::new(Sent::default());
    let status = std::thread::scope(|scope| {
        let cpus: Vec<_> = (0..config.cpus)
            .map(|cpu| {
                let nic = TapNic::new(tap, cpu, config, sent.clone());
                let (machine, shared) = (&machine, &shared);
                scope.spawn(move || {
                    CPU.set(cpu);
                    run(cpu, machine, nic, shared)
                })
            })
            .collect();
        let statuses: Vec<u8> = cpus.into_iter().map(|cpu| cpu.join().unwrap()).collect();
        statuses[0]
    });
    let lines = machine.lines.into_inner().unwrap();
    let read = |line: &String| serde_json::from_str(line).expect("each line is JSON");
    Ran {
        status,
        lines: lines.iter().map(read).collect(),
        largest_sent: sent.largest.load(Ordering::Relaxed),
        timestamp_ms: sent.timestamp_ms.load(Ordering::Relaxed),
    }
}

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

struct Machine {
    started: Instant,
    speed: u64,
    /// Each CPU's receive queue, and the eventfd that wakes the CPU.
    cpus: Vec<(i32, OwnedFd)>,
    lines: Mutex<Vec<String>>,
    random: Mutex<SplitMix64>,
}

impl Machine {
    fn new(tap: &Tap, config: Config) -> Machine {
        let cpu = |cpu| {
            // SAFETY: eventfd takes two numbers; the descriptor is new and owned.
            let wake = unsafe {
                let fd = libc::eventfd(0, libc::EFD_NONBLOCK);
                assert!(fd >= 0, "{}", io::Error::last_os_error());
                OwnedFd::from_raw_fd(fd)
            };
            (tap.0[receive_queue(cpu, config)].as_raw_fd(), wake)
        };
        let seed = std::process::id().into();
        Machine {
            started: Instant::now(),
            speed: config.speed,
            cpus: (0..config.cpus).map(cpu).collect(),
            lines: Mutex::default(),
            random: Mutex::new(SplitMix64(seed)),
        }
    }
}

fn receive_queue(cpu: usize, config: Config) -> usize {
    (cpu + usize::from(config.crossed)) % config.cpus
}

impl Platform for Machine {
    fn booted_unix_ms(&self) -> u64 {
        BOOTED_UNIX_MS
    }

    fn cpus(&self) -> usize {
        self.cpus.len()
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64 * self.speed
    }

    fn idle(&self, until_ns: Option<u64>) {
        let (queue, wake) = &self.cpus[CPU.get()];
        let timeout = until_ns.map(|until| {
            let ns = until.saturating_sub(self.now_ns()) / self.speed;
            libc::timespec {
                tv_sec: (ns / 1_000_000_000) as i64,
                tv_nsec: (ns % 1_000_000_000) as i64,
            }
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), |time| time);
        let mut waits = [*queue, wake.as_raw_fd()].map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        let mut count = 0u64;
        // SAFETY: all pointers are to live values of the lengths given.
        unsafe {
            libc::ppoll(waits.as_mut_ptr(), 2, timeout, std::ptr::null());
            libc::read(wake.as_raw_fd(), (&raw mut count).cast(), 8);
        }
    }

    fn wake(&self, cpu: usize) {
        let one = 1u64;
        // SAFETY: 8 bytes of a live value.
        unsafe { libc::write(self.cpus[cpu].1.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    fn random(&self, out: &mut [u8]) {
        let mut random = self.random.lock().unwrap();
        out.fill_with(|| random.next() as u8);
    }

    fn print_line(&self, line: &str) {
        println!("{line}");
        self.lines.lock().unwrap().push(line.to_owned());
    }
}

/// A pair of a TAP's queues as a plain network card.
struct TapNic {
    receive: OwnedFd,
    send: OwnedFd,
    pair: (u16, u16),
    buffer: Vec<u8>,
    incoming: Faulty,
    outgoing: Faulty,
    counters: NicCounters,
    sent: Arc<Sent>,
}

impl TapNic {
    fn new(tap: &Tap, cpu: usize, config: Config, sent: Arc<Sent>) -> Self {
        let clone = |queue: usize| tap.0[queue].try_clone().unwrap();
        TapNic {
            receive: clone(receive_queue(cpu, config)),
            send: clone(cpu),
            pair: (cpu as u16, config.cpus as u16),
            buffer: Vec::new(),
            incoming: Faulty::new(config.faults, 2 * cpu as u64),
            outgoing: Faulty::new(config.faults, 2 * cpu as u64 + 1),
            counters: NicCounters::default(),
            sent,
        }
    }

    fn take_in(&mut self) {
        let mut frame = [0; 2048];
        // SAFETY: the buffer is writable for its length.
        let len = unsafe {
            libc::read(
                self.receive.as_raw_fd(),
                frame.as_mut_ptr().cast(),
                frame.len(),
            )
        };
        match usize::try_from(len) {
            Ok(len) => self.incoming.push(frame[..len].to_vec()),
            Err(_) => self.incoming.settle(),
        }
    }

    fn write_all(&mut self) {
        while let Some(frame) = self.outgoing.ready.pop_front() {
            // SAFETY: the frame is readable for its length. A full queue loses it, as a link may.
            unsafe { libc::write(self.send.as_raw_fd(), frame.as_ptr().cast(), frame.len()) };
        }
    }
}

impl Nic for TapNic {
    fn mac(&self) -> [u8; 6] {
        MAC
    }

    fn pair(&self) -> (u16, u16) {
        self.pair
    }

    fn flush(&mut self) {
        self.outgoing.settle();
        self.write_all();
        self.counters.kicks += 1;
    }

    fn arm(&mut self) -> bool {
        self.incoming.ready.is_empty() && self.incoming.held.is_none()
    }

    fn can_segment_udp(&self) -> bool {
        false
    }

    fn counters(&self) -> NicCounters {
        self.counters
    }
}

impl Device for TapNic {
    type RxToken<'a> = Rx<'a>;
    type TxToken<'a> = Tx<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Rx<'_>, Tx<'_>)> {
        if self.incoming.ready.is_empty() {
            self.take_in();
        }
        self.buffer = self.incoming.ready.pop_front()?;
        self.counters.rx_frames += 1;
        self.counters.rx_bytes += self.buffer.len() as u64;
        let tx = Tx {
            outgoing: &mut self.outgoing,
            counters: &mut self.counters,
            sent: &self.sent,
        };
        Some((Rx(&self.buffer), tx))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Tx<'_>> {
        if self.outgoing.ready.len() >= 256 {
            self.write_all();
        }
        Some(Tx {
            outgoing: &mut self.outgoing,
            counters: &mut self.counters,
            sent: &self.sent,
        })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        capabilities
    }
}

struct Rx<'a>(&'a [u8]);

impl RxToken for Rx<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

struct Tx<'a> {
    outgoing: &'a mut Faulty,
    counters: &'a mut NicCounters,
    sent: &'a Sent,
}

impl TxToken for Tx<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = vec![0; len];
        let result = f(&mut frame);
        self.sent.largest.fetch_max(len, Ordering::Relaxed);
        if let Some(ms) = timestamp_of(&frame) {
            self.sent.timestamp_ms.store(ms, Ordering::Relaxed);
        }
        self.counters.tx_frames += 1;
        self.counters.tx_bytes += len as u64;
        self.outgoing.push(frame);
        result
    }
}

/// One direction, with its faults.
struct Faulty {
    faults: Option<Faults>,
    random: SplitMix64,
    ready: VecDeque<Vec<u8>>,
    /// Frame that the next one overtakes.
    held: Option<Vec<u8>>,
}

impl Faulty {
    fn new(faults: Option<Faults>, seed: u64) -> Self {
        Faulty {
            faults,
            random: SplitMix64(seed),
            ready: VecDeque::new(),
            held: None,
        }
    }

    fn push(&mut self, frame: Vec<u8>) {
        let Some(faults) = self.faults else {
            return self.ready.push_back(frame);
        };
        let [lose, duplicate, reorder] = std::array::from_fn(|_| self.random.next() % 10_000);
        if lose < faults.lose {
            return;
        }
        if duplicate < faults.duplicate {
            self.ready.push_back(frame.clone());
        }
        if reorder < faults.reorder && self.held.is_none() {
            self.held = Some(frame);
            return;
        }
        self.ready.push_back(frame);
        self.settle();
    }

    /// Releases the held frame if no other comes to overtake it.
    fn settle(&mut self) {
        self.ready.extend(self.held.take());
    }
}

/// Returns the TSval of a TCP segment; `None` without one.
fn timestamp_of(frame: &[u8]) -> Option<u32> {
    let frame = EthernetFrame::new_checked(frame).ok()?;
    let packet = Ipv4Packet::new_checked(frame.payload()).ok()?;
    let segment = TcpPacket::new_checked(packet.payload()).ok()?;
    let mut options = (packet.next_header() == IpProtocol::Tcp).then(|| segment.options())?;
    while !options.is_empty() {
        let (rest, option) = TcpOption::parse(options).ok()?;
        if let TcpOption::TimeStamp { tsval, .. } = option {
            return Some(tsval);
        }
        options = rest;
    }
    None
}
