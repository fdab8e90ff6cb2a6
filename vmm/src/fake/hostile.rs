//! A guest that does anything to two virtio functions, and the checks after each of its steps.
//!
//! Each function has a register file that can be read without any BAR, by the PCI configuration
//! access capability. So the checks see the state wherever the guest moved the BARs.
mod checks;

use std::sync::Arc;

use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use self::checks::View;
use super::{Device, Driver, Fabric, Witness};
use crate::{
    GuestMemory,
    pci::{Root, Windows},
    snapshot::{FunctionState, SnapshotError},
    virtio::transport::{TransportCounters, VirtioPci},
};

/// Number of functions on the bus, besides the host bridge.
pub const FUNCTIONS: u8 = 2;
/// Number of queues of each function.
pub const QUEUES: u16 = 3;
const VECTORS: u16 = QUEUES + 1;
/// Length of guest memory, which begins at address 0, bytes.
pub const MEMORY_BYTES: usize = 0x2_0000;
/// Features that the devices offer: two of their own, indirect descriptors, event index, ring
/// reset.
pub const FEATURES: u64 = 0b11 | 1 << 28 | 1 << 29 | 1 << 40;
const WINDOWS: Windows = Windows {
    mmio32: 0xc000_0000..0xc010_0000,
    mmio64: 1 << 36..(1 << 36) + 0x10_0000,
};

/// One step of the guest or of a device. Functions are taken modulo [`FUNCTIONS`].
#[derive(Clone, Debug)]
pub enum Step {
    /// Write to ECAM: offset, bytes.
    Ecam(u64, Vec<u8>),
    /// Read of ECAM: offset, number of bytes.
    EcamRead(u64, usize),
    /// Write to a configuration port: offset from 0xCF8, bytes.
    Port(u16, Vec<u8>),
    /// Read of a configuration port: offset from 0xCF8, number of bytes.
    PortRead(u16, usize),
    /// Write relative to a BAR, wherever it is: function, BAR, offset, bytes.
    Bar(u8, u8, u64, Vec<u8>),
    /// Read relative to a BAR, wherever it is: function, BAR, offset, number of bytes.
    BarRead(u8, u8, u64, usize),
    /// Write to any MMIO address.
    Mmio(u64, Vec<u8>),
    /// Read of any MMIO address: address, number of bytes.
    MmioRead(u64, usize),
    /// Write to guest memory, at an address modulo the memory's size.
    Memory(u32, Vec<u8>),
    /// Whole sequence of a driver to DRIVER_OK: function, features, mask of queues, queue size.
    BringUp(u8, u64, u8, u16),
    /// Set a vector's message, unmask it and turn MSI-X on: function, vector, data.
    Message(u8, u8, u8),
    /// Interrupt of the device: function, queue or, for [`QUEUES`], its configuration.
    Signal(u8, u16),
    /// Request of the device for a reset: function.
    NeedsReset(u8),
    /// Processing of a queue by the device: function, queue.
    Serve(u8, u16),
    /// Refusal of the next request to the device: function.
    Refuse(u8),
}

/// Two functions, their devices and their fabric.
pub struct Machine {
    root: Root,
    fabric: Arc<Fabric>,
    memory: Arc<GuestMemory>,
    functions: Vec<Function>,
    /// True once the functions' windows have overlapped: a doorbell may be missing since.
    overlapped: bool,
}

