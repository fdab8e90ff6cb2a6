//! The control queue. It carries one command at a time, and each is waited for.
use super::super::{
    DeviceError,
    dma::Dma,
    ring::{Ring, Segment},
    transport::Doorbell,
};
use crate::pci::Registers;

/// Classes and numbers of commands.
pub mod command {
    /// RX mode: promiscuous (a byte: on or off).
    pub const PROMISCUOUS: (u8, u8) = (0, 0);
    /// RX mode: all multicast (a byte: on or off).
    pub const ALL_MULTICAST: (u8, u8) = (0, 1);
    /// MAC filter table: two tables, each a 32-bit count and the addresses.
    pub const MAC_TABLE: (u8, u8) = (1, 0);
    /// MAC address of the card (6 bytes).
    pub const MAC_ADDRESS: (u8, u8) = (1, 1);
    /// Adds a VLAN to the filter (16 bits).
    pub const VLAN_ADD: (u8, u8) = (2, 0);
    /// Removes a VLAN from the filter (16 bits).
    pub const VLAN_DELETE: (u8, u8) = (2, 1);
    /// Number of queue pairs to use (16 bits).
    pub const QUEUE_PAIRS: (u8, u8) = (4, 0);
    /// Guest-side offloads to use (64 bits, by their feature numbers).
    pub const GUEST_OFFLOADS: (u8, u8) = (5, 0);
}

/// Control queue of a card.
pub struct Control<R> {
    ring: Ring,
    doorbell: Doorbell<R>,
    memory: Dma,
}

const DATA: usize = 2;
const DATA_MOST: usize = 1024;
const ANSWER: usize = DATA + DATA_MOST;

impl<R: Registers> Control<R> {
    /// Returns the control queue over a ring of the device.
    pub fn new(ring: Ring, doorbell: Doorbell<R>) -> Self {
        Control {
            ring,
            doorbell,
            memory: Dma::new(ANSWER + 1),
        }
    }

    /// Sends a command and waits for the device's answer. `relax` is called while there is none,
    /// and gives up by returning false.
    ///
    /// # Errors
    /// The device refuses the command, or `relax` gives up.
    pub fn send(
        &mut self,
        (class, command): (u8, u8),
        data: &[u8],
        mut relax: impl FnMut() -> bool,
    ) -> Result<(), DeviceError> {
        const PENDING: u8 = 0xFF;
        let (ring, memory) = (&mut self.ring, &mut self.memory);
        // SAFETY: the device has nothing in flight: every command is waited for.
        unsafe {
            memory.bytes_mut(0, DATA).copy_from_slice(&[class, command]);
            memory
                .bytes_mut(DATA, data.len().min(DATA_MOST))
                .copy_from_slice(&data[..data.len().min(DATA_MOST)]);
            memory.bytes_mut(ANSWER, 1)[0] = PENDING;
        }
        let segment = |offset, length: usize, device_writes| Segment {
            address: memory.address(offset),
            length: length as u32,
            device_writes,
        };
        let whole = [
            segment(0, DATA, false),
            segment(DATA, data.len(), false),
            segment(ANSWER, 1, true),
        ];
        let without_data = [whole[0], whole[2]];
        let segments = if data.is_empty() {
            &without_data[..]
        } else {
            &whole
        };
        let offered = ring
            .offer_indirect(segments)
            .or_else(|| ring.offer(segments));
        offered.ok_or(DeviceError::Missing("room in the control queue"))?;
        if ring.wants_kick() {
            self.doorbell.ring();
        }
        while !ring.has_used() {
            if !relax() {
                return Err(DeviceError::Silent("a control command"));
            }
        }
        if let Some(used) = ring.take_used() {
            ring.release(used.head);
        }
        // SAFETY: the device has returned the buffer.
        match unsafe { memory.bytes(ANSWER, 1) } {
            [0] => Ok(()),
            _ => Err(DeviceError::Refused { class, command }),
        }
    }
}
