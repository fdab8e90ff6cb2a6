//! A VM's packets and bytes per second, each way.
use slipgate_abi::{
    Command, DropReason, Handover, Protocol, Rate, RateLimits, VmRates,
    rate::{BURST_NS, RateRef},
    vm::VmFlags,
};

use crate::{datapath::*, frame::*, loaded, pool::Datapath};

fn limit(datapath: &Datapath, rx: bool, rate: Rate) {
    let rates = if rx {
        VmRates {
            rx: rate,
            ..VmRates::default()
        }
    } else {
        VmRates {
            tx: rate,
            ..VmRates::default()
        }
    };
    datapath.rates.set(ROW, RateLimits::default());
    // SAFETY: the mapping lives as long as the datapath.
    unsafe { RateRef::new(datapath.rates.at(ROW)) }.set(rates);
    datapath.vms.change(ROW, |vm| vm.flags |= VmFlags::LIMITED);
}

fn packets(packets_per_second: u64) -> Rate {
    Rate {
        packets_per_second,
        bytes_per_second: 0,
        ..Rate::default()
    }
}

fn bytes(bytes_per_second: u64) -> Rate {
    Rate {
        packets_per_second: 0,
        bytes_per_second,
        ..Rate::default()
    }
}

/// Returns each path of a translated packet: program, direction, input frame.
fn ways(protocol: Protocol) -> [(&'static str, bool, Vec<u8>); 5] {
    let (tx, rx) = (Frame::tx(protocol), Frame::rx(protocol));
    [
        ("guest_egress", false, tx.bytes()),
        ("uplink_ingress", true, rx.bytes()),
        ("uplink_ingress_l3", true, rx.bytes()[14..].to_vec()),
        ("engine_port", false, command(Command::Forward, VM, &tx)),
        ("engine_port", true, command(Command::Deliver, VM, &rx)),
    ]
}

/// Times at which packets were offered, by the clock that the programs read.
#[derive(Clone, Copy)]
struct Offer {
    start_ns: u64,
    /// Time of the first refused packet, when the burst is used up, ns.
    used_up_ns: Option<u64>,
    /// Time after five sixths of the runs, ns. The later packets make up for pauses before it.
    saturated_ns: u64,
}

impl Offer {
    fn begin() -> Self {
        let now_ns = monotonic_ns();
        Self {
            start_ns: now_ns,
            used_up_ns: None,
            saturated_ns: now_ns,
        }
    }

    /// Records the result of run `number` of `of`.
    fn note(&mut self, number: u64, of: u64, passed: bool) {
        if !passed {
            self.used_up_ns.get_or_insert_with(monotonic_ns);
        }
        if number == of * 5 / 6 {
            self.saturated_ns = monotonic_ns();
        }
    }

    /// Returns the minimum and maximum number of packets that may have passed by now.
    fn expected(self, per_second: u64) -> std::ops::RangeInclusive<u64> {
        let in_time = |ns: u64| per_second * ns / 1_000_000_000;
        let burst = in_time(BURST_NS);
        let used_up_ns = self.used_up_ns.unwrap_or(self.saturated_ns);
        let least = in_time(self.saturated_ns.saturating_sub(used_up_ns));
        burst + least..=burst + in_time(monotonic_ns() - self.start_ns) + 1
    }
}

fn monotonic_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid place for the answer.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    assert_eq!(failed, 0);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[test]
fn so_many_packets_pass_and_the_rest_are_dropped() {
    const RATE: u64 = 200;
    const SENT: u64 = 300;
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmp] {
        for (program, rx, frame) in ways(protocol) {
            let mut datapath = loaded!();
            datapath.admit(Flow::new(protocol));
            limit(&datapath, rx, packets(RATE));
            let mut offer = Offer::begin();
            let mut passes = |number: &u64| {
                let passed = datapath.run(program, &frame).action == REDIRECT;
                offer.note(*number, SENT, passed);
                passed
            };
            let passed = (0..SENT).filter(&mut passes).count() as u64;
            let expected = offer.expected(RATE);
            assert!(
                expected.contains(&passed),
                "{program} {passed} {expected:?}"
            );
            let slot = datapath.slots.get(9);
            let (counted, bytes) = if rx {
                (slot.rx_packets, slot.rx_bytes)
            } else {
                (slot.tx_packets, slot.tx_bytes)
            };
            assert_eq!(counted, passed, "{program}");
            assert_eq!(datapath.only_reason(ROW), DropReason::PacketRate);
            let dropped = datapath.drops.get(ROW).packet_rate;
            assert_eq!(dropped.packets, SENT - passed, "{program}");
            // Each is in one place, with its length.
            assert_eq!(dropped.bytes * passed, bytes * dropped.packets, "{program}");
        }
    }
}

