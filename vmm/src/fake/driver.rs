//! A virtio driver that follows the specification, and uses the same accesses as a guest.
use crate::{interrupt::MsiMessage, pci::Root};

/// Driver of one virtio function. Its methods panic when the device violates the specification.
pub struct Driver<'a> {
    root: &'a Root,
    function: u64,
    /// Guest address of the common configuration.
    pub common: u64,
    /// Notification address of the first queue.
    pub notify: u64,
    /// Distance between the notification addresses of two queues, bytes.
    pub notify_multiplier: u64,
    /// Guest address of the ISR status.
    pub isr: u64,
    /// Guest address of the device-specific configuration.
    pub device: u64,
    /// Guest address of the MSI-X table.
    pub table: u64,
    /// Guest address of the MSI-X pending bits.
    pub pba: u64,
    /// Offset of the MSI-X capability in configuration space.
    pub msix: u16,
    /// Offset of the PCI configuration access capability in configuration space.
    pub access: u16,
}

impl<'a> Driver<'a> {
    /// Finds the structures of device `number` on the bus, and turns on memory decoding and bus
    /// mastering.
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

    /// Returns the address that an offset register with a BAR number in its low bits gives.
    fn place(&self, at: u16) -> u64 {
        let raw = u32::from_le_bytes(self.config(at));
        self.bar((raw & 7) as u8) + u64::from(raw & !7)
    }

    /// Returns the address of a BAR.
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

    /// Reads the function's configuration space.
    pub fn config<const N: usize>(&self, at: u16) -> [u8; N] {
        let mut bytes = [0; N];
        self.root
            .ecam_read(self.function | u64::from(at), &mut bytes);
        bytes
    }

    /// Writes the function's configuration space.
    pub fn config_write(&self, at: u16, bytes: &[u8]) {
        self.root.ecam_write(self.function | u64::from(at), bytes);
    }

    /// Reads from an MMIO address that the function decodes.
    pub fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert!(
            self.root.mmio_read(address, &mut bytes),
            "{address:#x} is decoded"
        );
        bytes
    }

    /// Writes to an MMIO address that the function decodes.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        assert!(
            self.root.mmio_write(address, bytes),
            "{address:#x} is decoded"
        );
    }

    /// Returns the device status.
    pub fn status(&self) -> u8 {
        self.read::<1>(self.common + 20)[0]
    }

    /// Adds bits to the device status. Returns the new status.
    pub fn add_status(&self, bits: u8) -> u8 {
        self.write(self.common + 20, &[self.status() | bits]);
        self.status()
    }

    /// Resets the device, and checks that the reset is complete.
    pub fn reset(&self) {
        self.write(self.common + 20, &[0]);
        assert_eq!(self.status(), 0, "the reset is over");
    }

    /// Returns the offered features.
    pub fn offered(&self) -> u64 {
        let window = |select: u32| {
            self.write(self.common, &select.to_le_bytes());
            u64::from(u32::from_le_bytes(self.read(self.common + 4)))
        };
        window(0) | window(1) << 32
    }

    /// Goes from reset to FEATURES_OK. Returns false if the device did not accept the features.
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

    /// Configures and enables a queue: its size, the addresses of its three parts, its vector.
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

    /// Sets the vector for configuration changes.
    pub fn set_config_vector(&self, vector: u16) {
        self.write(self.common + 16, &vector.to_le_bytes());
    }

    /// Sets DRIVER_OK. Returns whether the device became active: DRIVER_OK without
    /// DEVICE_NEEDS_RESET.
    pub fn driver_ok(&self) -> bool {
        self.add_status(4) & (4 | 64) == 4
    }

    /// Writes message control: whether MSI-X is enabled, and whether all vectors are masked.
    pub fn set_msix(&self, enabled: bool, masked: bool) {
        let control = u16::from(enabled) << 15 | u16::from(masked) << 14;
        self.config_write(self.msix + 2, &control.to_le_bytes());
    }

    /// Writes a vector's message and unmasks the vector, as drivers do.
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

    /// Returns whether a vector's pending bit is set.
    pub fn is_pending(&self, vector: u16) -> bool {
        let [byte] = self.read(self.pba + u64::from(vector / 8));
        byte >> (vector % 8) & 1 != 0
    }

    /// Returns the notification address of a queue.
    pub fn bell(&self, queue: u16) -> u64 {
        self.write(self.common + 22, &queue.to_le_bytes());
        let offset = u16::from_le_bytes(self.read(self.common + 30));
        self.notify + u64::from(offset) * self.notify_multiplier
    }
}
