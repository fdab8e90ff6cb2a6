//! What whoever loaded us says of the machine: the PVH start-of-day structure and the ACPI tables.
pub mod acpi;
pub mod pvh;
#[cfg(test)]
mod test_memory;

/// The machine's memory, by physical address.
pub trait PhysicalMemory {
    /// `length` bytes from `address` on, if all of it is memory.
    fn bytes(&self, address: u64, length: usize) -> Option<&[u8]>;

    /// A little-endian integer of `N` bytes.
    fn integer<const N: usize>(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        bytes.get_mut(..N)?.copy_from_slice(self.bytes(address, N)?);
        Some(u64::from_le_bytes(bytes))
    }
}
