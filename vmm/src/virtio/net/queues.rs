//! The enabled queues by their use (virtio 1.2 section 5.1.2).
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ};

use super::features::Features;
use crate::virtio::{ActivateError, EnabledQueue};

/// Queues that the driver enabled.
pub(super) struct Queues {
    /// Number of enabled queues in all.
    pub(super) enabled: usize,
    /// Receive and transmit queue of each pair, from pair 0 up to the first incomplete one.
    pub(super) pairs: Vec<(EnabledQueue, EnabledQueue)>,
    /// Control queue; `None` if it was not negotiated or not enabled.
    pub(super) control: Option<EnabledQueue>,
}

impl Queues {
    /// Sorts the enabled queues of a card with `pairs` queue pairs.
    ///
    /// # Errors
    /// The first pair is incomplete.
    pub(super) fn sort(
        enabled: Vec<EnabledQueue>,
        features: Features,
        pairs: usize,
    ) -> Result<Queues, ActivateError> {
        let count = enabled.len();
        let pairs = if features.has(VIRTIO_NET_F_MQ) {
            pairs
        } else {
            1
        };
        let mut queues: Vec<Option<EnabledQueue>> = (0..=2 * pairs).map(|_| None).collect();
        for queue in enabled {
            if let Some(place) = queues.get_mut(usize::from(queue.index)) {
                *place = Some(queue);
            }
        }
        let control = queues.pop().flatten();
        let mut queues = queues.into_iter();
        let mut whole = Vec::with_capacity(pairs);
        while let (Some(Some(rx)), Some(Some(tx))) = (queues.next(), queues.next()) {
            whole.push((rx, tx));
        }
        if whole.is_empty() {
            return Err(ActivateError::Queues {
                enabled: count,
                why: "the first receive or transmit queue is not among them",
            });
        }
        Ok(Queues {
            enabled: count,
            pairs: whole,
            control: control.filter(|_| features.has(VIRTIO_NET_F_CTRL_VQ)),
        })
    }
}
