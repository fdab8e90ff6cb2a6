//! MSI-X (PCI Local Bus 3.0 section 6.8.2): the capability, the table of messages and the array of
//! pending bits. [`super::Vectors`] signals the vectors.
//!
//! Every vector has an interrupt line of its own in the [`MsiFabric`] from the start. The line's
//! message is set in the fabric when the vector is about to be released or is written while it is
//! not held, and only if it differs from the message set before. So a driver that masks, moves and
//! unmasks a vector costs one change of routes, and one that only masks and unmasks costs none.
//!
//! Another process that signals a vector can't see whether it is held. So vectors that are shared
//! ([`Msix::share`]) are held by disconnecting their lines: the eventfd keeps what is signalled, which is
//! the pending bit then, and interrupts when the line is connected again.
use std::{
    io,
    os::fd::AsRawFd as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use vmm_sys_util::eventfd::EventFd;

use super::{Vectors, config::ConfigSpace};
use crate::{
    interrupt::{MsiFabric, MsiMessage},
    snapshot::{MsixState, SnapshotError},
};

/// Bytes per vector in the table.
const ENTRY: usize = 16;
const CAPABILITY_ID: u8 = 0x11;
/// Message control: MSI-X is enabled; all vectors of the function are masked.
const ENABLE: u16 = 1 << 15;
const FUNCTION_MASK: u16 = 1 << 14;
/// Vector control: this vector is masked.
const MASKED: u8 = 1;
/// Writable bits of an entry: message address (dword aligned), data, vector control.
const WRITABLE: [u8; ENTRY] = [
    0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, MASKED, 0, 0, 0,
];

/// MSI-X of one function. Its methods are called under the function's lock.
pub struct Msix {
    vectors: Arc<Vectors>,
    fabric: Arc<dyn MsiFabric>,
    entries: Vec<Entry>,
    /// Offset of the capability, 0 until it is added.
    capability: usize,
    enabled: bool,
    function_masked: bool,
    bus_master: bool,
    /// Number of routes, and of connections of lines and their ends, that the fabric refused.
    refused: Arc<AtomicU64>,
    /// Whether other processes signal the vectors.
    is_shared: bool,
}

struct Entry {
    bytes: [u8; ENTRY],
    gsi: u32,
    /// Message that was last set in the fabric, and whether the fabric accepted it.
    routed: Option<(MsiMessage, bool)>,
    /// Whether the fabric has its eventfd.
    is_connected: bool,
}

impl Entry {
    fn message(&self) -> MsiMessage {
        let [address, data] = [&self.bytes[..8], &self.bytes[8..12]];
        MsiMessage {
            address: u64::from_le_bytes(address.try_into().expect("8 bytes")),
            data: u32::from_le_bytes(data.try_into().expect("4 bytes")),
        }
    }

    fn is_masked(&self) -> bool {
        self.bytes[12] & MASKED != 0
    }
}

const RESET_ENTRY: [u8; ENTRY] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, MASKED, 0, 0, 0];

impl Msix {
    /// Returns `count` vectors (1 to 2048), masked, each connected to the fabric.
    ///
    /// # Errors
    /// An eventfd can't be created, or the fabric refuses a line.
    pub fn new(count: u16, fabric: Arc<dyn MsiFabric>) -> io::Result<Self> {
        assert!((1..=2048).contains(&count), "what the capability can say");
        let vectors = Arc::new(Vectors::new(count)?);
        let mut msix = Self {
            vectors,
            fabric,
            entries: Vec::with_capacity(count.into()),
            capability: 0,
            enabled: false,
            function_masked: false,
            bus_master: false,
            refused: Arc::default(),
            is_shared: false,
        };
        for vector in 0..count {
            let gsi = msix.fabric.connect(msix.vectors.irqfd(vector))?;
            msix.entries.push(Entry {
                bytes: RESET_ENTRY,
                gsi,
                routed: None,
                is_connected: true,
            });
        }
        Ok(msix)
    }

    /// Returns the vectors, with which the device's threads signal.
    pub fn vectors(&self) -> &Arc<Vectors> {
        &self.vectors
    }

    /// From now on another process may signal the vectors' eventfds ([`Vectors::line`]).
    ///
    /// # Errors
    /// The fabric does not disconnect the line of a vector that is held.
    pub fn share(&mut self) -> io::Result<()> {
        self.is_shared = true;
        (0..self.entries.len()).try_for_each(|vector| self.apply(vector))
    }

