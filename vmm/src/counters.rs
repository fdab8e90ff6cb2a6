//! What a machine counted: exits by kind and vCPU, the console's bytes, and the devices' figures.
//! Threads add with relaxed atomics, each to its own; a snapshot is read without stopping them.
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use serde::Serialize;

use crate::virtio::{
    net::{NetCounters, NetSnapshot},
    transport::{TransportCounters, TransportSnapshot},
};

/// The counters of one machine.
pub struct Counters {
    pub(crate) vcpus: Box<[VcpuCounters]>,
    pub(crate) serial: Arc<SerialCounters>,
    pub(crate) devices: DeviceCounters,
}

/// Those of the PCI devices.
#[derive(Default)]
pub(crate) struct DeviceCounters {
    pub(crate) net: Option<(Arc<NetCounters>, Arc<TransportCounters>)>,
    pub(crate) rng: Option<Arc<TransportCounters>>,
}

impl Counters {
    pub(crate) fn new(cpus: u8, serial: Arc<SerialCounters>, devices: DeviceCounters) -> Self {
        Self {
            vcpus: (0..cpus).map(|_| VcpuCounters::default()).collect(),
            serial,
            devices,
        }
    }

    /// The figures now. Each is exact by itself; they are not of one instant.
    pub fn snapshot(&self) -> Snapshot {
        let net = self.devices.net.as_ref();
        Snapshot {
            vcpus: self.vcpus.iter().map(VcpuCounters::snapshot).collect(),
            serial: self.serial.snapshot(),
            net: net.map(|(card, _)| card.snapshot()),
            net_transport: net.map(|(_, transport)| transport.snapshot()),
            rng_transport: self.devices.rng.as_ref().map(|rng| rng.snapshot()),
        }
    }
}

/// Declares a struct of atomics and its serialisable snapshot with the same fields.
macro_rules! counters {
    ($(#[$doc:meta])* $counters:ident => $snapshot:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        #[derive(Debug, Default)]
        // A vCPU's counters are its own cache lines'.
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
    /// Why one vCPU left the guest and came to the VMM. Exits that KVM handles by itself (timers,
    /// inter-processor interrupts, doorbells by ioeventfd) are not among them.
    VcpuCounters => VcpuSnapshot {
        /// Reads from a port.
        port_reads,
        /// Writes to a port.
        port_writes,
        /// Reads from an address without memory.
        mmio_reads,
        /// Writes to an address without memory.
        mmio_writes,
        /// Of those four, the ones that no device claimed.
        unclaimed,
        /// A signal or KVM itself interrupted the run.
        interrupted,
        /// Everything else; the last one ended the machine.
        other,
    }
}

counters! {
    /// The serial console.
    SerialCounters => SerialSnapshot {
        /// Bytes that the guest wrote.
        output_bytes,
        /// Of those, lost because the console's reader did not keep up.
        output_lost_bytes,
        /// Bytes that were typed.
        input_bytes,
        /// Interrupts raised on IRQ 4.
        interrupts,
        /// When the guest had written its first whole line: CLOCK_MONOTONIC, µs; 0 before that.
        first_line_at_us,
    }
}

/// [`Counters`], read once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Exits, by vCPU.
    pub vcpus: Vec<VcpuSnapshot>,
    /// The serial console.
    pub serial: SerialSnapshot,
    /// The network card, if there is one.
    pub net: Option<NetSnapshot>,
    /// Its registers and interrupts.
    pub net_transport: Option<TransportSnapshot>,
    /// The entropy device's registers and interrupts.
    pub rng_transport: Option<TransportSnapshot>,
}

/// Adds one, or more.
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
