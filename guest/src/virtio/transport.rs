//! virtio over PCI, modern (virtio 1.2, 4.1): the registers, negotiation and queues.
use super::{DeviceError, ring::Ring};
use crate::pci::{self, ConfigSpace, Function, Registers, msix};

/// PCI vendor and device id of a virtio network card.
pub const NETWORK_CARD: (u16, u16) = (0x1AF4, 0x1041);
/// Ids of a card that also offers the legacy interface (QEMU's default on a PCI bus).
pub const NETWORK_CARD_TRANSITIONAL: (u16, u16) = (0x1AF4, 0x1000);

/// Feature bit: the device follows this specification, not the legacy one.
pub const VERSION_1: u64 = 1 << 32;
/// Vector number for no interrupt vector.
pub const NO_VECTOR: u16 = 0xFFFF;

/// Bits of the device status.
pub mod status {
    /// The driver has found the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The driver knows how to drive the device.
    pub const DRIVER: u8 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u8 = 4;
    /// The features are negotiated.
    pub const FEATURES_OK: u8 = 8;
    /// The device is broken, and must be reset.
    pub const NEEDS_RESET: u8 = 0x40;
}

/// Offsets in the common configuration.
mod common {
    pub(super) const DEVICE_FEATURE_SELECT: usize = 0x00;
    pub(super) const DEVICE_FEATURE: usize = 0x04;
    pub(super) const DRIVER_FEATURE_SELECT: usize = 0x08;
    pub(super) const DRIVER_FEATURE: usize = 0x0C;
    pub(super) const CONFIG_VECTOR: usize = 0x10;
    pub(super) const QUEUES: usize = 0x12;
    pub(super) const STATUS: usize = 0x14;
    pub(super) const GENERATION: usize = 0x15;
    pub(super) const QUEUE_SELECT: usize = 0x16;
    pub(super) const QUEUE_SIZE: usize = 0x18;
    pub(super) const QUEUE_VECTOR: usize = 0x1A;
    pub(super) const QUEUE_ENABLE: usize = 0x1C;
    pub(super) const QUEUE_NOTIFY_OFFSET: usize = 0x1E;
    pub(super) const QUEUE_DESCRIPTORS: usize = 0x20;
    pub(super) const QUEUE_AVAILABLE: usize = 0x28;
    pub(super) const QUEUE_USED: usize = 0x30;
    pub(super) const LENGTH: usize = 0x38;
}

/// Virtio device on PCI.
pub struct Transport<R> {
    common: R,
    notify: R,
    device: R,
    notify_multiplier: usize,
    /// Interrupt vectors of the device.
    pub msix: msix::Msix<R>,
}

/// Resets a device when it is dropped. A driver has it as its first field, which is dropped before the
/// memory of the queues: until its reset the device may look at them, and write to their buffers.
pub(super) struct ResetFirst<R: Registers + Clone>(pub(super) Transport<R>);

impl<R: Registers + Clone> Drop for ResetFirst<R> {
    fn drop(&mut self) {
        if let Err(why) = self.0.reset() {
            panic!("{why}: its memory can't be freed");
        }
    }
}

/// Notification register of a queue.
#[derive(Clone)]
pub struct Doorbell<R> {
    registers: R,
    offset: usize,
    queue: u16,
}

impl<R: Registers> Doorbell<R> {
    /// Notifies the device of the queue.
    pub fn ring(&self) {
        self.registers.write16(self.offset, self.queue);
    }
}

impl<R: Registers + Clone> Transport<R> {
    /// Finds the registers of `function`, a virtio device. `map` makes `length` bytes at an address
    /// accessible.
    ///
    /// # Errors
    /// A structure or MSI-X is missing.
    pub fn find(
        config: &dyn ConfigSpace,
        function: Function,
        mut map: impl FnMut(u64, usize) -> R,
    ) -> Result<Self, DeviceError> {
        const VENDOR: u8 = 9;
        const COMMON: u8 = 1;
        const NOTIFY: u8 = 2;
        const DEVICE: u8 = 4;
        pci::enable(config, function);
        let (mut common, mut notify, mut device, mut msix) = (None, None, None, None);
        let mut notify_multiplier = 0;
        for (id, at) in pci::capabilities(config, function) {
            if id == msix::CAPABILITY {
                msix = msix::Msix::new(config, function, at, |place, length| {
                    let bar = pci::memory_bar(config, function, place.bar)?;
                    Some(map(bar + u64::from(place.offset), length))
                });
            }
            if id != VENDOR {
                continue;
            }
            // struct virtio_pci_cap: kind at 3, bar at 4, offset at 8, length at 12.
            let Some(bar) = pci::memory_bar(config, function, config.read8(function, at + 4))
            else {
                continue;
            };
            let (offset, length) = (
                config.read(function, at + 8),
                config.read(function, at + 12),
            );
            let mut registers = || Some(map(bar + u64::from(offset), length as usize));
            // The first of each kind is the one the device prefers.
            match config.read8(function, at + 3) {
                COMMON if common.is_none() && length as usize >= common::LENGTH => {
                    common = registers()
                }
                NOTIFY if notify.is_none() => {
                    notify = registers();
                    notify_multiplier = config.read(function, at + 16) as usize;
                }
                DEVICE if device.is_none() => device = registers(),
                _ => {}
            }
        }
        Ok(Transport {
            common: common.ok_or(DeviceError::Missing("common configuration"))?,
            notify: notify.ok_or(DeviceError::Missing("notification area"))?,
            device: device.ok_or(DeviceError::Missing("device configuration"))?,
            msix: msix.ok_or(DeviceError::Missing("MSI-X"))?,
            notify_multiplier,
        })
    }

