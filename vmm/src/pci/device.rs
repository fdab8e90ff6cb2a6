//! Interface between the PCI root and a function.
use crate::snapshot::{FunctionState, SnapshotError};

/// Range of guest addresses that a function decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Number of the BAR, 0 to 5. A 64-bit BAR has the number of its lower half.
    pub bar: u8,
    /// Guest physical address of its first byte.
    pub start: u64,
    /// Length in bytes, a power of two. `start + len` does not overflow.
    pub len: u64,
}

/// A PCI function. All accesses come from vCPU threads, one at a time per function, with offsets
/// and widths (1 to 8 bytes, unaligned too) of the guest's choice. None may panic.
pub trait PciDevice: Paused + Send {
    /// Reads configuration space from `offset` (0 to 4095). Bytes beyond its end are left
    /// unchanged.
    fn config_read(&mut self, offset: u16, into: &mut [u8]);
    /// Writes configuration space. [`PciDevice::windows`] must reflect a BAR that the write moved.
    fn config_write(&mut self, offset: u16, bytes: &[u8]);
    /// Returns the windows that the function decodes now; none while memory decoding is off.
    fn windows(&self) -> Vec<Window>;
    /// Receives the list of windows that the root forwards from now on. Called after each change.
    fn forwarded(&mut self, windows: &[Window]);
    /// Reads from a BAR; all of `into` lies within it.
    fn bar_read(&mut self, bar: u8, offset: u64, into: &mut [u8]);
    /// Writes to a BAR; all of `bytes` lies within it.
    fn bar_write(&mut self, bar: u8, offset: u64, bytes: &[u8]);
}

/// A function while the machine is paused: no vCPU accesses it.
pub trait Paused {
    /// Has the device behind the function rest.
    fn suspend(&mut self) {}
    /// Has it go on, whether it was suspended or restored.
    fn resume(&mut self) {}
    /// Sends all interrupts of a device that was restored once.
    fn signal_again(&mut self) {}
    /// Resets a suspended function, and the device behind it, to the state before any access but
    /// for its BARs.
    fn reset(&mut self) {}
    /// Returns the state of a suspended function.
    fn state(&self) -> FunctionState;
    /// Sets the state of a function that has not been accessed yet. It stays suspended.
    ///
    /// # Errors
    /// The state is of another function, or makes no sense.
    fn restore(&mut self, state: &FunctionState) -> Result<(), SnapshotError>;
}
