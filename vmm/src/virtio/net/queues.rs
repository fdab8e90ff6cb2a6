//! The queues by their use (virtio 1.2 section 5.1.2).
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ};

use super::features::Features;
use crate::virtio::{ActivateError, EnabledQueue};

/// What the driver enabled.
pub(super) struct Queues {
    /// How many in all.
    pub(super) enabled: usize,
    /// Receive and transmit, from the first on.
    pub(super) pairs: Vec<(EnabledQueue, EnabledQueue)>,
    /// Only when it was negotiated.
    pub(super) control: Option<EnabledQueue>,
}

impl Queues {
    /// For a card with so many pairs.
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
