//! A VM's budget of bytes: at its end new flows are refused, and established ones end or go on.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{AtEnd, Budget, Direction, DropReason, Rate, Refusal, VmRates};

use super::rig::*;

fn set(rig: &Rig, bytes: u64, at_end: AtEnd) {
    let rates = VmRates {
        tx: Rate {
            budget_bytes: bytes,
            ..Rate::default()
        },
        budget: Budget {
            per_day: false,
            at_end,
        },
        ..VmRates::default()
    };
    rig.kernel.borrow().set_rates(1, rates);
}

#[test]
fn a_spent_budget_refuses_new_flows_and_drops_what_goes_beyond_it() {
    for at_end in [AtEnd::Cut, AtEnd::Freeze] {
        let mut rig = Rig::new();
        set(&rig, 5_000, at_end);
        let from = (GUEST, 5_000);
        // 1,028 bytes each: the fifth exhausts it.
        for _ in 0..10 {
            rig.guest(1, &udp(from, SERVER, &[7; 1_000]));
        }
        assert_eq!(rig.at_world().len(), 5);
        assert_eq!(rig.dropped(1, DropReason::ByteBudget), 5);
        rig.guest(1, &udp((GUEST, 5_001), SERVER, b"x"));
        assert_eq!(rig.at_world().len(), 0);
        assert_eq!(rig.refused(1, Refusal::ByteBudget), 1);
        // More, and it may again.
        set(&rig, 10_000, at_end);
        rig.guest(1, &udp((GUEST, 5_002), SERVER, b"x"));
        assert_eq!(rig.at_world().len(), 1);
    }
}

#[test]
fn established_flows_may_go_on_beyond_it() {
    let mut rig = Rig::new();
    set(&rig, 1_000, AtEnd::Refuse);
    for _ in 0..10 {
        rig.guest(1, &udp((GUEST, 5_000), SERVER, &[7; 1_000]));
    }
    assert_eq!(rig.at_world().len(), 10);
    rig.guest(1, &udp((GUEST, 5_001), SERVER, b"x"));
    assert_eq!(rig.at_world().len(), 0);
    assert_eq!(rig.refused(1, Refusal::ByteBudget), 1);
    let used = rig
        .kernel
        .borrow()
        .rates(1)
        .used(Direction::Tx)
        .load(Relaxed);
    assert_eq!(used, 10_280);
}
