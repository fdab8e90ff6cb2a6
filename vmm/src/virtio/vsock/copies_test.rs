//! Measures the device with one copy of each byte, and with two: a program of the host and a driver
//! that polls.
use std::fs;

use super::*;
use crate::virtio::vsock::sockets::staged;

/// Where the buffers for the guest are, and their length; and where the guest's packet is.
const RX_AT: u64 = 0x3_0000;
const RX_BYTES: u32 = 0x8000;
const TX_AT: u64 = 0xA_0000;
const BUFFERS: u16 = 8;
const ROUNDS: usize = 5;
const EXCHANGES: usize = 4_000;
const STREAM_BYTES: usize = 64 << 20;
/// The driver's buffer, as the device is told.
const ROOM: u32 = 1 << 20;

/// The driver's side of one connection.
struct Driver {
    rig: Rig,
    /// Packets taken from the device.
    taken: u16,
    /// The header of the guest's packets.
    header: Header,
    /// The device's last header.
    last: Header,
    sent: u32,
    accepted: u32,
}

impl Driver {
    /// Connects a program of the host.
    fn connect() -> (Driver, UnixStream) {
        let mut rig = Rig::new();
        rig.activate(rig.device.features());
        let mut stream = UnixStream::connect(&rig.path).unwrap();
        stream.write_all(b"CONNECT 80\n").unwrap();
        for buffer in 0..BUFFERS {
            rig.offer(RX, buffer_at(buffer), RX_BYTES);
        }
        let mut driver = Driver {
            rig,
            taken: 0,
            header: Header::default(),
            last: Header::default(),
            sent: 0,
            accepted: 0,
        };
        while driver.next().is_none() {}
        driver.offer_again();
        driver.header = Header {
            buf_alloc: ROOM,
            ..driver.last.reset()
        };
        driver.send(operation::RESPONSE, 0);
        let mut byte = [0];
        while byte != *b"\n" {
            stream.read_exact(&mut byte).unwrap();
        }
        (driver, stream)
    }

    /// Takes the next packet of the device, if there is one: where its data is, and their length.
    fn next(&mut self) -> Option<(u64, u32)> {
        if self.rig.used(RX) == self.taken {
            std::thread::yield_now();
            return None;
        }
        let at = buffer_at(self.taken % BUFFERS);
        self.taken = self.taken.wrapping_add(1);
        let bytes = self.rig.get(at, HEADER_BYTES);
        self.last = Header::from_bytes(bytes[..].try_into().unwrap());
        self.accepted = self.last.fwd_cnt;
        Some((at + HEADER_BYTES as u64, self.last.len))
    }

    /// Gives the buffer of the packet that was taken last back to the device.
    fn offer_again(&mut self) {
        let at = buffer_at(self.taken.wrapping_sub(1) % BUFFERS);
        self.rig.offer(RX, at, RX_BYTES);
    }

    /// Sends a packet, whose data are where they are, and waits until it is taken.
    fn send(&mut self, op: u16, len: u32) {
        let header = Header {
            op,
            len,
            ..self.header
        };
        self.rig.put(TX_AT, &header.to_bytes());
        self.rig.offer(TX, TX_AT, HEADER_BYTES as u32 + len);
        let all = self.rig.available[usize::from(TX)];
        while self.rig.used(TX) != all {
            std::thread::yield_now();
        }
        self.sent = self.sent.wrapping_add(len);
    }
}

fn buffer_at(number: u16) -> u64 {
    RX_AT + u64::from(number) * u64::from(RX_BYTES)
}

/// Returns the CPU time of the device's thread, ns.
fn device_ns() -> f64 {
    let threads = fs::read_dir("/proc/self/task").unwrap().flatten();
    let of = |thread: fs::DirEntry| {
        let read = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        (read("comm").trim() == "vsock").then(|| read("schedstat"))
    };
    let spent = threads.filter_map(of).next().expect("the device's thread");
    spent.split_whitespace().next().unwrap().parse().unwrap()
}