#[test]
fn gso_frames_are_charged_as_segmented() {
    // Three packets, 3,120 bytes. At these rates 30 and 30.2 of them are the burst.
    for (rate, reason) in [
        (packets(900), DropReason::PacketRate),
        (bytes(942_240), DropReason::ByteRate),
    ] {
        for rx in [false, true] {
            let mut datapath = loaded!();
            datapath.admit(Flow::new(Protocol::Tcp));
            limit(&datapath, rx, rate);
            let frame = Frame {
                payload: vec![3; 3_000],
                ..Frame::of(Protocol::Tcp, rx)
            }
            .bytes();
            let program = if rx { "uplink_ingress" } else { "guest_egress" };
            let mut offer = Offer::begin();
            let mut run = |number| {
                let run = datapath.run_gso(program, &frame, 1_400);
                offer.note(number, 400, run.action == REDIRECT);
                run
            };
            let runs: Vec<_> = (0..400).map(&mut run).collect();
            let passed = runs.iter().filter(|run| run.action == REDIRECT).count() as u64;
            let expected = offer.expected(302);
            assert!(
                (expected.start() - 2..=expected.end() + 1).contains(&passed),
                "{passed} {expected:?}"
            );
            assert_eq!(datapath.only_reason(ROW), reason);
            let dropped = datapath.drops.get(ROW).get(reason);
            let frames = 400 - passed;
            assert_eq!(
                (dropped.packets, dropped.bytes),
                (3 * frames, 3_120 * frames)
            );
            // Decide, then touch.
            let untouched = runs.iter().filter(|run| run.action == SHOT);
            assert!(untouched.clone().count() > 0);
            assert!(untouched.into_iter().all(|run| run.frame == frame));
        }
    }
}

#[test]
fn a_spent_budget_drops_the_rest() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Icmp] {
        for (program, rx, frame) in ways(protocol) {
            let mut datapath = loaded!();
            datapath.admit(Flow::new(protocol));
            let budget = Rate {
                budget_bytes: 500,
                ..Rate::default()
            };
            limit(&datapath, rx, budget);
            let passed = |_: &u64| datapath.run(program, &frame).action == REDIRECT;
            let passed = (0..100).filter(passed).count() as u64;
            let slot = datapath.slots.get(9);
            let bytes = if rx { slot.rx_bytes } else { slot.tx_bytes };
            // It ends with the packet that exhausts it.
            assert!(
                bytes >= 500 && bytes - bytes / passed < 500,
                "{program} {bytes}"
            );
            assert_eq!(datapath.only_reason(ROW), DropReason::ByteBudget);
            let dropped = datapath.drops.get(ROW).byte_budget;
            assert_eq!(dropped.packets, 100 - passed, "{program}");
        }
    }
}

#[test]
fn a_direction_does_not_limit_the_other_nor_a_vm_another() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    limit(&datapath, false, packets(1));
    let (tx, rx) = (
        Frame::tx(Protocol::Udp).bytes(),
        Frame::rx(Protocol::Udp).bytes(),
    );
    assert_eq!(datapath.run("guest_egress", &tx).action, REDIRECT);
    assert_eq!(datapath.run("guest_egress", &tx).action, SHOT);
    for _ in 0..100 {
        assert_eq!(datapath.run("uplink_ingress", &rx).action, REDIRECT);
    }
    // The same VM in another row, whose rates nobody set.
    datapath.vms.set(ROW + 1, datapath.vms.get(ROW));
    datapath.vms.change(ROW, |vm| vm.id = 0);
    datapath
        .slots
        .change(9, |slot| slot.vm_row = ROW as u16 + 1);
    datapath.set_tap(TAP, VM, ROW + 1);
    for _ in 0..100 {
        assert_eq!(datapath.run("guest_egress", &tx).action, REDIRECT);
    }
}

#[test]
fn without_the_flag_the_row_is_not_looked_at() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    for rx in [false, true] {
        limit(&datapath, rx, packets(1));
        datapath.vms.change(ROW, |vm| vm.flags &= !VmFlags::LIMITED);
        let before = datapath.rates.get(ROW);
        let program = if rx { "uplink_ingress" } else { "guest_egress" };
        for _ in 0..10 {
            let frame = Frame::of(Protocol::Udp, rx).bytes();
            assert_eq!(datapath.run(program, &frame).action, REDIRECT);
        }
        assert_eq!(datapath.rates.get(ROW), before);
    }
}

