//! The PCI root: dispatches accesses to ports, to ECAM and to BARs to the functions.
//!
//! There is one lock per function, held while the function handles an access, and one for the list
//! of windows, held while it is searched or changed. The second is taken inside the first when a
//! configuration write moves a BAR, and alone otherwise.
use std::{
    ops::Range,
    sync::{
        Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use super::{PciDevice, Window, config::BAR0, host_bridge::HostBridge};
use crate::snapshot::{FunctionState, SnapshotError};

/// Guest addresses that belong to PCI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Range below 4 GiB, for 32-bit BARs.
    pub mmio32: Range<u64>,
    /// Range for 64-bit BARs. If it is empty, they share the other range.
    pub mmio64: Range<u64>,
}

/// Reason why a device can't be added.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PciError {
    /// All 32 device numbers are taken.
    #[error("the PCI bus has 32 devices, and no number for another")]
    BusFull,
    /// A BAR does not fit the free part of the windows.
    #[error("no room for BAR {bar} of {len:#x} bytes in PCI's windows; the last is {window:x?}")]
    NoRoom {
        /// Number of the BAR.
        bar: u8,
        /// Length of the BAR in bytes.
        len: u64,
        /// Window that was tried last.
        window: Range<u64>,
    },
}

/// Address port, 0xCF8: takes whole, aligned dwords only.
const ADDRESS_PORT: u16 = 0xcf8;
/// First data port. They are 0xCFC to 0xCFF.
const DATA_PORT: u16 = 0xcfc;
/// Writable bits of the address register: enable, bus, device, function, dword.
const ADDRESS_BITS: u32 = 0x80ff_fffc;
const ADDRESS_ENABLE: u32 = 1 << 31;
/// Bytes of ECAM per function.
const ECAM_FUNCTION: u64 = 4096;

/// PCI root complex: one bus with a host bridge as device 0.
pub struct Root {
    functions: Vec<Mutex<Box<dyn PciDevice>>>,
    windows: Windows,
    /// Free part of the windows, from which the next BAR is allocated.
    free: Windows,
    /// Configuration address register, at port 0xCF8.
    address: AtomicU32,
    /// Windows that are forwarded, sorted by device number.
    forwarded: RwLock<Vec<Forwarded>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Forwarded {
    device: usize,
    window: Window,
}

impl Root {
    /// Returns a bus with a host bridge only.
    pub fn new(windows: Windows) -> Self {
        Self {
            functions: vec![Mutex::new(Box::new(HostBridge::new()))],
            free: windows.clone(),
            windows,
            address: AtomicU32::new(0),
            forwarded: RwLock::new(Vec::new()),
        }
    }

    /// Adds a function as the next device, and assigns addresses to its BARs as firmware does.
    /// Decoding stays off until the guest turns it on. Returns the device number, 1 to 31.
    ///
    /// # Errors
    /// The bus is full, or a BAR does not fit the windows.
    pub fn add(&mut self, mut device: Box<dyn PciDevice>) -> Result<u8, PciError> {
        if self.functions.len() == 32 {
            return Err(PciError::BusFull);
        }
        self.assign_bars(device.as_mut())?;
        self.functions.push(Mutex::new(device));
        Ok(u8::try_from(self.functions.len() - 1).expect("at most 31"))
    }

    fn assign_bars(&mut self, device: &mut dyn PciDevice) -> Result<(), PciError> {
        let mut bar = 0;
        while bar < 6 {
            let at = u16::try_from(BAR0).expect("an offset") + 4 * u16::from(bar);
            let mut size = [0xff; 8];
            let halves = [at, at + 4];
            device.config_write(at, &size[..4]);
            device.config_read(at, &mut size[..4]);
            let is_64 = size[0] & 0b110 == 0b100;
            if is_64 {
                device.config_write(halves[1], &[0xff; 4]);
                device.config_read(halves[1], &mut size[4..]);
            }
            let mask = u64::from_le_bytes(size) & !0xf;
            let len = mask.wrapping_neg();
            if size[..4] != [0; 4] {
                let address = self.place(bar, len, is_64)?.to_le_bytes();
                device.config_write(halves[0], &address[..4]);
                if is_64 {
                    device.config_write(halves[1], &address[4..]);
                }
            }
            bar += if is_64 { 2 } else { 1 };
        }
        Ok(())
    }

