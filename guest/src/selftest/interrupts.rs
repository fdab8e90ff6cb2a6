//! Checks of MSI-X masks and pending bits, and of interrupt suppression.
use super::{
    Bench, Check, Miss, must,
    rig::{PLAIN, Rig, SETTLE_NS, Setup, VECTOR},
};
use crate::{pci::Registers, virtio::ring::feature::EVENT_IDX};

/// Checks that a vector beyond the table is refused, and one within it accepted.
pub(super) fn vectors<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let transport = bench.transport;
    transport.negotiate(PLAIN)?;
    transport.msix.enable(bench.config);
    let vectors = transport.msix.vectors();
    transport.set_config_vector(vectors - 1)?;
    must!(
        transport.set_config_vector(vectors).is_err(),
        "vector {vectors} of {vectors} was taken"
    );
    Ok(())
}

/// Checks that a masked vector's interrupt becomes pending, and comes once when it is unmasked.
pub(super) fn pending<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    masked(bench, |masked| bench.transport.msix.mask(VECTOR, masked))
}

/// Checks the same with the mask of all vectors.
pub(super) fn function_mask<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    masked(bench, |masked| {
        bench.transport.msix.mask_all(bench.config, masked)
    })
}

fn masked<R: Registers + Clone>(bench: &Bench<'_, R>, mask: impl Fn(bool)) -> Check {
    let mut rig = Rig::new(bench, Setup::with(0))?;
    let msix = &bench.transport.msix;
    let before = (bench.taken)();
    rig.send.arm();
    rig.send_and_wait()?;
    bench.expect_interrupts(before, 1, "unmasked")?;
    must!(!msix.is_pending(VECTOR), "pending after it was delivered");

    let before = (bench.taken)();
    mask(true);
    for _ in 0..2 {
        rig.send.arm();
        rig.send_and_wait()?;
    }
    must!(
        bench.wait(SETTLE_NS * 20, || msix.is_pending(VECTOR)),
        "masked, but not pending"
    );
    bench.expect_interrupts(before, 0, "while masked")?;
    mask(false);
    bench.expect_interrupts(before, 1, "after it was unmasked")?;
    must!(
        !msix.is_pending(VECTOR),
        "still pending after it was unmasked"
    );

    // And no fewer than before.
    let before = (bench.taken)();
    rig.send.arm();
    rig.send_and_wait()?;
    bench.expect_interrupts(before, 1, "unmasked again")
}

/// Checks interrupt suppression without EVENT_IDX: the flag in the available ring.
pub(super) fn no_interrupt_flag<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let mut rig = Rig::new(bench, Setup::with(0))?;
    let before = (bench.taken)();
    rig.send.disarm();
    for _ in 0..3 {
        rig.send_and_wait()?;
    }
    bench.expect_interrupts(before, 0, "with NO_INTERRUPT set")?;
    rig.send.arm();
    rig.send_and_wait()?;
    bench.expect_interrupts(before, 1, "with NO_INTERRUPT cleared")
}

/// Checks EVENT_IDX: an interrupt when the index passes the requested one, neither before nor
/// after.
pub(super) fn event_idx<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let mut rig = Rig::new(bench, Setup::with(EVENT_IDX))?;
    if rig.features & EVENT_IDX == 0 {
        return Err(Miss::Lacks("EVENT_IDX"));
    }
    // The index starts at 0, the event too: the first buffer passes it.
    rig.send_and_wait()?;
    bench.wait(SETTLE_NS, || false);
    for more in [0, 3] {
        let before = (bench.taken)();
        rig.send.arm_after(more);
        for _ in 0..more {
            rig.send_and_wait()?;
        }
        bench.expect_interrupts(before, 0, "before the index that was asked for")?;
        rig.send_and_wait()?;
        bench.expect_interrupts(before, 1, "at the index that was asked for")?;
        for _ in 0..3 {
            rig.send_and_wait()?;
        }
        bench.expect_interrupts(before, 1, "behind the index that was asked for")?;
    }
    Ok(())
}