#[test]
fn two_cpus_spend_no_time_twice() {
    const RATE: u64 = 2_000;
    const RUNS: u64 = 3_000;
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    limit(&datapath, false, packets(RATE));
    let frame = Frame::tx(Protocol::Udp).bytes();
    let offer = Offer::begin();
    let program = datapath.classifier("guest_egress");
    let runs = std::thread::scope(|scope| {
        let run = || {
            let mut offer = offer;
            let passes = |number: &u64| {
                let passed = run_program(program, &frame, 0).action == REDIRECT;
                offer.note(*number, RUNS, passed);
                passed
            };
            ((0..RUNS).filter(passes).count() as u64, offer)
        };
        let threads = [scope.spawn(run), scope.spawn(run)];
        threads.map(|thread| thread.join().expect("a run"))
    });
    let passed: u64 = runs.iter().map(|(passed, _)| passed).sum();
    let [(_, one), (_, other)] = runs;
    let both = Offer {
        used_up_ns: one.used_up_ns.into_iter().chain(other.used_up_ns).min(),
        // The slower one had enough left for both.
        saturated_ns: one.saturated_ns.max(other.saturated_ns),
        ..offer
    };
    let expected = both.expected(RATE);
    assert!(expected.contains(&passed), "{passed} {expected:?}");
    assert_eq!(datapath.slots.get(9).tx_packets, passed);
    assert_eq!(datapath.only_reason(ROW), DropReason::PacketRate);
    let dropped = datapath.drops.get(ROW).packet_rate.packets;
    assert_eq!(dropped, 2 * RUNS - passed);
}

#[test]
fn what_goes_to_the_engine_is_charged_when_it_comes_back() {
    let mut datapath = loaded!();
    let slot = datapath.admit(Flow::new(Protocol::Udp));
    limit(&datapath, false, packets(1));
    slot.set_verdict(slipgate_abi::Verdict::Engine);
    let frame = Frame::tx(Protocol::Udp);
    for _ in 0..3 {
        let run = datapath.run("guest_egress", &frame.bytes());
        assert_eq!(run.action, REDIRECT);
        assert_eq!(handed(&run.frame).0.vm_row, ROW as u16);
    }
    assert_eq!(datapath.rates.get(ROW).tx.packets.paid_until_ns, 0);
    let back = command(Command::Forward, VM, &frame);
    assert_eq!(datapath.run("engine_port", &back).action, REDIRECT);
    assert_eq!(datapath.run("engine_port", &back).action, SHOT);
    assert_eq!(datapath.only_drop(ROW), DropReason::PacketRate);
}

/// Returns a packet of this many L3 bytes that may be fragmented.
fn large(rx: bool, l3_len: usize) -> Frame {
    Frame {
        fragment: 0,
        payload: vec![7; l3_len - 28],
        ..Frame::of(Protocol::Udp, rx)
    }
}

#[test]
fn what_is_larger_than_the_link_does_not_go_round_the_rate() {
    for (rate, reason) in [
        (packets(1), DropReason::PacketRate),
        (bytes(1), DropReason::ByteRate),
    ] {
        for (program, rx, ordinary) in ways(Protocol::Udp) {
            let frame = large(rx, 3_000);
            let frame = match program {
                "engine_port" => continue,
                "uplink_ingress_l3" => frame.bytes()[14..].to_vec(),
                _ => frame.bytes(),
            };
            let mut datapath = loaded!();
            datapath.admit(Flow::new(Protocol::Udp));
            limit(&datapath, rx, rate);
            // While the rate lets pass it is handed over, and nobody is charged for it yet.
            for _ in 0..3 {
                let run = datapath.run(program, &frame);
                assert_eq!(run.action, REDIRECT, "{program}");
                assert_eq!(handed(&run.frame).0.code, Handover::TooBig as u8);
            }
            let limits = datapath.rates.get(ROW);
            let of = if rx { limits.rx } else { limits.tx };
            let paid = (of.packets.paid_until_ns, of.bytes.paid_until_ns);
            assert_eq!(paid, (0, 0), "{program}");
            assert_eq!(datapath.run(program, &ordinary).action, REDIRECT);
            let before = datapath.handed_over();
            let run = datapath.run(program, &frame);
            assert_eq!((run.action, run.frame), (SHOT, frame), "{program}");
            assert_eq!(datapath.handed_over(), before, "{program}");
            assert_eq!(datapath.only_reason(ROW), reason, "{program}");
            // In the books as the one packet that it is.
            let dropped = datapath.drops.get(ROW).get(reason);
            assert_eq!((dropped.packets, dropped.bytes), (1, 3_000), "{program}");
        }
    }
}
