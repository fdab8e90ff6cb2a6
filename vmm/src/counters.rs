//! Counters of a machine: exits by kind and vCPU, the console's bytes, and the devices' figures.
//! Each thread adds to its own counters with relaxed atomics. A snapshot is read without stopping
//! the threads.
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use serde::Serialize;

use crate::virtio::{
    balloon::{BalloonCounters, BalloonSnapshot},
    block::{DiskCounters, DiskSnapshot},
    net::{NetCounters, NetSnapshot},
    transport::{TransportCounters, TransportSnapshot},
    vsock::{VsockCounters, VsockSnapshot},
};

/// Counters of one machine.
pub struct Counters {
    pub(crate) vcpus: Box<[VcpuCounters]>,
    pub(crate) serial: Arc<SerialCounters>,
    pub(crate) devices: DeviceCounters,
}

/// Counters of the PCI devices.
#[derive(Default)]
pub(crate) struct DeviceCounters {
    pub(crate) net: Option<(Arc<NetCounters>, Arc<TransportCounters>)>,
    pub(crate) rng: Option<Arc<TransportCounters>>,
    pub(crate) disks: Vec<(Arc<DiskCounters>, Arc<TransportCounters>)>,
    pub(crate) vsock: Option<(Arc<VsockCounters>, Arc<TransportCounters>)>,
    pub(crate) balloon: Option<(Arc<BalloonCounters>, Arc<TransportCounters>)>,
}

impl Counters {
    pub(crate) fn new(cpus: u8, serial: Arc<SerialCounters>, devices: DeviceCounters) -> Self {
        Self {
            vcpus: (0..cpus).map(|_| VcpuCounters::default()).collect(),
            serial,
            devices,
        }
    }

    /// Returns the present figures. Each is exact by itself; together they are not of one instant.
    pub fn snapshot(&self) -> Snapshot {
        let net = self.devices.net.as_ref();
        let vsock = self.devices.vsock.as_ref();
        let balloon = self.devices.balloon.as_ref();
        Snapshot {
            vcpus: self.vcpus.iter().map(VcpuCounters::snapshot).collect(),
            serial: self.serial.snapshot(),
            net: net.map(|(card, _)| card.snapshot()),
            net_transport: net.map(|(_, transport)| transport.snapshot()),
            rng_transport: self.devices.rng.as_ref().map(|rng| rng.snapshot()),
            disks: self
                .devices
                .disks
                .iter()
                .map(|(disk, _)| disk.snapshot())
                .collect(),
            disk_transports: self
                .devices
                .disks
                .iter()
                .map(|(_, transport)| transport.snapshot())
                .collect(),
            vsock: vsock.map(|(device, _)| device.snapshot()),
            vsock_transport: vsock.map(|(_, transport)| transport.snapshot()),
            balloon: balloon.map(|(device, _)| device.snapshot()),
            balloon_transport: balloon.map(|(_, transport)| transport.snapshot()),
        }
    }
}

/// Declares a struct of atomics and its serialisable snapshot with the same fields.
macro_rules! counters {
    ($(#[$doc:meta])* $counters:ident => $snapshot:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        #[derive(Debug, Default)]
        // Each vCPU's counters have cache lines of their own.
        #[repr(align(128))]
        pub(crate) struct $counters { $(pub(crate) $field: AtomicU64,)* }

        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct $snapshot { $($(#[$field_doc])* pub $field: u64,)* }

        impl $counters {
            fn snapshot(&self) -> $snapshot {
                $snapshot { $($field: self.$field.load(Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Exits of one vCPU to the VMM, by reason. Exits that KVM handles by itself (timers,
    /// inter-processor interrupts, doorbells by ioeventfd) are not counted.
    VcpuCounters => VcpuSnapshot {
        /// Reads from an I/O port.
        port_reads,
        /// Writes to an I/O port.
        port_writes,
        /// Reads from an address without memory.
        mmio_reads,
        /// Writes to an address without memory.
        mmio_writes,
        /// Port and MMIO accesses that no device claimed.
        unclaimed,
        /// Runs that a signal or KVM itself interrupted.
        interrupted,
        /// Other exits. The last of them ended the machine.
        other,
    }
}

counters! {
    /// Counters of the serial console.
    SerialCounters => SerialSnapshot {
        /// Bytes that the guest wrote.
        output_bytes,
        /// Bytes of `output_bytes` that were lost because the console's reader did not keep up.
        output_lost_bytes,
        /// Bytes of input passed to the guest.
        input_bytes,
        /// Interrupts raised on IRQ 4.
        interrupts,
        /// Time at which the guest had written its first whole line: CLOCK_MONOTONIC, µs; 0 before
        /// that.
        first_line_at_us,
    }
}

/// Figures of [`Counters`] at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Exits of each vCPU, in order.
    pub vcpus: Vec<VcpuSnapshot>,
    /// Figures of the serial console.
    pub serial: SerialSnapshot,
    /// Figures of the network card; `None` without one.
    pub net: Option<NetSnapshot>,
    /// Figures of the network card's registers and interrupts.
    pub net_transport: Option<TransportSnapshot>,
    /// Figures of the entropy device's registers and interrupts.
    pub rng_transport: Option<TransportSnapshot>,
    /// Figures of each disk, in order.
    pub disks: Vec<DiskSnapshot>,
    /// Figures of each disk's registers and interrupts, in order.
    pub disk_transports: Vec<TransportSnapshot>,
    /// Figures of the vsock device.
    pub vsock: Option<VsockSnapshot>,
    /// Figures of the vsock device's registers and interrupts.
    pub vsock_transport: Option<TransportSnapshot>,
    /// Figures of the balloon.
    pub balloon: Option<BalloonSnapshot>,
    /// Figures of the balloon's registers and interrupts.
    pub balloon_transport: Option<TransportSnapshot>,
}

/// Adding to a counter.
pub(crate) trait Count {
    fn add(&self, many: u64);
    fn one(&self) {
        self.add(1);
    }
}

impl Count for AtomicU64 {
    fn add(&self, many: u64) {
        self.fetch_add(many, Relaxed);
    }
}
