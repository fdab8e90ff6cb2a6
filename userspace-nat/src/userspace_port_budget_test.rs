//! What the byte budget counts of what the port could not send.
use std::fs::File;

use slipgate_abi::{AtEnd, Budget, Rate, TapEntry, VmId, VmRates};

use super::{tests::InMemory, *};
use crate::fake::Kernel;

const ROW: u16 = 1;

#[test]
fn what_was_not_sent_uses_no_budget() {
    let kernel = Kernel::new(1_024);
    let guest = TapEntry::new(VmId::new(7), VmRow::new(ROW));
    kernel.borrow_mut().taps.insert(GUEST, guest);
    let tables = InMemory(Rc::try_unwrap(kernel).unwrap().into_inner());
    let limits = tables.0.rates(ROW);
    let used = limits.used(Direction::Tx);
    let not_sent = |len: usize| {
        let mut out = Out {
            tables: &tables,
            link: &mut GuestLink::Tap(File::open("/dev/null").unwrap().into()),
            queue: &mut VecDeque::new(),
            now_ns: 1,
        };
        let tuple = FlowTuple {
            scope: 7,
            local: Ipv4Addr::new(10, 0, 2, 15).into(),
            remote: Ipv4Addr::new(203, 0, 113, 1).into(),
            local_port: 4_000,
            remote_port: 7,
            protocol: 17,
        };
        out.not_sent(&tuple, DropReason::TooBig, len);
        used.load(Relaxed)
    };
    // What was used of a budget that is no more is left as it is.
    used.store(5_000, Relaxed);
    assert_eq!(not_sent(1_301), 5_000);
    limits.set(VmRates {
        tx: Rate {
            budget_bytes: 10_000,
            ..Rate::default()
        },
        budget: Budget {
            per_day: false,
            at_end: AtEnd::Cut,
        },
        ..VmRates::default()
    });
    used.store(5_000, Relaxed);
    assert_eq!(not_sent(1_301), 3_699);
    // A new day has begun since it was charged.
    used.store(100, Relaxed);
    assert_eq!(not_sent(1_301), 0);
}
