//! What the PCI root asks of a function.

/// A PCI function. All accesses come from vCPU threads, one at a time per function, with offsets
/// and widths of the guest's choice: none may panic.
pub trait PciDevice: Send {
    /// Reads `into.len()` (1, 2 or 4) bytes of configuration space at `offset` (0 to 4095).
    fn config_read(&mut self, offset: u16, into: &mut [u8]);
    /// Writes configuration space. BARs that moved are to be seen by [`PciDevice::bars`] after it.
    fn config_write(&mut self, offset: u16, bytes: &[u8]);
    /// The memory windows that the function decodes now: BAR number, guest address, length.
    /// Empty while memory decoding is off.
    fn bars(&self) -> Vec<(u8, u64, u64)>;
    /// Reads from a BAR; `offset` is within it.
    fn bar_read(&mut self, bar: u8, offset: u64, into: &mut [u8]);
    /// Writes to a BAR.
    fn bar_write(&mut self, bar: u8, offset: u64, bytes: &[u8]);
}