    /// Connects the line of a shared vector, or disconnects it.
    fn connect(&mut self, vector: u16, is_connected: bool) -> io::Result<()> {
        let entry = &mut self.entries[usize::from(vector)];
        if !self.is_shared || entry.is_connected == is_connected {
            return Ok(());
        }
        let signal = self.vectors.irqfd(vector);
        match self.fabric.set_held(entry.gsi, signal, !is_connected) {
            Ok(()) => entry.is_connected = is_connected,
            Err(error) => {
                self.refused.fetch_add(1, Relaxed);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Whether a shared vector was signalled while it was held.
    fn has_signal_at_line(&self, vector: u16) -> bool {
        let entry = self.entries.get(usize::from(vector));
        entry.is_some_and(|entry| !entry.is_connected) && is_readable(self.vectors.irqfd(vector))
    }

    fn is_pending(&self, vector: u16) -> bool {
        self.vectors.is_pending(vector) || self.has_signal_at_line(vector)
    }

    /// Returns the number of routes that the fabric refused, because the message is no valid
    /// interrupt, and of lines that it did not connect or disconnect.
    pub fn refused(&self) -> &Arc<AtomicU64> {
        &self.refused
    }

    /// Returns the length of the table in bytes.
    pub fn table_len(&self) -> u64 {
        (self.entries.len() * ENTRY) as u64
    }

    /// Returns the length of the pending bit array in bytes: whole qwords.
    pub fn pba_len(&self) -> u64 {
        (self.entries.len().div_ceil(64) * 8) as u64
    }

    /// Appends the capability: the table at `table` and the pending bits at `pba` in BAR `bar`.
    pub fn add_capability(&mut self, config: &mut ConfigSpace, bar: u8, table: u32, pba: u32) {
        let size = u16::try_from(self.entries.len() - 1).expect("at most 2047");
        let mut body = [0; 10];
        body[..2].copy_from_slice(&size.to_le_bytes());
        body[2..6].copy_from_slice(&(table | u32::from(bar)).to_le_bytes());
        body[6..].copy_from_slice(&(pba | u32::from(bar)).to_le_bytes());
        let mut writable = [0; 10];
        writable[..2].copy_from_slice(&(ENABLE | FUNCTION_MASK).to_le_bytes());
        self.capability = config.add_capability(CAPABILITY_ID, &body, &writable);
    }

    /// Updates the vectors from configuration space. Must be called after each write to it.
    pub fn follow(&mut self, config: &ConfigSpace) {
        let control = u16::from_le_bytes(config.array(self.capability + 2));
        let now = (
            control & ENABLE != 0,
            control & FUNCTION_MASK != 0,
            config.is_bus_master(),
        );
        if now == (self.enabled, self.function_masked, self.bus_master) {
            return;
        }
        (self.enabled, self.function_masked, self.bus_master) = now;
        for vector in 0..self.entries.len() {
            self.update(vector);
        }
    }

    /// Reads the table. The access lies inside the BAR.
    pub fn table_read(&self, offset: u64, into: &mut [u8]) {
        for (at, byte) in (offset..).zip(into) {
            let entry = self.entries.get((at / ENTRY as u64) as usize);
            *byte = entry.map_or(0, |entry| entry.bytes[(at % ENTRY as u64) as usize]);
        }
    }

    /// Writes the table. The access lies inside the BAR.
    pub fn table_write(&mut self, offset: u64, bytes: &[u8]) {
        for (at, byte) in (offset..).zip(bytes) {
            if let Some(entry) = self.entries.get_mut((at / ENTRY as u64) as usize) {
                let at = (at % ENTRY as u64) as usize;
                let mask = WRITABLE[at];
                entry.bytes[at] = entry.bytes[at] & !mask | byte & mask;
            }
        }
        // All bytes of an access take effect at once.
        let touched = offset..offset + bytes.len() as u64;
        let vectors = touched.start / ENTRY as u64..touched.end.div_ceil(ENTRY as u64);
        for vector in vectors.start as usize..self.entries.len().min(vectors.end as usize) {
            self.update(vector);
        }
    }

    /// Reads the pending bits. They can't be written.
    pub fn pba_read(&self, offset: u64, into: &mut [u8]) {
        for (at, byte) in (offset..).zip(into) {
            let bit = |bit: u64| {
                let vector = at
                    .checked_mul(8)
                    .and_then(|at| u16::try_from(at + bit).ok());
                vector.is_some_and(|vector| self.is_pending(vector))
            };
            *byte = (0..8).map(|n| u8::from(bit(n)) << n).sum();
        }
    }

    /// As [`Msix::apply`]; what the fabric refuses is counted.
    fn update(&mut self, vector: usize) {
        let _ = self.apply(vector);
    }

    /// Holds a vector, or sets its message in the fabric and releases it.
    ///
    /// # Errors
    /// It is to be held, and the fabric does not disconnect its line.
    fn apply(&mut self, vector: usize) -> io::Result<()> {
        let number = u16::try_from(vector).expect("at most 2047");
        let entry = &mut self.entries[vector];
        let usable = self.enabled && !self.function_masked && self.bus_master;
        if !usable || entry.is_masked() {
            self.vectors.hold(number);
            return self.connect(number, false);
        }
        let message = entry.message();
        let agreed = match entry.routed {
            Some((set, agreed)) if set == message => agreed,
            _ => {
                let agreed = self.fabric.route(entry.gsi, message).is_ok();
                self.refused.fetch_add((!agreed).into(), Relaxed);
                entry.routed = Some((message, agreed));
                agreed
            }
        };
        if agreed && self.connect(number, true).is_ok() {
            self.vectors.release(number);
            return Ok(());
        }
        self.vectors.hold(number);
        self.connect(number, false)
    }

    /// Returns what a snapshot says of the vectors.
    pub fn state(&self) -> MsixState {
        let vectors = 0..u16::try_from(self.entries.len()).unwrap_or(u16::MAX);
        MsixState {
            table: self.entries.iter().flat_map(|entry| entry.bytes).collect(),
            pending: vectors.filter(|vector| self.is_pending(*vector)).collect(),
        }
    }

    /// Sets the state of a snapshot; all vectors are held before. `config`: the function's, restored.
    ///
    /// # Errors
    /// The table is of another size.
    pub fn restore(
        &mut self,
        state: &MsixState,
        config: &ConfigSpace,
    ) -> Result<(), SnapshotError> {
        if state.table.len() != self.entries.len() * ENTRY {
            let (found, wanted) = (state.table.len() / ENTRY, self.entries.len());
            let why = format!("{found} interrupt vectors in the place of {wanted}");
            return Err(SnapshotError::Mismatch(why));
        }
        for (entry, bytes) in self.entries.iter_mut().zip(state.table.chunks_exact(ENTRY)) {
            for (at, mask) in WRITABLE.iter().enumerate() {
                entry.bytes[at] = entry.bytes[at] & !mask | bytes[at] & mask;
            }
        }
        for vector in &state.pending {
            self.vectors.signal(*vector);
        }
        self.follow(config);
        Ok(())
    }

    /// Clears all pending bits, after a reset of the device.
    pub fn forget_pending(&self) {
        for vector in 0..self.entries.len() {
            let number = u16::try_from(vector).expect("at most 2047");
            self.vectors.forget(number);
            if self.has_signal_at_line(number) {
                let _ = self.vectors.irqfd(number).read();
            }
        }
    }

    /// Restores the state after power-on, for a function level reset. The owner of configuration
    /// space resets that.
    pub fn reset(&mut self, config: &ConfigSpace) {
        for entry in &mut self.entries {
            entry.bytes = RESET_ENTRY;
        }
        for vector in 0..self.entries.len() {
            self.update(vector);
        }
        self.follow(config);
        self.forget_pending();
    }
}

/// Returns whether an eventfd was signalled since it was read.
fn is_readable(event: &EventFd) -> bool {
    let mut wanted = libc::pollfd {
        fd: event.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one element, which outlives the call.
    unsafe { libc::poll(&raw mut wanted, 1, 0) == 1 }
}

impl Drop for Msix {
    fn drop(&mut self) {
        for (vector, entry) in (0..).zip(&self.entries) {
            self.fabric
                .disconnect(entry.gsi, self.vectors.irqfd(vector));
        }
    }
}

#[cfg(test)]
#[path = "msix_test.rs"]
mod tests;
