//! Measures the kernel's vhost-net beside this card's worker: a frame from the guest's ring through
//! the TAP and back into the guest's ring, with one pair. The driver is the same, and so are its
//! memory, the TAP and the filter that turns each frame around: see `measure`.
use std::{
    fs::{self, File},
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use slipgate_testbed::{require_root_and_tun, skipped};
use slipgate_vmm::{GuestMemory, virtio::net::IoMethod};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::{
    driver::{
        DriverQueue, EVENT_IDX, HEADER, INDIRECT, Interrupts, MEMORY, MRG_RXBUF, Rig, Sleeper,
        memory,
    },
    measure::{QUEUE, RUN, cpu, drive, frame, prepare},
    tap::turning,
};

const DEVICE: &str = "/dev/vhost-net";
const VERSION_1: u64 = 1 << 32;
/// Rounds, in each of which both have a turn.
const ROUNDS: usize = 5;
/// Frames sent one at a time, and the pause before each.
const EXCHANGES: usize = 300;
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Method {
    /// The worker with io_uring.
    Worker,
    /// The kernel's thread.
    VhostNet,
}

/// Requests of vhost (linux/vhost.h).
mod request {
    pub(super) const GET_FEATURES: libc::c_ulong = 0x8008_AF00;
    pub(super) const SET_FEATURES: libc::c_ulong = 0x4008_AF00;
    pub(super) const SET_OWNER: libc::c_ulong = 0x0000_AF01;
    pub(super) const SET_MEM_TABLE: libc::c_ulong = 0x4008_AF03;
    pub(super) const SET_VRING_NUM: libc::c_ulong = 0x4008_AF10;
    pub(super) const SET_VRING_ADDR: libc::c_ulong = 0x4028_AF11;
    pub(super) const SET_VRING_BASE: libc::c_ulong = 0x4008_AF12;
    pub(super) const SET_VRING_KICK: libc::c_ulong = 0x4008_AF20;
    pub(super) const SET_VRING_CALL: libc::c_ulong = 0x4008_AF21;
    pub(super) const NET_SET_BACKEND: libc::c_ulong = 0x4008_AF30;
}

/// Passes `argument`, which is as the request has it, to the kernel.
fn ask<T>(device: &File, request: libc::c_ulong, mut argument: T) -> io::Result<T> {
    // SAFETY: the argument outlives the call and is the structure of the request.
    match unsafe { libc::ioctl(device.as_raw_fd(), request, &raw mut argument) } {
        0.. => Ok(argument),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives the TAP and the driver's rings to the kernel. They are served until the file is dropped.
fn serve(
    tap: &OwnedFd,
    memory: &GuestMemory,
    queues: &[DriverQueue],
    interrupts: &Interrupts,
    features: u64,
) -> io::Result<File> {
    let fd = tap.as_raw_fd();
    let header = HEADER as libc::c_int;
    // Checksums, and segmentation of TCP over IPv4 and IPv6, are the driver's to do.
    let offloads: libc::c_ulong = 1 | 2 | 4;
    // SAFETY: the first takes a pointer to an integer that outlives the call, the second a number.
    let set = unsafe {
        libc::ioctl(fd, libc::TUNSETVNETHDRSZ, &raw const header)
            | libc::ioctl(fd, libc::TUNSETOFFLOAD, offloads)
    };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    let device = File::options().read(true).write(true).open(DEVICE)?;
    ask(&device, request::SET_OWNER, 0_u64)?;
    let offered = ask(&device, request::GET_FEATURES, 0_u64)?;
    assert_eq!(
        offered & features,
        features,
        "vhost-net offers {offered:#x}"
    );
    ask(&device, request::SET_FEATURES, features)?;
    let base = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
    // One region: guest address, bytes, address in this process, flags.
    ask(
        &device,
        request::SET_MEM_TABLE,
        [1, 0, MEMORY as u64, base, 0],
    )?;
    for (index, queue) in queues.iter().enumerate() {
        let at = |address| base + address;
        let number = index as u32;
        ask(&device, request::SET_VRING_NUM, [number, queue.size.into()])?;
        ask(&device, request::SET_VRING_BASE, [number, 0])?;
        let rings = [queue.descriptors, queue.used, queue.available].map(at);
        let [descriptors, used, available] = rings;
        let address = [u64::from(number), descriptors, used, available, 0];
        ask(&device, request::SET_VRING_ADDR, address)?;
        let kick = [number, queue.kick_event.as_raw_fd() as u32];
        ask(&device, request::SET_VRING_KICK, kick)?;
        let call = [number, interrupts.descriptor(index).as_raw_fd() as u32];
        ask(&device, request::SET_VRING_CALL, call)?;
        ask(&device, request::NET_SET_BACKEND, [number, fd as u32])?;
    }
    Ok(device)
}

/// What serves the rings; dropped, it no longer does.
enum Server {
    Worker(#[allow(dead_code)] Box<Rig>),
    VhostNet(#[allow(dead_code)] File, #[allow(dead_code)] OwnedFd),
}

/// A driver's rings and what serves them.
struct Bench {
    server: Server,
    rx: DriverQueue,
    tx: DriverQueue,
    interrupts: Arc<Interrupts>,
    // Behind what uses it.
    _memory: Arc<GuestMemory>,
}

impl Bench {
    fn new(method: Method, mut taps: Vec<OwnedFd>, frame_bytes: usize) -> Bench {
        let features = MRG_RXBUF | EVENT_IDX | INDIRECT | VERSION_1;
        let (server, memory, interrupts, queues) = match method {
            Method::Worker => {
                let mut rig = Rig::new(taps, IoMethod::IoUring);
                rig.start(u64::MAX, QUEUE);
                let (memory, interrupts) = (Arc::clone(&rig.memory), Arc::clone(&rig.interrupts));
                let queues = std::mem::take(&mut rig.queues);
                (Server::Worker(Box::new(rig)), memory, interrupts, queues)
            }
            Method::VhostNet => {
                let (memory, interrupts) = (memory(), Arc::new(Interrupts::of(2)));
                let queue = |index| DriverQueue::new(&memory, index, QUEUE, features);
                let queues = vec![queue(0), queue(1)];
                let tap = taps.remove(0);
                let device = serve(&tap, &memory, &queues, &interrupts, features).unwrap();
                (Server::VhostNet(device, tap), memory, interrupts, queues)
            }
        };
        let mut queues = queues.into_iter();
        let (rx, mut tx) = (queues.next().unwrap(), queues.next().unwrap());
        let bytes = frame(frame_bytes);
        let at = tx.next_buffer(bytes.len() as u32);
        memory.write_slice(&bytes, GuestAddress(at)).unwrap();
        tx.buffers.insert(0, at);
        Bench {
            server,
            rx,
            tx,
            interrupts,
            _memory: memory,
        }
    }
}

/// Returns the CPU time of the kernel's own threads that have a part in it: a vhost thread that is no
/// thread of this process (before Linux 6.4), and those for soft interrupts.
fn kernel_threads() -> Duration {
    let mut total = 0;
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        let name = read("comm");
        if name.starts_with("vhost-") || name.starts_with("ksoftirqd/") {
            let spent = read("schedstat");
            let spent = spent.split_whitespace().next();
            total += spent.and_then(|ns| ns.parse().ok()).unwrap_or(0);
        }
    }
    Duration::from_nanos(total)
}

fn all_cpu() -> Duration {
    cpu(libc::CLOCK_PROCESS_CPUTIME_ID) + kernel_threads()
}

struct Row {
    frames_per_s: f64,
    /// CPU time of all threads but the driver's, for a frame there and back.
    cpu_ns: f64,
    driver_ns: f64,
    /// Of a frame alone, there and back.
    p50_us: f64,
    p99_us: f64,
    alone_cpu_us: f64,
}

fn run(method: Method, frame_bytes: usize) -> Row {
    let (frames_per_s, cpu_ns, driver_ns) = busy(method, frame_bytes);
    let (p50_us, p99_us, alone_cpu_us) = one_at_a_time(method, frame_bytes);
    Row {
        frames_per_s,
        cpu_ns,
        driver_ns,
        p50_us,
        p99_us,
        alone_cpu_us,
    }
}

fn busy(method: Method, frame_bytes: usize) -> (f64, f64, f64) {
    let (ns, taps) = turning("vmmvhost", 1);
    let bench = Bench::new(method, taps, frame_bytes);
    let Bench {
        server,
        mut rx,
        mut tx,
        interrupts,
        _memory: memory,
    } = bench;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let (before, begin) = (all_cpu(), Instant::now());
    let driver =
        thread::spawn(move || drive(&mut rx, &mut tx, frame_bytes as u32, &interrupts, &stopped));
    thread::sleep(RUN);
    stop.store(true, Ordering::Relaxed);
    let driven = driver.join().unwrap();
    let (elapsed, spent) = (begin.elapsed(), all_cpu() - before);
    drop((server, memory, ns));
    let frames = driven.frames as f64;
    assert!(frames > 100.0, "{method:?}: {frames} frames came back");
    let per_frame = |time: Duration| time.as_nanos() as f64 / frames;
    (
        frames / elapsed.as_secs_f64(),
        per_frame(spent - driven.cpu),
        per_frame(driven.cpu),
    )
}

fn one_at_a_time(method: Method, frame_bytes: usize) -> (f64, f64, f64) {
    let (_ns, taps) = turning("vmmvhost", 1);
    let mut bench = Bench::new(method, taps, frame_bytes);
    let Bench {
        rx, tx, interrupts, ..
    } = &mut bench;
    prepare(rx, tx, frame_bytes as u32);
    let sleeper = Sleeper::new(&[interrupts.descriptor(0)]).unwrap();
    let driver = || cpu(libc::CLOCK_THREAD_CPUTIME_ID);
    let mut times = Vec::new();
    // The first ones touch what the later ones find.
    let mut before = (Duration::ZERO, Duration::ZERO);
    for number in 0..EXCHANGES + 20 {
        if number == 20 {
            times.clear();
            before = (all_cpu(), driver());
        }
        thread::sleep(PAUSE);
        let sent = Instant::now();
        rx.set_used_event(rx.used_idx);
        tx.set_used_event(tx.used_idx.wrapping_sub(1));
        tx.offer(number as u16 % QUEUE);
        tx.kick();
        let mut left = None;
        while left != Some(0_u16) {
            let Some((head, _)) = rx.take_used() else {
                rx.set_used_event(rx.used_idx);
                if rx.used_idx == rx.used_idx_now() {
                    sleeper.sleep(1_000);
                }
                assert!(sent.elapsed() < Duration::from_secs(10), "frame {number}");
                continue;
            };
            let merged = left.unwrap_or_else(|| rx.get(rx.buffer_of(head) + 10));
            left = Some(merged - 1);
            rx.offer(head);
        }
        times.push(sent.elapsed());
        rx.kick();
        while tx.take_used().is_some() {}
    }
    let spent = (all_cpu() - before.0) - (driver() - before.1);
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 100].as_nanos() as f64 / 1e3;
    let alone_cpu_us = spent.as_nanos() as f64 / 1e3 / EXCHANGES as f64;
    (at(50), at(99), alone_cpu_us)
}

fn median(rows: &[Row], of: impl Fn(&Row) -> f64) -> f64 {
    let mut values: Vec<f64> = rows.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints each round, the medians, and the median of the rounds' ratios, worker to vhost-net.
#[test]
#[ignore = "a measurement"]
fn ring_to_tap_to_ring_by_vhost_net() {
    require_root_and_tun!();
    if !std::path::Path::new(DEVICE).exists() {
        return skipped!("there is no {DEVICE}: load the module vhost_net");
    }
    let titles = "bytes by        frames/s  cpu-ns/frame driver-ns  alone: p50-us  p99-us  cpu-us";
    println!("{titles}");
    let print = |bytes: usize, by: &str, of: &dyn Fn(fn(&Row) -> f64) -> f64, digits: usize| {
        println!(
            "{bytes:>5} {by:<9} {:>9.d$} {:>13.d$} {:>9.d$} {:>14.d$} {:>7.d$} {:>7.d$}",
            of(|row| row.frames_per_s),
            of(|row| row.cpu_ns),
            of(|row| row.driver_ns),
            of(|row| row.p50_us),
            of(|row| row.p99_us),
            of(|row| row.alone_cpu_us),
            d = digits
        );
    };
    for bytes in [64, 1_500, 60_000] {
        let (mut worker, mut vhost) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            // Which one is first changes, so that neither has the machine's better half.
            let order = match round % 2 {
                0 => [Method::Worker, Method::VhostNet],
                _ => [Method::VhostNet, Method::Worker],
            };
            for method in order {
                let row = run(method, bytes);
                print(bytes, &format!("{method:?}"), &|of| of(&row), 0);
                match method {
                    Method::Worker => worker.push(row),
                    Method::VhostNet => vhost.push(row),
                }
            }
        }
        print(bytes, "worker-50", &|of| median(&worker, of), 0);
        print(bytes, "vhost-50", &|of| median(&vhost, of), 0);
        let ratio = |of: fn(&Row) -> f64| {
            let pairs = worker.iter().zip(&vhost);
            let mut ratios: Vec<f64> = pairs.map(|(w, v)| of(w) / of(v)).collect();
            ratios.sort_by(f64::total_cmp);
            ratios[ratios.len() / 2]
        };
        print(bytes, "ratio", &ratio, 2);
    }
}
