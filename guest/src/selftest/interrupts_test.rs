use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{
    super::{Bench, Check, Miss},
    *,
};
use crate::{
    platform::Platform,
    virtio::{
        net::{WANTED, fake},
        transport::{Transport, VERSION_1},
    },
};

/// Platform whose time passes when it is read or waited for.
struct Clock(AtomicU64);

impl Platform for Clock {
    fn cpus(&self) -> usize {
        1
    }

    fn now_ns(&self) -> u64 {
        self.0.fetch_add(1000, Relaxed)
    }

    fn booted_unix_ms(&self) -> u64 {
        0
    }

    fn idle(&self, until_ns: Option<u64>) {
        self.0.fetch_max(until_ns.unwrap(), Relaxed);
    }

    fn wake(&self, _: usize) {}
    fn random(&self, _: &mut [u8]) {}
    fn print_line(&self, _: &str) {}
}

/// Runs both checks of suppression on a card.
fn checked(always_interrupts: bool, taken: fn() -> u64) -> [Check; 2] {
    let card = fake::Card::new(VERSION_1 | WANTED, 1, 3);
    card.0.borrow_mut().always_interrupts = always_interrupts;
    let map = |at, length| card.map(at, length);
    let bench = Bench {
        transport: &Transport::find(&card, fake::CARD, map).unwrap(),
        config: &card,
        platform: &Clock(AtomicU64::new(0)),
        own_mac: [2, 0, 0, 0, 0, 9],
        apic_id: 0,
        interrupt: 0x44,
        taken,
    };
    [no_interrupt_flag(&bench), event_idx(&bench)]
}

#[test]
fn a_card_that_interrupts_as_asked_has_both() {
    assert!(checked(false, fake::interrupts).iter().all(Check::is_ok));
}

#[test]
fn a_card_that_interrupts_always_lacks_both_and_fails_neither() {
    let [flag, index] = checked(true, fake::interrupts);
    assert!(matches!(flag, Err(Miss::Lacks("NO_INTERRUPT"))));
    assert!(matches!(index, Err(Miss::Lacks("EVENT_IDX"))));
}

#[test]
fn a_card_that_never_interrupts_fails() {
    let failed = |check| matches!(check, Err(Miss::Failed(_)));
    assert!(checked(false, || 0).into_iter().all(failed));
}