struct Function {
    witness: Witness,
    counters: Arc<TransportCounters>,
    base: u64,
    /// Offsets of the MSI-X and the access capabilities.
    msix: u16,
    access: u16,
    before: View,
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

impl Machine {
    /// Returns a machine in its state at power-on, with BARs decoded and bus mastering on.
    ///
    /// # Panics
    /// This and [`Machine::step`] panic when a check fails.
    pub fn new() -> Self {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]);
        let memory = Arc::new(memory.expect("memory for a test"));
        let fabric: Arc<Fabric> = Arc::default();
        let mut root = Root::new(WINDOWS);
        let mut witnesses = Vec::new();
        for _ in 0..FUNCTIONS {
            let (device, witness) = Device::new(&[16; QUEUES as usize], FEATURES);
            let (device, memory) = (Box::new(device), memory.clone());
            let function = VirtioPci::new(device, memory, fabric.clone(), fabric.clone());
            let function = function.expect("eventfds");
            witnesses.push((witness, function.counters()));
            root.add(Box::new(function)).expect("room");
        }
        let function = |(number, (witness, counters)): (u8, (Witness, _))| {
            let driver = Driver::find(&root, number);
            let base = u64::from(number) << 15;
            let (msix, access) = (driver.msix, driver.access);
            Function {
                witness,
                counters,
                base,
                msix,
                access,
                before: View::default(),
            }
        };
        let functions = (1..).zip(witnesses).map(function).collect();
        let mut machine = Self {
            root,
            fabric,
            memory,
            functions,
            overlapped: false,
        };
        for at in 0..machine.functions.len() {
            machine.functions[at].before = machine.look(at);
        }
        machine
    }

    /// Returns PCI's part of a snapshot. The devices rest meanwhile.
    pub fn saved(&self) -> (u32, Vec<FunctionState>) {
        self.root.suspend();
        let state = self.root.state();
        self.root.resume();
        state
    }

    /// Sets PCI's part of a snapshot, whoever wrote it, and has the devices go on.
    ///
    /// # Errors
    /// It is refused.
    pub fn restore(&mut self, address: u32, states: &[FunctionState]) -> Result<(), SnapshotError> {
        self.root.restore(address, states)?;
        self.root.resume();
        self.root.signal_again();
        self.overlapped = true;
        for at in 0..self.functions.len() {
            self.functions[at].before = self.look(at);
        }
        Ok(())
    }

    /// Queues of a function, each with how often it was notified since this was asked last.
    pub fn notified(&self, function: u8) -> Vec<(u16, u64)> {
        let seen = self.function(function).witness.seen();
        let queues = seen.activation.iter().flat_map(|active| &active.queues);
        queues
            .map(|queue| (queue.index, queue.kick.read().unwrap_or(0)))
            .collect()
    }

    /// Does one step, then checks everything.
    pub fn step(&mut self, step: &Step) {
        self.act(step);
        for at in 0..self.functions.len() {
            let after = self.look(at);
            self.check(at, &after, step);
            self.functions[at].before = after;
        }
        self.check_bells();
    }

    fn act(&self, step: &Step) {
        let room = |len: &usize| vec![0; (*len).min(8)];
        match step {
            Step::Ecam(offset, bytes) => self.root.ecam_write(*offset, bytes),
            Step::EcamRead(offset, len) => self.root.ecam_read(*offset, &mut room(len)),
            Step::Port(port, bytes) => self.root.port_write(0xcf8 + port % 8, bytes),
            Step::PortRead(port, len) => self.root.port_read(0xcf8 + port % 8, &mut room(len)),
            Step::Bar(function, bar, offset, bytes) => {
                let at = self
                    .bar(self.function(*function), *bar)
                    .wrapping_add(*offset);
                self.root.mmio_write(at, bytes);
            }
            Step::BarRead(function, bar, offset, len) => {
                let at = self
                    .bar(self.function(*function), *bar)
                    .wrapping_add(*offset);
                self.root.mmio_read(at, &mut room(len));
            }
            Step::Mmio(address, bytes) => {
                self.root.mmio_write(*address, bytes);
            }
            Step::MmioRead(address, len) => {
                self.root.mmio_read(*address, &mut room(len));
            }
            Step::Memory(at, bytes) => {
                let at = GuestAddress(u64::from(*at) % (MEMORY_BYTES - 8) as u64);
                self.memory
                    .write_slice(&bytes[..bytes.len().min(8)], at)
                    .expect("inside");
            }
            Step::BringUp(function, features, queues, size) => {
                self.bring_up(self.function(*function), *features, *queues, *size);
            }
            Step::Message(function, vector, data) => {
                let function = self.function(*function);
                let entry = u64::from(u16::from(*vector) % VECTORS) * 16;
                let at = self.bar(function, 0) + entry;
                self.root.mmio_write(at, &0xfee0_0000_u64.to_le_bytes());
                self.root
                    .mmio_write(at + 8, &u64::from(*data).to_le_bytes());
                self.root
                    .ecam_write(function.base + u64::from(function.msix) + 2, &[0, 0x80]);
            }
            Step::Signal(function, queue) => self.signal(self.function(*function), *queue),
            Step::NeedsReset(function) => {
                let seen = self.function(*function).witness.seen();
                if let Some(activation) = &seen.activation {
                    activation.signals.needs_reset();
                }
            }
            Step::Serve(function, queue) => self.serve(self.function(*function), *queue),
            Step::Refuse(function) => self.function(*function).witness.seen().refuse = true,
        }
    }

    fn function(&self, number: u8) -> &Function {
        &self.functions[usize::from(number % FUNCTIONS)]
    }

    fn config<const N: usize>(&self, function: &Function, at: u16) -> [u8; N] {
        let mut bytes = [0; N];
        self.root
            .ecam_read(function.base + u64::from(at), &mut bytes);
        bytes
    }

    /// Returns the address of a BAR. Number 0 is BAR 0, which has 32 bits; any other is BAR 2,
    /// which has 64.
    fn bar(&self, function: &Function, bar: u8) -> u64 {
        let raw = match bar {
            0 => u64::from(u32::from_le_bytes(self.config(function, 0x10))),
            _ => u64::from_le_bytes(self.config(function, 0x18)),
        };
        raw & !0xf
    }

    fn bring_up(&self, function: &Function, features: u64, queues: u8, size: u16) {
        let common = self.bar(function, 2);
        let write = |at: u64, bytes: &[u8]| {
            self.root.mmio_write(common.wrapping_add(at), bytes);
        };
        write(20, &[0]);
        write(20, &[3]);
        for (select, bits) in [(0, features as u32), (1, (features >> 32) as u32)] {
            write(8, &[select, 0, 0, 0]);
            write(12, &bits.to_le_bytes());
        }
        write(20, &[11]);
        write(16, &[0, 0]);
        for queue in 0..QUEUES {
            let rings = u64::from(queue) * 0x1000;
            write(22, &queue.to_le_bytes());
            write(24, &size.to_le_bytes());
            write(26, &(queue + 1).to_le_bytes());
            for (at, address) in [(32, rings), (40, rings + 0x400), (48, rings + 0x800)] {
                write(at, &address.to_le_bytes());
            }
            write(28, &[queues >> queue & 1, 0]);
        }
        write(20, &[15]);
    }

    fn signal(&self, function: &Function, queue: u16) {
        let seen = function.witness.seen();
        if let Some(activation) = &seen.activation {
            match queue {
                QUEUES => activation.signals.config(),
                queue => activation.signals.queue(queue),
            }
        }
    }

    /// Processes a queue as a simple device would: writes to each chain's writable buffers.
    fn serve(&self, function: &Function, queue: u16) {
        let mut seen = function.witness.seen();
        let Some(activation) = &mut seen.activation else {
            return;
        };
        let signals = activation.signals.clone();
        let served = activation
            .queues
            .iter_mut()
            .find(|served| served.index == queue);
        let Some(served) = served else { return };
        let _ = served.kick.read();
        let memory = &*self.memory;
        // A queue yields at most its size in chains at once, and a chain has at most 64 Ki buffers.
        while let Some(chain) = served.queue.pop_descriptor_chain(memory) {
            let head = chain.head_index();
            for buffer in chain.writable().take(4) {
                // A buffer outside of memory is an error, not a write.
                let _ = memory.write_slice(&[0x5a; 8], buffer.addr());
            }
            if served.queue.add_used(memory, head, 8).is_err() {
                signals.needs_reset();
                return;
            }
            signals.queue(queue);
        }
    }
}