    /// Allocates the address of a BAR. A 64-bit BAR goes below 4 GiB only when there is no other
    /// room.
    fn place(&mut self, bar: u8, len: u64, is_64: bool) -> Result<u64, PciError> {
        let Windows { mmio32, mmio64 } = &mut self.free;
        let mut windows = [mmio64, mmio32].into_iter().skip(usize::from(!is_64));
        let fitting = |window: &mut Range<u64>| {
            let start = window.start.checked_next_multiple_of(len)?;
            let end = start.checked_add(len)?;
            (end <= window.end).then(|| {
                window.start = end;
                start
            })
        };
        windows.find_map(fitting).ok_or_else(|| PciError::NoRoom {
            bar,
            len,
            window: self.windows.mmio32.clone(),
        })
    }

    /// Reads a port, 0xCF8 to 0xCFF. Unclaimed bytes read as ones.
    pub fn port_read(&self, port: u16, into: &mut [u8]) {
        into.fill(0xff);
        if port == ADDRESS_PORT && into.len() == 4 {
            into.copy_from_slice(&self.address.load(Relaxed).to_le_bytes());
        } else if let Some((device, offset, room)) = self.selected(port) {
            let len = into.len().min(room);
            self.config_read(device, offset, &mut into[..len]);
        }
    }

    /// Writes a port, 0xCF8 to 0xCFF.
    pub fn port_write(&self, port: u16, bytes: &[u8]) {
        if let (ADDRESS_PORT, Ok(address)) = (port, bytes.try_into()) {
            let address = u32::from_le_bytes(address) & ADDRESS_BITS;
            self.address.store(address, Relaxed);
        } else if let Some((device, offset, room)) = self.selected(port) {
            self.config_write(device, offset, &bytes[..bytes.len().min(room)]);
        }
    }

    /// Returns the target of an access to a data port: the device, the register's offset, and the
    /// number of bytes up to the last data port.
    fn selected(&self, port: u16) -> Option<(usize, u16, usize)> {
        let within = port.checked_sub(DATA_PORT).filter(|within| *within < 4)?;
        let address = self.address.load(Relaxed);
        if address & ADDRESS_ENABLE == 0 {
            return None;
        }
        let device = self.device_at(address >> 8 & 0xffff)?;
        let offset = (address & 0xfc) as u16 + within;
        Some((device, offset, 4 - usize::from(within)))
    }

    /// Returns the device with this bus (8 bits), device (5 bits) and function (3 bits).
    fn device_at(&self, bdf: u32) -> Option<usize> {
        let device = (bdf >> 3) as usize;
        (bdf & 7 == 0 && device < self.functions.len()).then_some(device)
    }

    /// Reads at an offset into the ECAM window. Unclaimed bytes read as ones.
    pub fn ecam_read(&self, offset: u64, into: &mut [u8]) {
        into.fill(0xff);
        if let Some((device, register, room)) = self.ecam(offset) {
            let len = into.len().min(room);
            self.config_read(device, register, &mut into[..len]);
        }
    }

    /// Writes at an offset into the ECAM window.
    pub fn ecam_write(&self, offset: u64, bytes: &[u8]) {
        if let Some((device, register, room)) = self.ecam(offset) {
            self.config_write(device, register, &bytes[..bytes.len().min(room)]);
        }
    }

    fn ecam(&self, offset: u64) -> Option<(usize, u16, usize)> {
        let device = self.device_at(u32::try_from(offset / ECAM_FUNCTION).ok()?)?;
        let register = (offset % ECAM_FUNCTION) as u16;
        Some((device, register, usize::from(4096 - register)))
    }

    /// Reads from a guest address that is not RAM. Returns false, with `into` untouched, when no
    /// function decodes it.
    pub fn mmio_read(&self, address: u64, into: &mut [u8]) -> bool {
        let Some((device, bar, offset)) = self.claimed(address, into.len()) else {
            return false;
        };
        self.lock(device).bar_read(bar, offset, into);
        true
    }

