//! How long an admission takes, and an adoption. Run with
//! `cargo test --release -p userspace-nat speed -- --ignored --nocapture`.
use nix::time::{ClockId, clock_gettime};

use super::rig::*;
use crate::{
    fake::Faults,
    port::VirtioNetHdr,
    record::{Event, Events},
};

const FLOWS: u32 = 60_000;

/// Prints ns of CPU per admission over the in-memory kernel: two insertions into a hash in memory
/// stand for the kernel's two, and nothing for the read and the write of a frame. And how many more
/// it takes when its start is recorded, the write to a file in memory.
#[test]
#[ignore = "a measurement"]
fn ns_per_admission() {
    let ends = Events::from_iter([Event::FlowEnd]);
    // As few as have the ports that one of several VMs may use.
    for destinations in [20, 6_000] {
        let silent = admission_ns(destinations, ends);
        let recorded = admission_ns(destinations, Events::ALL);
        println!(
            "{destinations} destinations: {silent} ns per admission, {} per record of its start",
            recorded.saturating_sub(silent)
        );
    }
}

fn admission_ns(destinations: u32, events: Events) -> u64 {
    // A VM keeps off the last quarter, which is for the others.
    let slots = 131_072;
    let mut rig = Rig::with(Setup {
        slots,
        max_flows: slots,
        events,
        ..Setup::default()
    });
    {
        let mut kernel = rig.kernel.borrow_mut();
        kernel.flows.reserve(2 * FLOWS as usize);
        kernel.faults = Faults {
            port_ignores: true,
            ..Faults::default()
        };
    }
    let mut spent_ns = 0;
    for batch in 0..FLOWS / 60 {
        for i in 0..60 {
            let flow = batch * 60 + i;
            let from = (GUEST, 1_024 + (flow % 60_000) as u16);
            let server = (PEER, 1_000 + (flow % destinations) as u16);
            let packet = syn(from, server, flow);
            rig.kernel
                .borrow_mut()
                .guest_sends(1, VirtioNetHdr::default(), &packet);
        }
        let begin_ns = cpu_ns();
        rig.turn();
        spent_ns += cpu_ns() - begin_ns;
    }
    assert_eq!(rig.flows(), FLOWS as usize);
    spent_ns / u64::from(FLOWS)
}

/// Prints how long the adoption of 1,000,000 flows takes over the in-memory kernel: until the first
/// new flow is admitted, the longest turn, and until all are adopted.
#[test]
#[ignore = "a measurement"]
fn ms_of_an_adoption() {
    const MANY: u32 = 1_000_000;
    let setup = || Setup {
        slots: 1_572_864,
        max_flows: 1_572_864,
        rate: u32::MAX,
        ..Setup::default()
    };
    for destinations in [1_000, MANY] {
        let mut rig = Rig::with(setup());
        rig.kernel.borrow_mut().flows.reserve(2 * MANY as usize);
        for flow in 0..MANY {
            let [_, b, c, d] = (flow % destinations).to_be_bytes();
            let octets = [99, b, c, d];
            let from = (GUEST, 1_024 + (flow / 20) as u16);
            let packet = udp(from, (slipgate_abi::Ip4 { octets }, 9), b"x");
            rig.kernel
                .borrow_mut()
                .guest_sends(1, VirtioNetHdr::default(), &packet);
            if flow % 60 == 59 {
                rig.turn();
                rig.kernel.borrow_mut().at_world.clear();
            }
        }
        let flows = rig.flows();
        let begin_ns = cpu_ns();
        let mut rig = rig.restart_in_steps(&setup());
        let listed_ns = cpu_ns() - begin_ns;
        rig.connect_from(2, 40_000, 7);
        let admitted_ns = cpu_ns() - begin_ns;
        let mut turns = Vec::new();
        while rig.engine.core.nat.flows.is_adopting() {
            let turn_ns = cpu_ns();
            rig.turn();
            turns.push((cpu_ns() - turn_ns) / 1_000);
        }
        let ms = |ns: u64| ns / 1_000_000;
        turns.sort_unstable();
        let (median, last) = (turns[turns.len() / 2], turns.len() - 1);
        println!(
            "{flows} flows to {destinations} destinations: listed after {} ms, a new one admitted \
             after {} ms; {} turns of {median} µs, 99.9 % below {} µs, the longest {} µs; all \
             adopted after {} ms",
            ms(listed_ns),
            ms(admitted_ns),
            turns.len(),
            turns[last - last / 1_000],
            turns[last],
            ms(cpu_ns() - begin_ns),
        );
        assert_eq!(rig.flows(), flows + 1);
    }
}

fn cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a thread has a clock");
    std::time::Duration::from(now).as_nanos() as u64
}
