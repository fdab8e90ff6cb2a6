//! How long an admission takes. Run with
//! `cargo test --release -p userspace-nat speed -- --ignored --nocapture`.
use std::time::Instant;

use super::rig::*;
use crate::port::VirtioNetHdr;

/// Prints ns per admission over the in-memory kernel, whose hash stands for two map insertions.
#[test]
#[ignore = "a measurement"]
fn ns_per_admission() {
    const FLOWS: u32 = 60_000;
    let slots = 65_536;
    let mut rig = Rig::with(Setup {
        slots,
        max_flows: slots,
        ..Setup::default()
    });
    let mut spent = std::time::Duration::ZERO;
    for batch in 0..FLOWS / 60 {
        for i in 0..60 {
            let flow = batch * 60 + i;
            let from = (GUEST, 1_024 + (flow % 60_000) as u16);
            let server = (PEER, 1_000 + (flow / 4_000) as u16);
            let packet = syn(from, server, flow);
            rig.kernel
                .borrow_mut()
                .guest_sends(1, VirtioNetHdr::default(), &packet);
        }
        let begin = Instant::now();
        rig.turn();
        spent += begin.elapsed();
        rig.at_world();
    }
    assert_eq!(rig.flows(), FLOWS as usize);
    println!("{} ns per admission", spent.as_nanos() / u128::from(FLOWS));
}
