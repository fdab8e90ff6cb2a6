//! Configuration space of a function with a type 0 header: bytes, and a mask of the bits that the
//! guest may change. BAR sizing needs no code of its own: the address bits below the BAR's length
//! are not writable, so all-ones reads back as the length's complement (PCI Local Bus 3.0 section
//! 6.2.5.1).
use super::Window;
use crate::snapshot::SnapshotError;

/// Size of configuration space without PCI Express's extension, bytes. The extension reads as
/// zeroes: it has no extended capability.
pub const SIZE: usize = 256;
/// Offset of the command register.
pub const COMMAND: usize = 0x04;
/// Offset of the first BAR.
pub const BAR0: usize = 0x10;
/// Command register: memory decoding.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command register: bus mastering, that is DMA and MSI.
pub const COMMAND_BUS_MASTER: u16 = 1 << 2;

const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u8 = 1 << 4;
const CAPABILITIES_POINTER: usize = 0x34;
const FIRST_CAPABILITY: usize = 0x40;
/// Command register: parity error response, SERR#, INTx disable. They have no effect here, but
/// drivers set them.
const COMMAND_WITHOUT_EFFECT: u16 = 1 << 6 | 1 << 8 | 1 << 10;

/// Identification registers of a function.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Vendor id, assigned by the PCI-SIG.
    pub vendor: u16,
    /// Device id, assigned by the vendor.
    pub device: u16,
    /// Revision id, assigned by the vendor.
    pub revision: u8,
    /// Class, subclass and programming interface, 24 bits.
    pub class: u32,
    /// Vendor id of the subsystem.
    pub subsystem_vendor: u16,
    /// Device id of the subsystem.
    pub subsystem: u16,
}

/// Address range of a memory BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// The BAR's address is below 4 GiB.
    Memory32,
    /// The BAR's address may be anywhere. It takes two registers.
    Memory64,
}

#[derive(Clone, Copy, Debug)]
struct Bar {
    number: u8,
    kind: BarKind,
    len: u64,
}

/// Configuration space of a function.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: [u8; SIZE],
    /// Contents to which [`ConfigSpace::reset`] returns.
    initial: [u8; SIZE],
    writable: [u8; SIZE],
    bars: Vec<Bar>,
    /// Offset of the next capability, and offset of the link that will point to it.
    free: usize,
    link: usize,
}

impl ConfigSpace {
    /// Returns the space of a function without BARs and capabilities. Only the command register and
    /// the interrupt line, a scratch byte, are writable.
    pub fn new(identity: Identity) -> Self {
        let mut space = Self {
            bytes: [0; SIZE],
            initial: [0; SIZE],
            writable: [0; SIZE],
            bars: Vec::new(),
            free: FIRST_CAPABILITY,
            link: CAPABILITIES_POINTER,
        };
        let command = COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_WITHOUT_EFFECT;
        space.writable[COMMAND..][..2].copy_from_slice(&command.to_le_bytes());
        space.writable[0x3c] = 0xff;
        space.preset(0x00, &identity.vendor.to_le_bytes());
        space.preset(0x02, &identity.device.to_le_bytes());
        space.preset(0x08, &[identity.revision]);
        space.preset(0x09, &identity.class.to_le_bytes()[..3]);
        space.preset(0x2c, &identity.subsystem_vendor.to_le_bytes());
        space.preset(0x2e, &identity.subsystem.to_le_bytes());
        space
    }

    /// Adds a memory BAR, not prefetchable, of `len` bytes: a power of two, at least 16.
    ///
    /// # Panics
    /// The number or the length is invalid. They come from code, never from a guest.
    pub fn add_bar(&mut self, number: u8, kind: BarKind, len: u64) {
        let registers = match kind {
            BarKind::Memory32 => 1,
            BarKind::Memory64 => 2,
        };
        assert!(
            usize::from(number) + registers <= 6,
            "a BAR register of six"
        );
        assert!(len.is_power_of_two() && len >= 16, "a BAR's length");
        let at = BAR0 + 4 * usize::from(number);
        let mask = !(len - 1);
        self.writable[at..][..4 * registers].copy_from_slice(&mask.to_le_bytes()[..4 * registers]);
        if kind == BarKind::Memory64 {
            self.preset(at, &[0b100]);
        }
        self.bars.push(Bar { number, kind, len });
    }