/// Returns p50, p99 and the device's CPU time of an exchange of 64 bytes, µs.
fn exchanges() -> Vec<f64> {
    let (mut driver, mut stream) = Driver::connect();
    let before = device_ns();
    let program = std::thread::spawn(move || {
        let mut data = [7; 64];
        let mut times = Vec::new();
        for _ in 0..EXCHANGES {
            let begin = Instant::now();
            stream.write_all(&data).unwrap();
            stream.read_exact(&mut data).unwrap();
            times.push(begin.elapsed());
        }
        times.sort_unstable();
        (stream, times)
    });
    let mut answered = 0;
    while answered < EXCHANGES * 64 {
        let Some((at, len)) = driver.next() else {
            continue;
        };
        let is_data = driver.last.op == operation::RW;
        if is_data {
            let data = driver.rig.get(at, len as usize);
            driver.rig.put(TX_AT + HEADER_BYTES as u64, &data);
            driver.header.fwd_cnt = driver.header.fwd_cnt.wrapping_add(len);
        }
        driver.offer_again();
        if is_data {
            driver.send(operation::RW, len);
            answered += len as usize;
        }
    }
    let (_stream, times) = program.join().unwrap();
    let us = |share: usize| times[(times.len() - 1) * share / 100].as_nanos() as f64 / 1e3;
    let spent = (device_ns() - before) / 1e3 / EXCHANGES as f64;
    vec![us(50), us(99), spent]
}

/// Returns MiB/s and the device's CPU time for a MiB, µs, from the guest by packets of this length.
fn up(packet: u32) -> Vec<f64> {
    let (mut driver, mut stream) = Driver::connect();
    let (before, begin) = (device_ns(), Instant::now());
    let program = std::thread::spawn(move || {
        let (mut data, mut got) = (vec![0; 1 << 18], 0);
        while got < STREAM_BYTES {
            got += stream.read(&mut data).unwrap();
        }
        stream
    });
    let mut sent = 0;
    while sent < STREAM_BYTES {
        if driver.next().is_some() {
            driver.offer_again();
        }
        let under_way = driver.sent.wrapping_sub(driver.accepted);
        if under_way + packet <= crate::virtio::vsock::WINDOW_BYTES {
            driver.send(operation::RW, packet);
            sent += packet as usize;
        }
    }
    let _stream = program.join().unwrap();
    per_mib(begin, before)
}

/// The same to the guest. A packet is as long as the program's writes, up to the driver's buffers.
fn down(packet: u32) -> Vec<f64> {
    let (mut driver, mut stream) = Driver::connect();
    let (before, begin) = (device_ns(), Instant::now());
    let program = std::thread::spawn(move || {
        let (data, mut sent) = (vec![0; packet as usize], 0);
        while sent < STREAM_BYTES {
            stream.write_all(&data).unwrap();
            sent += data.len();
        }
        stream
    });
    let (mut got, mut untold) = (0, 0);
    while got < STREAM_BYTES {
        let Some((_, len)) = driver.next() else {
            continue;
        };
        driver.offer_again();
        got += len as usize;
        untold += len;
        driver.header.fwd_cnt = driver.header.fwd_cnt.wrapping_add(len);
        if untold >= ROOM / 4 || driver.last.op == operation::CREDIT_REQUEST {
            untold = 0;
            driver.send(operation::CREDIT_UPDATE, 0);
        }
    }
    let _stream = program.join().unwrap();
    per_mib(begin, before)
}

fn per_mib(begin: Instant, before: f64) -> Vec<f64> {
    let mib = STREAM_BYTES as f64 / f64::from(1 << 20);
    let spent = (device_ns() - before) / 1e3 / mib;
    vec![mib / begin.elapsed().as_secs_f64(), spent]
}

fn medians(rounds: &[Vec<f64>]) -> Vec<f64> {
    let of = |column| {
        let mut values: Vec<f64> = rounds
            .iter()
            .map(|round: &Vec<f64>| round[column])
            .collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    (0..rounds[0].len()).map(of).collect()
}

/// Prints the medians of interleaved rounds.
#[test]
#[ignore = "a measurement"]
fn one_copy_and_two() {
    type Measure = fn(u32) -> Vec<f64>;
    let exchange: Measure = |_| exchanges();
    for (what, measure, packet) in [
        (
            "64 bytes there and back: p50, p99, device, us",
            exchange,
            64,
        ),
        ("up: MiB/s, device us/MiB", up, 4096),
        ("up: MiB/s, device us/MiB", up, 65_536),
        ("down: MiB/s, device us/MiB", down, 4096),
        ("down: MiB/s, device us/MiB", down, 65_536),
    ] {
        let mut rounds = [Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            for turn in 0..2 {
                let copies = (round + turn) % 2;
                staged::turn(copies == 1);
                rounds[copies].push(measure(packet));
            }
        }
        staged::turn(false);
        for (copies, rounds) in (1..).zip(&rounds) {
            println!("{what}, {packet}, {copies} copies: {:.2?}", medians(rounds));
        }
    }
}