    /// Writes to a guest address that is not RAM. Returns false when no function decodes it.
    pub fn mmio_write(&self, address: u64, bytes: &[u8]) -> bool {
        let Some((device, bar, offset)) = self.claimed(address, bytes.len()) else {
            return false;
        };
        self.lock(device).bar_write(bar, offset, bytes);
        true
    }

    /// Returns the target that decodes these bytes: device, BAR, offset into the BAR.
    fn claimed(&self, address: u64, len: usize) -> Option<(usize, u8, u64)> {
        let forwarded = self
            .forwarded
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        forwarded.iter().find_map(|Forwarded { device, window }| {
            let offset = address.checked_sub(window.start)?;
            let end = offset.checked_add(len as u64)?;
            (end <= window.len).then_some((*device, window.bar, offset))
        })
    }

    fn config_read(&self, device: usize, offset: u16, into: &mut [u8]) {
        self.lock(device).config_read(offset, into);
    }

    fn config_write(&self, device: usize, offset: u16, bytes: &[u8]) {
        let mut function = self.lock(device);
        function.config_write(offset, bytes);
        self.forward(device, &mut **function);
    }

    /// Follows a function's windows. The function's lock is held.
    fn forward(&self, device: usize, function: &mut dyn PciDevice) {
        let wanted = function.windows();
        let inside = |window: &Window| {
            let end = window.start + window.len;
            [&self.windows.mmio32, &self.windows.mmio64]
                .iter()
                .any(|range| range.start <= window.start && end <= range.end)
        };
        let now: Vec<Window> = wanted.into_iter().filter(inside).collect();
        let changed = {
            let of = |entry: &&Forwarded| entry.device == device;
            let old = self
                .forwarded
                .read()
                .unwrap_or_else(PoisonError::into_inner);
            !old.iter().filter(of).map(|entry| &entry.window).eq(&now)
        };
        if changed {
            let mut list = self
                .forwarded
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            list.retain(|entry| entry.device != device);
            list.extend(now.iter().map(|window| Forwarded {
                device,
                window: *window,
            }));
            list.sort_by_key(|entry| entry.device);
            drop(list);
            function.forwarded(&now);
        }
    }

    /// Has all devices rest. No vCPU accesses them meanwhile.
    pub fn suspend(&self) {
        (0..self.functions.len()).for_each(|device| self.lock(device).suspend());
    }

    /// Has all devices go on that were suspended or restored.
    pub fn resume(&self) {
        (0..self.functions.len()).for_each(|device| self.lock(device).resume());
    }

    /// Resets all functions, which are suspended; [`Root::restore`] must follow, for their BARs.
    pub fn reset(&self) {
        (0..self.functions.len()).for_each(|device| self.lock(device).reset());
    }

    /// Sends all interrupts of devices that were restored once.
    pub fn signal_again(&self) {
        (0..self.functions.len()).for_each(|device| self.lock(device).signal_again());
    }

    /// Returns the address register and the state of each function. The devices are suspended.
    pub fn state(&self) -> (u32, Vec<FunctionState>) {
        let states = (0..self.functions.len()).map(|device| self.lock(device).state());
        (self.address.load(Relaxed), states.collect())
    }

    /// Sets what [`Root::state`] returned. The devices stay suspended.
    ///
    /// # Errors
    /// There are other functions.
    pub fn restore(&self, address: u32, states: &[FunctionState]) -> Result<(), SnapshotError> {
        if states.len() != self.functions.len() {
            let (found, wanted) = (states.len(), self.functions.len());
            let why = format!("{found} PCI devices in the place of {wanted}");
            return Err(SnapshotError::Mismatch(why));
        }
        self.address.store(address & ADDRESS_BITS, Relaxed);
        for (device, state) in states.iter().enumerate() {
            let mut function = self.lock(device);
            function.restore(state)?;
            self.forward(device, &mut **function);
        }
        Ok(())
    }

    fn lock(&self, device: usize) -> MutexGuard<'_, Box<dyn PciDevice>> {
        // A panic in one function is a bug in the VMM; the other functions stay usable.
        self.functions[device]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "root_test.rs"]
mod tests;
