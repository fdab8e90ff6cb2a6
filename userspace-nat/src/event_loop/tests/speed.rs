//! How long an admission takes. Run with
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

fn cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a thread has a clock");
    std::time::Duration::from(now).as_nanos() as u64
}
