//! A driver that does what the specification asks of one, through the same accesses as a guest.
use crate::{interrupt::MsiMessage, pci::Root};

/// Drives one virtio function. Accessors panic when the device is not as the specification has it.
pub struct Driver<'a> {
    root: &'a Root,
    function: u64,
    /// Guest addresses of the structures.
    pub common: u64,
    /// The first queue's notification address, and the bytes to the next.
    pub notify: u64,
    /// See [`Driver::notify`].
    pub notify_multiplier: u64,
    /// ISR status.
    pub isr: u64,
    /// Device-specific configuration.
    pub device: u64,
    /// MSI-X table.
    pub table: u64,
    /// MSI-X pending bits.
    pub pba: u64,
    /// Offsets in configuration space of the MSI-X and the access capability.
    pub msix: u16,
    /// See [`Driver::msix`].
    pub access: u16,
}

impl<'a> Driver<'a> {
    /// Finds the structures of the function of device `number` on the bus, and turns on memory
    /// decoding and bus mastering.
    pub fn find(root: &'a Root, number: u8) -> Self {
        let mut driver = Self {
            root,
            function: u64::from(number) << 15,
            common: 0,
            notify: 0,
            notify_multiplier: 0,
            isr: 0,
            device: 0,
            table: 0,
            pba: 0,
            msix: 0,
            access: 0,
        };
        assert_eq!(
            driver.config::<2>(0),
            0x1af4_u16.to_le_bytes(),
            "virtio's vendor id"
        );
        driver.config_write(4, &[0b110, 0]);
        let [mut at] = driver.config(0x34);
        while at != 0 {
            let [id, next, _, kind] = driver.config(at.into());
            match id {
                0x11 => {
                    driver.msix = at.into();
                    driver.table = driver.place(u16::from(at) + 4);
                    driver.pba = driver.place(u16::from(at) + 8);
                }
                0x09 => driver.structure(kind, at.into()),
                _ => {}
            }
            at = next;
        }
        driver
    }

    fn structure(&mut self, kind: u8, at: u16) {
        let [bar] = self.config(at + 4);
        let address = || self.bar(bar) + u64::from(u32::from_le_bytes(self.config(at + 8)));
        match kind {
            1 => self.common = address(),
            2 => {
                self.notify = address();
                self.notify_multiplier = u32::from_le_bytes(self.config(at + 16)).into();
            }
            3 => self.isr = address(),
            4 => self.device = address(),
            5 => self.access = at,
            _ => {}
        }
    }

    /// What an offset with a BAR number in its low bits means.
    fn place(&self, at: u16) -> u64 {
        let raw = u32::from_le_bytes(self.config(at));
        self.bar((raw & 7) as u8) + u64::from(raw & !7)
    }

    /// Where a BAR is.
    pub fn bar(&self, number: u8) -> u64 {
        let at = 0x10 + 4 * u16::from(number);
        let low = u32::from_le_bytes(self.config(at));
        let is_64 = low & 0b110 == 0b100;
        let high = if is_64 {
            u32::from_le_bytes(self.config(at + 4))
        } else {
            0
        };
        u64::from(high) << 32 | u64::from(low & !0xf)
    }

    /// Reads configuration space.
    pub fn config<const N: usize>(&self, at: u16) -> [u8; N] {
        let mut bytes = [0; N];
        self.root
            .ecam_read(self.function | u64::from(at), &mut bytes);
        bytes
    }

    /// Writes configuration space.
    pub fn config_write(&self, at: u16, bytes: &[u8]) {
        self.root.ecam_write(self.function | u64::from(at), bytes);
    }

