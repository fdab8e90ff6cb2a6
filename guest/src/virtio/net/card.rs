//! Initialisation of a card: features, queues, vectors, number of pairs.
use alloc::vec::Vec;

use super::{
    super::{
        DeviceError,
        transport::{NO_VECTOR, Transport},
    },
    Control, Pair, command, feature,
};
use crate::{
    pci::{ConfigSpace, Registers},
    platform::Platform,
};

/// Interrupt routing of a card: queue pair `n` interrupts CPU `n`, a change of the configuration
/// interrupts CPU 0.
#[derive(Clone, Copy, Debug)]
pub struct Vectors<'a> {
    /// Local APIC ids of the CPUs.
    pub apic_ids: &'a [u32],
    /// Interrupt vector of queue pairs.
    pub queue: u8,
    /// Interrupt vector of configuration changes.
    pub config: u8,
    /// Returns how many interrupts of its queue pair the calling CPU has taken.
    pub taken: fn() -> u64,
}

/// Network card in operation.
pub struct Card<R> {
    /// Feature bits that were negotiated.
    pub features: u64,
    /// Queue pairs, until each is moved to its CPU.
    pub pairs: Vec<Pair<R>>,
    /// Largest number of pairs that the card supports.
    pub most_pairs: u16,
    /// Control queue; `None` without one.
    pub control: Option<Control<R>>,
}

/// Fields of the device's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) mac: [u8; 6],
    pub(crate) most_pairs: u16,
    pub(super) mtu: u16,
}

impl Config {
    /// Reads the fields that the device has by its `features`. One without a MAC address has
    /// `own_mac`.
    pub(crate) fn read<R: Registers + Clone>(
        transport: &Transport<R>,
        features: u64,
        own_mac: [u8; 6],
    ) -> Self {
        transport.device_config(|device| {
            let mut mac = own_mac;
            if features & feature::MAC != 0 {
                mac = core::array::from_fn(|at| device.read8(at));
            }
            let when = |bit, value: &dyn Fn() -> u16, other| {
                if features & bit != 0 { value() } else { other }
            };
            Config {
                mac,
                most_pairs: when(feature::MQ, &|| device.read16(8), 1),
                mtu: when(feature::MTU, &|| device.read16(10), 1500),
            }
        })
    }
}

impl<R: Registers + Clone> Card<R> {
    /// Resets and initialises a card, with those of the `wanted` features that it offers, at most
    /// as many pairs as there are CPUs, and queues of `size` at most. A card without a MAC address
    /// has `own_mac`.
    ///
    /// # Errors
    /// The device lacks a feature that is needed, or behaves wrongly.
    pub fn bring_up(
        transport: &Transport<R>,
        config_space: &dyn ConfigSpace,
        wanted: u64,
        size: u16,
        vectors: Vectors<'_>,
        own_mac: [u8; 6],
    ) -> Result<Self, DeviceError> {
        let features =
            transport.negotiate(without_orphans(wanted, transport.offered_features()))?;
        let config = Config::read(transport, features, own_mac);
        let most_vectors = transport.msix.vectors();
        let pairs = config
            .most_pairs
            .min(vectors.apic_ids.len() as u16)
            .min(most_vectors - 1)
            .max(1);

        transport.msix.enable(config_space);
        transport.msix.route(0, vectors.apic_ids[0], vectors.config);
        transport.set_config_vector(0)?;
        for (vector, apic_id) in (1..).zip(&vectors.apic_ids[..usize::from(pairs)]) {
            transport.msix.route(vector, *apic_id, vectors.queue);
        }
        let mut made = Vec::new();
        for index in 0..pairs {
            let vector = if most_vectors > 1 { index + 1 } else { 0 };
            let receive = transport.make_queue(index * 2, size, vector, features)?;
            let send = transport.make_queue(index * 2 + 1, size, vector, features)?;
            made.push(Pair::new(
                (index, pairs),
                &config,
                features,
                receive,
                send,
                vectors.taken,
            ));
        }
        let mut control = None;
        if features & feature::CTRL_VQ != 0 {
            // Behind all pairs that the device has, used or not.
            let index = if features & feature::MQ != 0 {
                config.most_pairs * 2
            } else {
                2
            };
            let (ring, doorbell) = transport.make_queue(index, 64, NO_VECTOR, features)?;
            control = Some(Control::new(ring, doorbell));
        }
        transport.start();
        for pair in &mut made {
            pair.start();
        }
        let mut card = Card {
            features,
            pairs: made,
            most_pairs: config.most_pairs,
            control,
        };
        if pairs > 1 {
            // An active card must not outlive its memory.
            card.set_pairs(pairs)
                .inspect_err(|_| transport.reset().unwrap_or(()))?;
        }
        Ok(card)
    }

    /// Sets the number of pairs that the device uses.
    ///
    /// # Errors
    /// There is no control queue, or the device refuses the command.
    pub fn set_pairs(&mut self, pairs: u16) -> Result<(), DeviceError> {
        let control = self
            .control
            .as_mut()
            .ok_or(DeviceError::Missing("control queue"))?;
        control.send(command::QUEUE_PAIRS, &pairs.to_le_bytes(), patience())
    }
}

/// Returns a random MAC address, locally administered, for a card that has none (virtio 1.2,
/// 5.1.4.2).
pub fn local_mac(platform: &dyn Platform) -> [u8; 6] {
    let mut mac = [0; 6];
    platform.random(&mut mac);
    mac[0] = mac[0] & !1 | 2;
    mac
}

/// Returns a function that returns false after a number of calls, to give up waiting without a
/// clock.
pub(crate) fn patience() -> impl FnMut() -> bool {
    let mut left = 400_000_000_u64;
    move || {
        core::hint::spin_loop();
        left -= 1;
        left > 0
    }
}

/// Removes features of whose dependencies each is missing (virtio 1.2, 5.1.3.1).
fn without_orphans(wanted: u64, offered: u64) -> u64 {
    use feature::*;
    let mut features = wanted & offered;
    for (needs, what) in [
        (CSUM, HOST_TSO4 | HOST_USO),
        (GUEST_CSUM, GUEST_TSO4 | GUEST_TSO6),
        (GUEST_TSO4 | GUEST_TSO6, GUEST_ECN),
        (
            CTRL_VQ,
            CTRL_RX | CTRL_VLAN | CTRL_MAC_ADDR | CTRL_GUEST_OFFLOADS | GUEST_ANNOUNCE | MQ,
        ),
        (STATUS, GUEST_ANNOUNCE),
    ] {
        if features & needs == 0 {
            features &= !what;
        }
    }
    features
}

#[cfg(test)]
#[path = "card_test.rs"]
mod tests;