    /// Resets the device and waits until the reset is complete.
    ///
    /// # Errors
    /// The device does not complete its reset.
    pub fn reset(&self) -> Result<(), DeviceError> {
        /// Number of reads of the status. Each is an exit, of a microsecond at least.
        const PATIENCE: usize = 1_000_000;
        self.common.write8(common::STATUS, 0);
        (0..PATIENCE)
            .any(|_| self.status() == 0)
            .then_some(())
            .ok_or(DeviceError::Reset)
    }

    /// Returns the device's status.
    pub fn status(&self) -> u8 {
        self.common.read8(common::STATUS)
    }

    /// Adds bits to the device's status.
    pub fn add_status(&self, bits: u8) {
        self.common.write8(common::STATUS, self.status() | bits);
    }

    /// Returns the offered features.
    pub fn offered_features(&self) -> u64 {
        let half = |select| {
            self.common.write32(common::DEVICE_FEATURE_SELECT, select);
            u64::from(self.common.read32(common::DEVICE_FEATURE))
        };
        half(0) | half(1) << 32
    }

    /// Goes from a reset to FEATURES_OK, with those of the `wanted` features that are offered.
    /// Returns the negotiated features.
    ///
    /// # Errors
    /// The device does not reset, has no VERSION_1, or refuses the features.
    pub fn negotiate(&self, wanted: u64) -> Result<u64, DeviceError> {
        self.reset()?;
        self.add_status(status::ACKNOWLEDGE);
        self.add_status(status::DRIVER);
        let offered = self.offered_features();
        if offered & VERSION_1 == 0 {
            return Err(DeviceError::Missing("VERSION_1"));
        }
        let features = offered & (wanted | VERSION_1);
        for select in [0, 1] {
            self.common.write32(common::DRIVER_FEATURE_SELECT, select);
            self.common
                .write32(common::DRIVER_FEATURE, (features >> (32 * select)) as u32);
        }
        self.add_status(status::FEATURES_OK);
        if self.status() & status::FEATURES_OK == 0 {
            return Err(DeviceError::Features(features));
        }
        Ok(features)
    }

    /// Returns the number of queues of the device.
    pub fn queues(&self) -> u16 {
        self.common.read16(common::QUEUES)
    }

    /// Creates and enables queue `index`, of at most `size`, that interrupts by `vector`.
    ///
    /// # Errors
    /// The device has no such queue or vector.
    pub fn make_queue(
        &self,
        index: u16,
        size: u16,
        vector: u16,
        features: u64,
    ) -> Result<(Ring, Doorbell<R>), DeviceError> {
        self.common.write16(common::QUEUE_SELECT, index);
        let most = self.common.read16(common::QUEUE_SIZE);
        if most == 0 || !most.is_power_of_two() || most > 1 << 15 {
            return Err(DeviceError::Missing("queue of that number"));
        }
        let ring = Ring::new(size.min(most), features);
        self.common.write16(common::QUEUE_SIZE, ring.size());
        for (register, address) in [
            common::QUEUE_DESCRIPTORS,
            common::QUEUE_AVAILABLE,
            common::QUEUE_USED,
        ]
        .into_iter()
        .zip(ring.addresses())
        {
            self.common.write64(register, address);
        }
        self.common.write16(common::QUEUE_VECTOR, vector);
        if self.common.read16(common::QUEUE_VECTOR) != vector {
            return Err(DeviceError::Missing("interrupt vector for a queue"));
        }
        let offset =
            usize::from(self.common.read16(common::QUEUE_NOTIFY_OFFSET)) * self.notify_multiplier;
        self.common.write16(common::QUEUE_ENABLE, 1);
        Ok((
            ring,
            Doorbell {
                registers: self.notify.clone(),
                offset,
                queue: index,
            },
        ))
    }

    /// Sets the vector for configuration changes.
    ///
    /// # Errors
    /// The device has no such vector.
    pub fn set_config_vector(&self, vector: u16) -> Result<(), DeviceError> {
        self.common.write16(common::CONFIG_VECTOR, vector);
        let took = self.common.read16(common::CONFIG_VECTOR) == vector;
        took.then_some(()).ok_or(DeviceError::Missing(
            "interrupt vector for the configuration",
        ))
    }

    /// Starts the device: sets DRIVER_OK.
    pub fn start(&self) {
        self.add_status(status::DRIVER_OK);
    }

    /// Writes 32 bits of the device's configuration.
    pub fn write_device_config(&self, offset: usize, value: u32) {
        self.device.write32(offset, value);
    }

    /// Reads the device's configuration; reads again if it changed meanwhile.
    pub fn device_config<T>(&self, read: impl Fn(&R) -> T) -> T {
        loop {
            let before = self.common.read8(common::GENERATION);
            let value = read(&self.device);
            if self.common.read8(common::GENERATION) == before {
                return value;
            }
        }
    }
}
