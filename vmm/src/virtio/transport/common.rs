//! The common configuration registers (section 4.1.4.3).
//!
//! Reads may be of any width: the registers are laid out with their present values, and copied from
//! there. A write must have one register's own width, or that of a 64-bit register's half (section
//! 4.1.3.1); any other is ignored and counted.
use super::{counters::count, lifecycle::Lifecycle};

/// Length of the registers, up to and with queue_reset, bytes.
pub(super) const LEN: usize = 60;

/// Selector registers: the halves of the feature bits, and the queue, that the driver accesses.
#[derive(Default)]
pub(super) struct Selectors {
    device_feature: u32,
    driver_feature: u32,
    queue: u16,
}

impl Selectors {
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    pub(super) fn state(&self) -> (u32, u32, u16) {
        (self.device_feature, self.driver_feature, self.queue)
    }

    pub(super) fn restore(&mut self, state: (u32, u32, u16)) {
        (self.device_feature, self.driver_feature, self.queue) = state;
    }

    /// Reads registers. Bytes beyond them read as zeroes.
    pub(super) fn read(&self, of: &Lifecycle, offset: u64, into: &mut [u8]) {
        let mut all = [0; LEN];
        let mut put = |at: usize, bytes: &[u8]| all[at..][..bytes.len()].copy_from_slice(bytes);
        put(0, &self.device_feature.to_le_bytes());
        put(4, &window(of.offered(), self.device_feature).to_le_bytes());
        put(8, &self.driver_feature.to_le_bytes());
        put(12, &window(of.wanted, self.driver_feature).to_le_bytes());
        put(16, &of.shared.config_vector().to_le_bytes());
        put(
            18,
            &u16::try_from(of.queues.len())
                .expect("checked when made")
                .to_le_bytes(),
        );
        put(20, &[of.shared.status(), of.shared.generation()]);
        put(22, &self.queue.to_le_bytes());
        // All registers of a queue that does not exist read as 0, the size too.
        if let Some(queue) = of.queues.get(usize::from(self.queue)) {
            let registers = &queue.registers;
            put(24, &registers.size.to_le_bytes());
            put(26, &of.shared.queue_vector(self.queue).to_le_bytes());
            put(28, &u16::from(registers.enabled).to_le_bytes());
            // queue_notify_off: each queue has an address of its own.
            put(30, &self.queue.to_le_bytes());
            put(32, &registers.descriptors.to_le_bytes());
            put(40, &registers.driver.to_le_bytes());
            put(48, &registers.device.to_le_bytes());
            put(56, &self.queue.to_le_bytes());
        }
        for (at, byte) in (offset..).zip(into) {
            *byte = usize::try_from(at)
                .ok()
                .and_then(|at| all.get(at))
                .copied()
                .unwrap_or(0);
        }
    }

    /// Writes one register. Invalid writes are counted.
    pub(super) fn write(
        &mut self,
        of: &mut Lifecycle,
        offset: u64,
        bytes: &[u8],
        bus_master: bool,
    ) {
        match (offset, bytes) {
            (0, &[a, b, c, d]) => self.device_feature = u32::from_le_bytes([a, b, c, d]),
            (8, &[a, b, c, d]) => self.driver_feature = u32::from_le_bytes([a, b, c, d]),
            (12, &[a, b, c, d]) => of.want(self.driver_feature, u32::from_le_bytes([a, b, c, d])),
            (16, &[a, b]) => of.shared.set_config_vector(u16::from_le_bytes([a, b])),
            (20, &[status]) => {
                of.write_status(status, bus_master);
                if status == 0 {
                    self.reset();
                }
            }
            (22, &[a, b]) => self.queue = u16::from_le_bytes([a, b]),
            (26, &[a, b]) => of.set_queue_vector(self.queue, u16::from_le_bytes([a, b])),
            (28, &[1, 0]) => of.enable_queue(self.queue),
            (58, &[1, 0]) => of.reset_queue(self.queue),
            _ => self.write_queue(of, offset, bytes),
        }
    }

    /// Writes a register that describes a queue. It is read-only while the queue is enabled.
    fn write_queue(&self, of: &mut Lifecycle, offset: u64, bytes: &[u8]) {
        let queue = of.queues.get_mut(usize::from(self.queue));
        let Some(queue) = queue.filter(|queue| !queue.registers.enabled) else {
            return count(&of.counters.writes_ignored);
        };
        let registers = &mut queue.registers;
        let address = match offset {
            32..40 => &mut registers.descriptors,
            40..48 => &mut registers.driver,
            _ => &mut registers.device,
        };
        match (offset, bytes) {
            (24, &[a, b]) => registers.size = u16::from_le_bytes([a, b]),
            (32 | 40 | 48, &[a, b, c, d]) => {
                *address = *address & !0xffff_ffff | u64::from(u32::from_le_bytes([a, b, c, d]));
            }
            (36 | 44 | 52, &[a, b, c, d]) => {
                let high = u64::from(u32::from_le_bytes([a, b, c, d]));
                *address = *address & 0xffff_ffff | high << 32;
            }
            (32 | 40 | 48, &[a, b, c, d, e, f, g, h]) => {
                *address = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
            }
            _ => count(&of.counters.writes_ignored),
        }
    }
}

/// Returns the selected 32 of 64 feature bits. Further ones are 0.
fn window(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}
