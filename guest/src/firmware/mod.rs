//! Information from the loader about the machine: the PVH start-of-day structure and the ACPI
//! tables.
pub mod acpi;
pub mod pvh;
#[cfg(test)]
#[path = "memory_test.rs"]
mod test_memory;

/// Access to memory by physical address.
pub trait PhysicalMemory {
    /// Returns `length` bytes from `address` on; `None` unless all of them are memory.
    fn bytes(&self, address: u64, length: usize) -> Option<&[u8]>;

    /// Returns the little-endian integer of `N` bytes at `address`; `None` outside memory.
    fn integer<const N: usize>(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        bytes.get_mut(..N)?.copy_from_slice(self.bytes(address, N)?);
        Some(u64::from_le_bytes(bytes))
    }
}
