//! State of a machine in a snapshot, as plain data. Any change here is another
//! [`LAYOUT_VERSION`](super::LAYOUT_VERSION).
use kvm_bindings::{
    kvm_clock_data, kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use serde::{Deserialize, Serialize};

use super::BaseState;
use crate::cpuid::Template;

/// State of a machine.
#[derive(Serialize, Deserialize)]
pub struct MachineState {
    /// The snapshot that it differs from; `None` if its memory has all pages.
    pub base: Option<BaseState>,
    /// Size of RAM, bytes.
    pub memory_bytes: u64,
    /// CPU that its guest was told of.
    pub template: Template,
    /// State that KVM has of the VM.
    pub kvm: KvmState,
    /// The vCPUs, by their index.
    pub vcpus: Vec<VcpuState>,
    /// State of the serial port.
    pub serial: SerialState,
    /// Index register of the real-time clock.
    pub rtc_index: u8,
    /// Time that the PM timer has counted, ns.
    pub pm_timer_ns: u64,
    /// PCI's configuration address register.
    pub pci_address: u32,
    /// The functions, by their device number.
    pub functions: Vec<FunctionState>,
}

/// State that KVM has of a VM, apart from its vCPUs.
#[derive(Serialize, Deserialize)]
pub struct KvmState {
    /// Both PICs and the I/O APIC.
    pub chips: [kvm_irqchip; 3],
    /// State of the interval timer (PIT).
    pub pit: kvm_pit_state2,
    /// The clock behind kvm-clock.
    pub clock: kvm_clock_data,
}

/// State of a vCPU.
#[derive(Serialize, Deserialize)]
pub struct VcpuState {
    /// Answers to the guest's CPUID.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Frequency of the time-stamp counter, kHz; 0: KVM does not say.
    pub tsc_khz: u32,
    /// Whether it runs, halts, or waits for INIT or SIPI.
    pub mp_state: kvm_mp_state,
    /// General-purpose registers.
    pub regs: kvm_regs,
    /// Segments and control registers.
    pub sregs: kvm_sregs,
    /// Floating point and vectors; `None`: KVM has no such call.
    pub xsave: Option<Box<kvm_xsave>>,
    /// Extended control registers; `None`: KVM has no such call.
    pub xcrs: Option<Box<kvm_xcrs>>,
    /// Debug registers; `None`: KVM has no such call.
    pub debug: Option<kvm_debugregs>,
    /// State of the local APIC.
    pub lapic: kvm_lapic_state,
    /// The MSRs that KVM lists and lets be read.
    pub msrs: Vec<kvm_msr_entry>,
    /// Exceptions and interrupts under way; `None`: KVM has no such call.
    pub events: Option<kvm_vcpu_events>,
}

/// State of the serial port's UART: its registers, and what the guest has not read yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialState {
    /// Divisor latch, low and high.
    pub divisor: [u8; 2],
    /// Interrupt enable, interrupt identification, line control, line status, modem control, modem
    /// status, scratch.
    pub registers: [u8; 7],
    /// Bytes in the receiver's FIFO.
    pub input: Vec<u8>,
}

/// State of a PCI function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionState {
    /// Configuration space, 256 bytes.
    pub config: Vec<u8>,
    /// State of the virtio device behind it; `None` for the host bridge.
    pub transport: Option<TransportState>,
}

/// State of a virtio device's transport.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// State of its MSI-X table.
    pub msix: MsixState,
    /// Selected halves of the feature bits, the device's and the driver's, and the selected queue.
    pub selectors: (u32, u32, u16),
    /// Features that the driver selected.
    pub features: u64,
    /// Status register of the device.
    pub status: u8,
    /// Generation of the configuration space.
    pub generation: u8,
    /// Interrupt status register (ISR).
    pub isr: u8,
    /// Vector for changes of the configuration.
    pub config_vector: u16,
    /// The queues, by their index.
    pub queues: Vec<QueueState>,
    /// The device's own state; `None` if no driver has activated it.
    pub device: Option<DeviceState>,
}

/// State of a function's MSI-X.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsixState {
    /// The table: 16 bytes for each vector.
    pub table: Vec<u8>,
    /// Vectors that are pending.
    pub pending: Vec<u16>,
}

/// Registers of a queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// Number of descriptors of the queue.
    pub size: u16,
    /// Whether the driver enabled it.
    pub enabled: bool,
    /// MSI-X vector of the queue's interrupts.
    pub vector: u16,
    /// Guest addresses of descriptor table, available ring and used ring.
    pub rings: [u64; 3],
}

/// How far a device has come with a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Index of the queue.
    pub queue: u16,
    /// Next entry of the available ring to take.
    pub next_available: u16,
    /// Next entry of the used ring to fill.
    pub next_used: u16,
    /// Chains that were taken and not given back, by their first descriptors, in order.
    pub taken: Vec<u16>,
}

/// State of an active device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceState {
    /// The queues that are served.
    pub queues: Vec<Progress>,
    /// State of the device's own kind.
    pub model: Model,
}

/// State that a kind of device has besides its queues.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Model {
    /// None, or none that outlives a snapshot.
    #[default]
    Plain,
    /// That of a network card.
    Net(NetState),
    /// Of a vsock device: the next port of the host's ends. A driver that does not know yet that its
    /// connections have ended must not take a new one for an old one.
    Vsock {
        /// Next port of the host's ends.
        next_port: u32,
    },
    /// Of a balloon: pages of 4 KiB that the guest is asked for, and that it says it has given.
    Balloon {
        /// Asked for.
        target: u32,
        /// Given.
        actual: u32,
    },
    /// Of a disk whose blocks are longer than a sector: their length, bytes, as the driver knows it.
    Disk {
        /// Length of a block.
        block_bytes: u32,
    },
}

/// Settings that a driver has made on a network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// MAC address at present.
    pub mac: [u8; 6],
    /// Offloads that the guest accepts: `TUN_F_*` of `linux/if_tun.h`.
    pub offloads: u32,
    /// Number of queue pairs in use.
    pub pairs: u16,
    /// Filter for received frames.
    pub filter: FilterState,
}

/// Receive filter of a network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterState {
    /// Promiscuous, all multicast, all unicast, no multicast, no unicast, no broadcast.
    pub modes: [bool; 6],
    /// Unicast addresses that are received.
    pub unicast: TableState,
    /// Multicast addresses that are received.
    pub multicast: TableState,
}

/// Addresses of a filter; `None`: more than the card keeps, so that all pass.
pub type TableState = Option<Vec<[u8; 6]>>;