    /// Appends a capability. Its `body` follows the id and the link; `writable` masks the bits of
    /// the body that the guest may change. Returns the capability's offset.
    ///
    /// # Panics
    /// No room is left. Capabilities come from code, never from a guest.
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> usize {
        assert_eq!(body.len(), writable.len());
        let at = self.free;
        assert!(at + 2 + body.len() <= SIZE, "room for a capability");
        let link = self.link;
        self.preset(link, &[u8::try_from(at).expect("below 256")]);
        self.preset(STATUS, &[STATUS_CAPABILITIES]);
        self.preset(at, &[id]);
        self.preset(at + 2, body);
        self.writable[at + 2..][..body.len()].copy_from_slice(writable);
        self.link = at + 1;
        self.free = (at + 2 + body.len()).next_multiple_of(4);
        at
    }

    fn preset(&mut self, at: usize, bytes: &[u8]) {
        self.initial[at..][..bytes.len()].copy_from_slice(bytes);
        self.bytes[at..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Reads from `offset`. Bytes beyond the end read as zeroes.
    pub fn read(&self, offset: u16, into: &mut [u8]) {
        for (at, byte) in (usize::from(offset)..).zip(into) {
            *byte = self.bytes.get(at).copied().unwrap_or(0);
        }
    }

    /// Writes the writable bits from `offset`.
    pub fn write(&mut self, offset: u16, bytes: &[u8]) {
        for (at, byte) in (usize::from(offset)..SIZE).zip(bytes) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | byte & mask;
        }
    }

    /// Returns all bytes, for a snapshot.
    pub(crate) fn state(&self) -> Vec<u8> {
        self.bytes.to_vec()
    }

    /// Sets the bytes of a snapshot.
    ///
    /// # Errors
    /// They are of another function: bits differ that no guest can write.
    pub(crate) fn restore(&mut self, bytes: &[u8]) -> Result<(), SnapshotError> {
        let is_same = |(at, byte): (usize, &u8)| (self.bytes[at] ^ byte) & !self.writable[at] == 0;
        if bytes.len() != SIZE || !bytes.iter().enumerate().all(is_same) {
            let device = u16::from_le_bytes(self.array(2));
            let why = format!("another function in the place of PCI device {device:#x}");
            return Err(SnapshotError::Mismatch(why));
        }
        self.bytes.copy_from_slice(bytes);
        Ok(())
    }

    /// Writes all bits, as the function itself.
    pub(crate) fn set(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Returns the `N` bytes at `at`.
    pub(crate) fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        self.bytes[at..][..N].try_into().expect("N of them")
    }

    fn command(&self) -> u16 {
        u16::from_le_bytes(self.array(COMMAND))
    }

    /// Returns whether the guest lets the function do DMA and send MSIs.
    pub fn is_bus_master(&self) -> bool {
        self.command() & COMMAND_BUS_MASTER != 0
    }

    /// Returns the addresses of the BARs; none while memory decoding is off.
    pub fn windows(&self) -> Vec<Window> {
        if self.command() & COMMAND_MEMORY == 0 {
            return Vec::new();
        }
        let window = |bar: &Bar| {
            let at = BAR0 + 4 * usize::from(bar.number);
            let raw = match bar.kind {
                BarKind::Memory32 => u32::from_le_bytes(self.array(at)).into(),
                BarKind::Memory64 => u64::from_le_bytes(self.array(at)),
            };
            let start = raw & !0xf;
            start.checked_add(bar.len)?;
            Some(Window {
                bar: bar.number,
                start,
                len: bar.len,
            })
        };
        self.bars.iter().filter_map(window).collect()
    }

    /// Returns the length of a BAR in bytes; `None` if there is no such BAR.
    pub fn bar_len(&self, number: u8) -> Option<u64> {
        let bar = self.bars.iter().find(|bar| bar.number == number)?;
        Some(bar.len)
    }

    /// Restores every register, BARs and command included, to its initial value, as a function
    /// level reset does.
    pub fn reset(&mut self) {
        self.bytes = self.initial;
    }
}

#[cfg(test)]
#[path = "config_test.rs"]
mod tests;
