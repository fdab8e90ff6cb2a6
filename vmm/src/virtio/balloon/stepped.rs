//! The balloon without its thread, for fuzz targets: the same input always has the same effect.
use std::sync::Arc;

use super::{BalloonCounters, requests::Requests};
use crate::{
    GuestMemory,
    virtio::{EnabledQueue, NeedsReset, Signals},
};

/// Carries out what is in the queues, in `turns` turns at most.
///
/// # Errors
/// The driver broke a ring.
pub fn serve(
    memory: Arc<GuestMemory>,
    features: u64,
    queues: &[EnabledQueue],
    (counters, signals): (&BalloonCounters, &dyn Signals),
    turns: usize,
) -> Result<(), NeedsReset> {
    let mut requests = Requests::new(queues, features, memory, counters)?;
    for _ in 0..turns {
        if !requests.turn(signals)? && !requests.listen()? {
            break;
        }
    }
    Ok(())
}
