//! MSI-X: a table of messages, each with a mask, and an array of pending bits (PCI 3.0, 6.8.2).
use super::{ConfigSpace, Function, Registers};

/// Capability id of MSI-X.
pub const CAPABILITY: u8 = 0x11;
const ENABLE: u32 = 1 << 31;
const MASK_ALL: u32 = 1 << 30;
const ENTRY_BYTES: usize = 16;
const ENTRY_MASKED: u32 = 1;

/// Location of the table or the pending bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableLocation {
    /// Number of the base address register.
    pub bar: u8,
    /// Offset from the base address, bytes.
    pub offset: u32,
}

/// MSI-X of a function.
pub struct Msix<R> {
    table: R,
    pending: R,
    vectors: u16,
    capability: u16,
    function: Function,
}

impl<R: Registers> Msix<R> {
    /// Reads the capability at `capability`. `map` makes a location's registers accessible. Returns
    /// `None` if it can't.
    pub fn new(
        config: &dyn ConfigSpace,
        function: Function,
        capability: u16,
        mut map: impl FnMut(TableLocation, usize) -> Option<R>,
    ) -> Option<Self> {
        let place = |offset| {
            let value = config.read(function, capability + offset);
            TableLocation {
                bar: value as u8 & 7,
                offset: value & !7,
            }
        };
        let vectors = (config.read16(function, capability + 2) & 0x7FF) + 1;
        let table = map(place(4), usize::from(vectors) * ENTRY_BYTES)?;
        let pending = map(place(8), usize::from(vectors).div_ceil(64) * 8)?;
        Some(Msix {
            table,
            pending,
            vectors,
            capability,
            function,
        })
    }

    /// Returns the number of vectors.
    pub fn vectors(&self) -> u16 {
        self.vectors
    }

    /// Turns MSI-X on, with every vector masked.
    pub fn enable(&self, config: &dyn ConfigSpace) {
        self.control(config, ENABLE | MASK_ALL);
        for vector in 0..self.vectors {
            self.mask(vector, true);
        }
        self.control(config, ENABLE);
    }

    /// Masks all vectors at once, or makes each vector's own mask effective again.
    pub fn mask_all(&self, config: &dyn ConfigSpace, masked: bool) {
        self.control(config, if masked { ENABLE | MASK_ALL } else { ENABLE });
    }

    fn control(&self, config: &dyn ConfigSpace, bits: u32) {
        let value = config.read(self.function, self.capability) & !(ENABLE | MASK_ALL);
        config.write(self.function, self.capability, value | bits);
    }

    /// Routes `vector` to the CPU with this local APIC id, as interrupt `interrupt`, and unmasks
    /// it.
    pub fn route(&self, vector: u16, apic_id: u32, interrupt: u8) {
        let entry = usize::from(vector) * ENTRY_BYTES;
        self.mask(vector, true);
        self.table
            .write32(entry, 0xFEE0_0000 | (apic_id & 0xFF) << 12);
        self.table.write32(entry + 4, 0);
        self.table.write32(entry + 8, interrupt.into());
        self.mask(vector, false);
    }

    /// Masks or unmasks a vector.
    pub fn mask(&self, vector: u16, masked: bool) {
        let control = usize::from(vector) * ENTRY_BYTES + 12;
        let value = self.table.read32(control) & !ENTRY_MASKED;
        self.table
            .write32(control, value | if masked { ENTRY_MASKED } else { 0 });
    }

    /// Returns whether a masked vector has an interrupt pending.
    pub fn is_pending(&self, vector: u16) -> bool {
        let word = self.pending.read32(usize::from(vector) / 32 * 4);
        word & 1 << (vector % 32) != 0
    }
}
