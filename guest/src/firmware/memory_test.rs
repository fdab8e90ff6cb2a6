//! Memory for tests: a range of bytes at some address.
use super::PhysicalMemory;

pub(super) struct TestMemory {
    base: u64,
    bytes: Vec<u8>,
}

impl TestMemory {
    pub(super) fn new(base: u64, length: usize) -> Self {
        TestMemory {
            base,
            bytes: vec![0; length],
        }
    }

    pub(super) fn put(&mut self, address: u64, bytes: &[u8]) {
        let at = (address - self.base) as usize;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl PhysicalMemory for TestMemory {
    fn bytes(&self, address: u64, length: usize) -> Option<&[u8]> {
        let at = usize::try_from(address.checked_sub(self.base)?).ok()?;
        self.bytes.get(at..at.checked_add(length)?)
    }
}