    /// Reads memory that the function decodes.
    pub fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert!(
            self.root.mmio_read(address, &mut bytes),
            "{address:#x} is decoded"
        );
        bytes
    }

    /// Writes memory that the function decodes.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        assert!(
            self.root.mmio_write(address, bytes),
            "{address:#x} is decoded"
        );
    }

    /// The device status.
    pub fn status(&self) -> u8 {
        self.read::<1>(self.common + 20)[0]
    }

    /// Adds these bits to the status; returns what it is then.
    pub fn add_status(&self, bits: u8) -> u8 {
        self.write(self.common + 20, &[self.status() | bits]);
        self.status()
    }

    /// Resets, and waits for it.
    pub fn reset(&self) {
        self.write(self.common + 20, &[0]);
        assert_eq!(self.status(), 0, "the reset is over");
    }

    /// The features that are offered.
    pub fn offered(&self) -> u64 {
        let window = |select: u32| {
            self.write(self.common, &select.to_le_bytes());
            u64::from(u32::from_le_bytes(self.read(self.common + 4)))
        };
        window(0) | window(1) << 32
    }

    /// From reset to FEATURES_OK. False if the device did not agree.
    pub fn negotiate(&self, features: u64) -> bool {
        self.reset();
        self.add_status(1);
        self.add_status(2);
        for (select, bits) in [(0_u32, features as u32), (1, (features >> 32) as u32)] {
            self.write(self.common + 8, &select.to_le_bytes());
            self.write(self.common + 12, &bits.to_le_bytes());
        }
        self.add_status(8) & 8 != 0
    }

    /// Describes and enables a queue: its size, the addresses of its three parts, its vector.
    pub fn set_up_queue(&self, index: u16, size: u16, rings: [u64; 3], vector: u16) {
        self.write(self.common + 22, &index.to_le_bytes());
        self.write(self.common + 24, &size.to_le_bytes());
        self.write(self.common + 26, &vector.to_le_bytes());
        assert_eq!(
            self.read(self.common + 26),
            vector.to_le_bytes(),
            "the vector was taken"
        );
        for (at, address) in [32, 40, 48].into_iter().zip(rings) {
            self.write(self.common + at, &(address as u32).to_le_bytes());
            self.write(
                self.common + at + 4,
                &((address >> 32) as u32).to_le_bytes(),
            );
        }
        self.write(self.common + 28, &[1, 0]);
    }

    /// Sets the configuration's vector.
    pub fn set_config_vector(&self, vector: u16) {
        self.write(self.common + 16, &vector.to_le_bytes());
    }

    /// Whether it became active: DRIVER_OK without DEVICE_NEEDS_RESET.
    pub fn driver_ok(&self) -> bool {
        self.add_status(4) & (4 | 64) == 4
    }

    /// Writes message control: MSI-X enabled, all vectors masked.
    pub fn set_msix(&self, enabled: bool, masked: bool) {
        let control = u16::from(enabled) << 15 | u16::from(masked) << 14;
        self.config_write(self.msix + 2, &control.to_le_bytes());
    }

    /// Writes a vector's message and unmasks it, as drivers do.
    pub fn set_message(&self, vector: u16, message: MsiMessage) {
        let entry = self.table + 16 * u64::from(vector);
        self.mask(vector, true);
        self.write(entry, &(message.address as u32).to_le_bytes());
        self.write(entry + 4, &((message.address >> 32) as u32).to_le_bytes());
        self.write(entry + 8, &message.data.to_le_bytes());
        self.mask(vector, false);
    }

    /// Masks or unmasks a vector.
    pub fn mask(&self, vector: u16, masked: bool) {
        let control = self.table + 16 * u64::from(vector) + 12;
        self.write(control, &u32::from(masked).to_le_bytes());
    }

    /// Whether a vector's pending bit is set.
    pub fn is_pending(&self, vector: u16) -> bool {
        let [byte] = self.read(self.pba + u64::from(vector / 8));
        byte >> (vector % 8) & 1 != 0
    }

    /// Where a queue is notified.
    pub fn bell(&self, queue: u16) -> u64 {
        self.write(self.common + 22, &queue.to_le_bytes());
        let offset = u16::from_le_bytes(self.read(self.common + 30));
        self.notify + u64::from(offset) * self.notify_multiplier
    }
}
