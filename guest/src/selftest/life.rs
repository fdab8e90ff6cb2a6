//! Checks of reset and reactivation.
use super::{
    Bench, Check, must, question,
    rig::{HEADER, Rig, Setup, Shape},
};
use crate::{
    pci::Registers,
    virtio::{
        net::WANTED,
        ring::feature::{EVENT_IDX, INDIRECT_DESC},
        transport::status,
    },
};

/// Checks that the status is 0 after a reset, and the offered features are as before.
pub(super) fn reset<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let transport = bench.transport;
    let offered = transport.offered_features();
    transport.negotiate(WANTED)?;
    let expected = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
    must!(
        transport.status() == expected,
        "status {:#x} instead of {expected:#x}",
        transport.status()
    );
    transport.reset()?;
    must!(
        transport.status() == 0,
        "status {:#x} after a reset",
        transport.status()
    );
    let again = transport.offered_features();
    must!(
        again == offered,
        "features {offered:#x} before, {again:#x} after a reset"
    );
    Ok(())
}

/// Activates and resets in a loop, with each buffer shape and with frames in flight. The card must
/// work each time.
pub(super) fn reset_and_again<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let offered = bench.transport.offered_features();
    for round in 0..24 {
        let (shape, features) = match round % 4 {
            0 => (Shape::One, 0),
            1 => (Shape::Chain, EVENT_IDX),
            2 if offered & INDIRECT_DESC != 0 => (Shape::Indirect, EVENT_IDX | INDIRECT_DESC),
            _ => (Shape::Chain, 0),
        };
        let setup = Setup {
            shape,
            ..Setup::with(features)
        };
        let mut rig = Rig::new(bench, setup)?;
        rig.ask(|_| [0; HEADER])?;
        // In flight at the reset: a sent frame, and its answer.
        rig.send([0; HEADER], &question::ask(rig.mac, round))?;
        bench.transport.reset()?;
        let (sent, received) = (rig.send.used_index(), rig.receive.used_index());
        bench.wait(1_000_000, || false);
        let quiet = (sent, received) == (rig.send.used_index(), rig.receive.used_index());
        must!(quiet, "the device wrote to a ring after its reset");
    }
    Ok(())
}
