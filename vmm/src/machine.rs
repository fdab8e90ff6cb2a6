//! A machine: created from its configuration, run once, and torn down.
//!
//! # Theory of operation
//! [`Machine::new`] does all that can fail: it creates the VM, loads the kernel, and starts every
//! thread. The vCPU threads wait at a gate. [`Machine::run`] opens the gate and sleeps until a
//! device (power off, reset, exit status), a crash, or a [`StopHandle`] ends the machine. The first
//! reason counts. Then the vCPUs are kicked out of the guest and joined. After that only the
//! devices' threads access the guest's memory, and they end with the devices.
use std::{io, os::fd::OwnedFd, sync::Arc, sync::atomic::AtomicBool, thread::JoinHandle};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

mod bus;
mod devices;
mod ending;
mod error;
mod gate;
pub mod vcpu;

pub(crate) use bus::{Answer, Bus};
pub(crate) use ending::Ending;
pub use ending::{Outcome, StopHandle};
pub use error::MachineError;
pub(crate) use gate::Gate;

pub use crate::legacy::serial::SerialIo;
use devices::Platform;

use crate::{
    ThreadSetup,
    acpi::{self, AcpiConfig},
    boot::{self, BootSource},
    counters::Counters,
    cpuid, kick, kvm, layout,
    legacy::{pm_timer::PmTimer, rtc::Rtc, serial::Console},
    memory,
    virtio::{block::DiskConfig, net::NetConfig, vsock::VsockConfig},
};

/// Configuration of a machine.
pub struct MachineConfig {
    /// Number of vCPUs, 1 to [`layout::MAX_CPUS`].
    pub cpus: u8,
    /// RAM in bytes, whole pages.
    pub memory_bytes: u64,
    /// Kernel, initrd and command line.
    pub boot: BootSource,
    /// Network card; `None` for a machine without one.
    pub net: Option<NetConfig>,
    /// Disks, in the order in which the guest finds them.
    pub disks: Vec<DiskConfig>,
    /// Connections with programs of the host; `None` for a machine without.
    pub vsock: Option<VsockConfig>,
    /// Input and output of the serial console.
    pub serial: SerialIo,
    /// `/dev/kvm`, opened for reading and writing.
    pub kvm: OwnedFd,
    /// Function that each thread of the machine calls first.
    pub threads: ThreadSetup,
}

/// Machine that is ready to run. Dropping it ends its threads.
pub struct Machine {
    vcpus: Vec<JoinHandle<()>>,
    shared: Arc<vcpu::Shared>,
}

impl Machine {
    /// Creates a machine. All its threads are started, and confined, when this returns; the guest
    /// has not run yet.
    ///
    /// # Errors
    /// The configuration is invalid, the kernel can't be booted, or the host refuses a resource.
    pub fn new(config: MachineConfig) -> Result<Machine, MachineError> {
        let cpus = config.cpus;
        if cpus == 0 || cpus > layout::MAX_CPUS {
            return Err(MachineError::Cpus(cpus));
        }
        kick::install().map_err(MachineError::host("installing a signal handler"))?;
        let kvm = kvm::open(config.kvm)?;
        let physical_bits = cpuid::physical_bits(&cpuid::filtered(&kvm, 0, cpus)?);
        if !layout::is_reached(config.memory_bytes, physical_bits) {
            return Err(MachineError::AddressBits {
                bytes: config.memory_bytes,
                physical_bits,
            });
        }
        let memory = Arc::new(memory::create(config.memory_bytes)?);
        let vm = Arc::new(kvm::create(&kvm, &memory)?);
        let kernel = boot::load(&memory, &config.boot)?;
        let mmio64 = layout::mmio64(config.memory_bytes, physical_bits);
        acpi::write(&memory, &AcpiConfig { cpus, mmio64 })?;
        let routes = Arc::new(kvm::GsiRoutes::new(vm.clone()));

        let serial_irq = new_eventfd()?;
        routes
            .connect_pin(layout::SERIAL_IRQ, &serial_irq)
            .map_err(MachineError::host("connecting the serial port's interrupt"))?;
        let serial = Arc::default();
        let console = Console::start(config.serial, serial_irq, &serial, &config.threads)
            .map_err(MachineError::host("starting the serial console"))?;
        let doorbells = Arc::new(kvm::KvmDoorbells(vm.clone()));
        let platform = Platform {
            memory: memory.clone(),
            msi: routes,
            doorbells,
            mmio64,
        };
        let (pci, devices) = devices::root(
            &platform,
            config.net,
            config.disks,
            config.vsock,
            &config.threads,
        )?;
        let shared = Arc::new(vcpu::Shared {
            memory,
            bus: Bus {
                console,
                pm_timer: PmTimer::start(),
                rtc: Rtc::default(),
                pci,
            },
            counters: Arc::new(Counters::new(cpus, serial, devices)),
            ending: Ending::new().map_err(MachineError::host("making an eventfd"))?,
            gate: Gate::default(),
            stopping: AtomicBool::new(false),
        });
        let mut machine = Machine {
            vcpus: Vec::new(),
            shared,
        };
        for index in 0..cpus {
            let fd = vcpu::create(&kvm, &vm, index, cpus, &kernel)?;
            let thread = vcpu::start(index, fd, machine.shared.clone(), &config.threads)
                .map_err(MachineError::host("starting a vCPU's thread"))?;
            machine.vcpus.push(thread);
        }
        Ok(machine)
    }

    /// Returns the machine's counters. They remain readable after the machine has ended.
    pub fn counters(&self) -> Arc<Counters> {
        self.shared.counters.clone()
    }

    /// Returns a handle that stops the machine, now or while it runs.
    ///
    /// # Errors
    /// The eventfd can't be duplicated.
    pub fn stop_handle(&self) -> io::Result<StopHandle> {
        self.shared.ending.stop_handle()
    }

    /// Runs the guest to its end, and returns how it ended. When it returns, no thread of the
    /// machine runs any more, and the guest's output has been written.
    pub fn run(mut self) -> Outcome {
        self.shared.gate.open();
        let outcome = self.shared.ending.wait();
        self.shut_down();
        outcome
    }

    fn shut_down(&mut self) {
        self.shared.stop();
        self.shared.gate.open();
        self.vcpus.iter().for_each(kick::kick);
        self.vcpus.drain(..).for_each(kick::until_joined);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.shut_down();
    }
}

fn new_eventfd() -> Result<EventFd, MachineError> {
    EventFd::new(EFD_CLOEXEC).map_err(MachineError::host("making an eventfd"))
}
