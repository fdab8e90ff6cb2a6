use core::{cell::Cell, net::Ipv4Addr};
use std::sync::atomic::{AtomicU64, AtomicUsize};

use smoltcp::{
    phy::{DeviceCapabilities, Medium, RxToken},
    socket::udp,
    wire::{IpAddress, Ipv4Address},
};

use super::*;
use crate::platform::NicCounters;

/// A CPU that counts how often it idles, and when; its clock goes on meanwhile.
#[derive(Default)]
struct Machine {
    idled: AtomicUsize,
    now_ns: AtomicU64,
    /// Added once to the time of an idle.
    stop_ns: AtomicU64,
    generation: AtomicU64,
}

impl Platform for Machine {
    fn cpus(&self) -> usize {
        2
    }

    fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }

    fn booted_unix_ms(&self) -> u64 {
        0
    }

    fn idle(&self, until_ns: Option<u64>) {
        let until_ns = until_ns.expect("an interrupt may be lost");
        let stop_ns = self.stop_ns.swap(0, Ordering::Relaxed);
        self.now_ns.fetch_max(until_ns + stop_ns, Ordering::Relaxed);
        self.idled.fetch_add(1, Ordering::Relaxed);
    }

    fn wake(&self, _: usize) {
        panic!("nobody has to be woken");
    }

    fn random(&self, out: &mut [u8]) {
        out.fill(4);
    }

    fn print_line(&self, _: &str) {}

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }
}

/// A queue pair that never has room.
#[derive(Default)]
struct Full {
    armed: Cell<usize>,
}

enum Never {}

impl RxToken for Never {
    fn consume<T, F: FnOnce(&[u8]) -> T>(self, _: F) -> T {
        match self {}
    }
}

impl TxToken for Never {
    fn consume<T, F: FnOnce(&mut [u8]) -> T>(self, _: usize, _: F) -> T {
        match self {}
    }
}

impl Device for Full {
    type RxToken<'a> = Never;
    type TxToken<'a> = Never;

    fn receive(&mut self, _: Instant) -> Option<(Never, Never)> {
        None
    }

    fn transmit(&mut self, _: Instant) -> Option<Never> {
        None
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        capabilities
    }
}

impl Nic for Full {
    fn mac(&self) -> [u8; 6] {
        [2, 0, 0, 0, 0, 1]
    }

    fn pair(&self) -> (u16, u16) {
        (0, 2)
    }

    fn flush(&mut self) {}

    fn arm(&mut self) -> bool {
        self.armed.set(self.armed.get() + 1);
        true
    }

    fn can_segment_udp(&self) -> bool {
        false
    }

    fn counters(&self) -> NicCounters {
        NicCounters::default()
    }
}

/// Otherwise it would only keep the core from the thread that makes room.
#[test]
fn a_cpu_whose_queue_is_full_sleeps_though_others_pass_it_frames() {
    let (machine, lanes) = (Machine::default(), Lanes::new(2));
    let mut stack = Stack::new(&machine, Full::default(), 0, &lanes);
    stack.configure(&Lease {
        address: Ipv4Addr::new(10, 0, 2, 15),
        prefix: 24,
        router: None,
        dns: Vec::new(),
        mtu: None,
        server: None,
        ipv6: None,
    });
    let buffer = || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 4], vec![0; 400]);
    let mut socket = udp::Socket::new(buffer(), buffer());
    socket.bind(16_400).unwrap();
    let to = IpAddress::Ipv4(Ipv4Address::new(10, 0, 2, 2));
    socket.send_slice(b"waits", (to, 9)).unwrap();
    stack.sockets.add(socket);
    lanes.pass(0, &[0xff; 60], &machine);

    let mut turns = 0;
    stack.drive(|_| {
        turns += 1;
        match turns {
            100 => Turn::Done(()),
            _ => Turn::Worked,
        }
    });
    assert_eq!(machine.idled.load(Ordering::Relaxed), 99);
    assert_eq!(stack.device.nic.armed.get(), 99);
}

#[test]
fn a_stop_of_hours_ends_no_wait_and_no_connection() {
    const SECOND_NS: u64 = 1_000_000_000;
    let (machine, lanes) = (Machine::default(), Lanes::new(2));
    let mut stack = Stack::new(&machine, Full::default(), 0, &lanes);
    let started_ns = stack.now_ns();
    let until_ns = started_ns + 8 * SECOND_NS;
    let mut latest_ns = 0;
    stack.drive(|stack| {
        let now_ns = stack.now_ns();
        assert!(now_ns >= latest_ns);
        latest_ns = now_ns;
        if now_ns >= 2 * SECOND_NS && machine.idled.load(Ordering::Relaxed) == 2 {
            machine
                .stop_ns
                .store(5 * 3600 * SECOND_NS, Ordering::Relaxed);
        }
        match now_ns >= until_ns {
            true => Turn::Done(()),
            false => Turn::Waiting(Some(until_ns)),
        }
    });
    // The stop has cost less than a connection waits for data.
    let waited = machine.idled.load(Ordering::Relaxed);
    assert!((5..=8).contains(&waited), "{waited} s and a stop of hours");
    assert!(stack.now_ns() - started_ns < STALL_NS, "{latest_ns}");
    assert!(machine.now_ns() > 5 * 3600 * SECOND_NS);
}

#[test]
fn a_restore_is_seen_at_the_first_look_and_its_time_counts_from_then_on() {
    let (machine, lanes) = (Machine::default(), Lanes::new(2));
    let stack = Stack::new(&machine, Full::default(), 0, &lanes);
    assert_eq!(stack.since_restore_ns(), None);
    machine.now_ns.store(1_000, Ordering::Relaxed);
    machine.generation.store(7, Ordering::Relaxed);
    stack.now_ns();
    machine.now_ns.store(1_500, Ordering::Relaxed);
    assert_eq!(stack.since_restore_ns(), Some(500));
    // Another one begins anew.
    machine.generation.store(8, Ordering::Relaxed);
    assert_eq!(stack.since_restore_ns(), Some(0));
}
