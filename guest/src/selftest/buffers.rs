//! Checks of buffer descriptions and contents.
use super::{
    Bench, Check, Miss, must, question,
    rig::{HEADER, Rig, Setup, Shape},
};
use crate::{
    pci::Registers,
    virtio::{
        net::feature::{CSUM, MRG_RXBUF},
        ring::feature::{EVENT_IDX, INDIRECT_DESC},
    },
};

const ROUNDS: usize = 40;

/// Exchanges frames both ways, with one descriptor each, more often than there are buffers.
pub(super) fn plain<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    exchange(bench, Setup::with(0), 0, "")
}

/// Exchanges frames in chains of three descriptors.
pub(super) fn chained<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let setup = Setup {
        shape: Shape::Chain,
        ..Setup::with(0)
    };
    exchange(bench, setup, 0, "")
}

/// Exchanges frames in indirect tables of three descriptors.
pub(super) fn indirect<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let setup = Setup {
        shape: Shape::Indirect,
        ..Setup::with(INDIRECT_DESC | EVENT_IDX)
    };
    exchange(bench, setup, INDIRECT_DESC, "INDIRECT_DESC")
}

fn exchange<R: Registers + Clone>(
    bench: &Bench<'_, R>,
    setup: Setup,
    needs: u64,
    name: &'static str,
) -> Check {
    if bench.transport.offered_features() & needs != needs {
        return Err(Miss::Lacks(name));
    }
    let mut rig = Rig::new(bench, setup)?;
    for _ in 0..ROUNDS {
        rig.ask(|_| [0; HEADER])?;
    }
    must!(
        rig.send.room() == usize::from(rig.send.size()),
        "send descriptors are lost"
    );
    Ok(())
}

/// Checks that a frame larger than a buffer arrives in several.
pub(super) fn mergeable<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let setup = Setup {
        buffer: 128,
        ..Setup::with(MRG_RXBUF)
    };
    let mut rig = Rig::new(bench, setup)?;
    if rig.features & MRG_RXBUF == 0 {
        return Err(Miss::Lacks("MRG_RXBUF"));
    }
    for _ in 0..ROUNDS {
        let (frame, buffers) = rig.ask(|_| [0; HEADER])?;
        let least = frame.len().div_ceil(rig.length);
        must!(
            buffers == least,
            "{} bytes came in {buffers} buffers of {}",
            frame.len(),
            rig.length
        );
    }
    Ok(())
}

/// Checks that the device completes a checksum: a wrong one would get no answer.
pub(super) fn checksum<R: Registers + Clone>(bench: &Bench<'_, R>) -> Check {
    let mut rig = Rig::new(bench, Setup::with(CSUM))?;
    if rig.features & CSUM == 0 {
        return Err(Miss::Lacks("CSUM"));
    }
    rig.ask(|frame| {
        const NEEDS_CSUM: u8 = 1;
        question::leave_checksum(frame);
        let mut header = [0; HEADER];
        header[0] = NEEDS_CSUM;
        header[6..8].copy_from_slice(&question::CHECKSUM.0.to_le_bytes());
        header[8..10].copy_from_slice(&question::CHECKSUM.1.to_le_bytes());
        header
    })?;
    Ok(())
}
