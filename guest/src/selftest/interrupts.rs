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

/// Checks interrupt suppression without EVENT_IDX: the flag in the available ring. A device should
/// heed the flag; it must interrupt without.
pub(super) fn no_interrupt_flag<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let mut rig = Rig::new(bench, Setup::with(0))?;
    let before = (bench.taken)();
    rig.send.disarm();
    for _ in 0..3 {
        rig.send_and_wait()?;
    }
    let unwanted = settled(bench) - before;
    let before = (bench.taken)();
    rig.send.arm();
    rig.send_and_wait()?;
    bench.expect_interrupts(before, 1, "with NO_INTERRUPT cleared")?;
    heeded(unwanted, "NO_INTERRUPT")
}

/// Checks EVENT_IDX: an interrupt when the index passes the requested one. A device should not
/// interrupt before and after.
pub(super) fn event_idx<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let mut rig = Rig::new(bench, Setup::with(EVENT_IDX))?;
    if rig.features & EVENT_IDX == 0 {
        return Err(Miss::Lacks("EVENT_IDX"));
    }
    // The index starts at 0, the event too: the first buffer passes it.
    rig.send_and_wait()?;
    settled(bench);
    let mut unwanted = 0;
    for more in [0, 3] {
        let before = (bench.taken)();
        rig.send.arm_after(more);
        for _ in 0..more {
            rig.send_and_wait()?;
        }
        let at = settled(bench);
        rig.send_and_wait()?;
        bench.expect_interrupts(at, 1, "at the index that was asked for")?;
        for _ in 0..3 {
            rig.send_and_wait()?;
        }
        unwanted += settled(bench) - before - 1;
    }
    heeded(unwanted, "EVENT_IDX")
}

/// Waits until no more interrupts come. Returns their number.
fn settled<R>(bench: &Bench<'_, R>) -> u64 {
    bench.wait(SETTLE_NS, || false);
    (bench.taken)()
}

/// Interrupts that were not asked for only cost time: they are no failure.
fn heeded(unwanted: u64, name: &'static str) -> Check {
    match unwanted {
        0 => Ok(()),
        _ => Err(Miss::Lacks(name)),
    }
}

#[cfg(test)]
#[path = "interrupts_test.rs"]
mod tests;
