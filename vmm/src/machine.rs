//! A machine: created from its configuration, run once, and torn down.
//!
//! # Theory of operation
//! [`Machine::new`] does all that can fail: it creates the VM, loads the kernel, and starts every
//! thread. The vCPU threads wait at a gate. [`Machine::run`] opens the gate and sleeps until a
//! device (power off, reset, exit status), a crash, or a [`StopHandle`] ends the machine. The first
//! reason counts. Then the vCPUs are kicked out of the guest and joined. After that only the
//! devices' threads access the guest's memory, and they end with the devices.
//!
//! A machine that is restored from a snapshot ([`crate::snapshot`]) is made like one that boots,
//! except that the state takes the place of a kernel: vCPUs, interrupt controllers, then devices,
//! which stay suspended until the machine runs. A [`Control`] pauses a machine, and saves it.
use std::{
    fs::File, io, io::Read as _, os::fd::OwnedFd, sync::Arc, sync::atomic::AtomicBool,
    thread::JoinHandle,
};

use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

mod bus;
mod control;
mod devices;
mod ending;
mod error;
mod gate;
mod meeting;
mod restart;
pub mod vcpu;

pub(crate) use bus::{Answer, Bus};
pub use control::{Control, SnapshotFiles};
pub use devices::Devices;
pub(crate) use ending::Ending;
pub use ending::{Outcome, StopHandle};
pub use error::MachineError;
pub(crate) use gate::Gate;

pub use crate::legacy::serial::SerialIo;
use devices::Platform;
use meeting::Meeting;
use restart::Restart;

use crate::{
    GuestMemory, ThreadSetup,
    acpi::{self, AcpiConfig},
    boot::{self, BootSource},
    counters::Counters,
    cpuid::{self, Template},
    kick, kvm, layout,
    legacy::{pm_timer::PmTimer, rtc::Rtc, serial::Console},
    memory,
    snapshot::{self, Layers, MachineState, SavedFiles, SnapshotError},
    virtio::net::shared_bytes,
};

/// Configuration of a machine.
pub struct MachineConfig {
    /// Number of vCPUs, 1 to [`layout::MAX_CPUS`].
    pub cpus: u8,
    /// RAM in bytes, whole pages.
    pub memory_bytes: u64,
    /// Whether the memory is of huge pages; not that of a snapshot, nor one that another process has too.
    pub huge_pages: bool,
    /// CPU that the guest is told of; that of the saved machine, for one of a snapshot.
    pub template: Template,
    /// Source of the guest's first state: a kernel or a snapshot.
    pub origin: Origin,
    /// Devices of the machine.
    pub devices: Devices,
    /// `/dev/kvm`, opened for reading and writing.
    pub kvm: OwnedFd,
    /// Function that each thread of the machine calls first.
    pub threads: ThreadSetup,
}

/// Source of a machine's first state.
pub enum Origin {
    /// Kernel, initrd and command line.
    Boot(BootSource),
    /// Files of a snapshot ([`Control::snapshot`]), opened for reading. CPUs, memory and devices must
    /// be those of the saved machine.
    Snapshot {
        /// File with the state of CPUs and devices.
        state: File,
        /// The memory. It must not change for as long as the machine is there, nor that of a base.
        memory: File,
        /// Those of its base, then of that one's, and so on: all that there are.
        bases: Vec<SavedFiles>,
    },
}

/// Machine that is ready to run. Dropping it ends its threads.
pub struct Machine {
    vcpus: Vec<JoinHandle<()>>,
    shared: Arc<vcpu::Shared>,
    control: Control,
    /// Signals that the generation id is another, in a machine that was restored.
    new_generation: Option<EventFd>,
    /// Everything that a restart needs; `None`: the guest's reset ends the machine.
    restart: Option<Box<Restart>>,
}

/// First state of a machine's vCPUs.
enum Beginning {
    Kernel(boot::Loaded, BootSource),
    State(Box<MachineState>),
}

impl Machine {
    /// Creates a machine. All its threads are started, and confined, when this returns; the guest
    /// has not run yet.
    ///
    /// # Errors
    /// The configuration is invalid, the kernel can't be booted, or the host refuses a resource.
    pub fn new(config: MachineConfig) -> Result<Machine, MachineError> {
        Machine::make(config, false)
    }

    /// As [`Machine::new`], for a machine that [`Machine::run_again`] runs. One of a snapshot, which has
    /// no kernel to begin with, ends with its guest's reset all the same.
    ///
    /// # Errors
    /// As of [`Machine::new`]; or KVM does not give the machine's state.
    pub fn restartable(config: MachineConfig) -> Result<Machine, MachineError> {
        Machine::make(config, true)
    }

    fn make(config: MachineConfig, may_restart: bool) -> Result<Machine, MachineError> {
        let cpus = config.cpus;
        if cpus == 0 || cpus > layout::MAX_CPUS {
            return Err(MachineError::Cpus(cpus));
        }
        kick::install().map_err(MachineError::host("installing a signal handler"))?;
        let kvm = kvm::open(config.kvm)?;
        let template = config.template;
        let host = cpuid::Supported::of(&kvm, template)?;
        let physical_bits = cpuid::physical_bits(&host.filtered(0, cpus)?);
        if !layout::is_reached(config.memory_bytes, physical_bits) {
            return Err(MachineError::AddressBits {
                bytes: config.memory_bytes,
                physical_bits,
            });
        }
        let mmio64 = layout::mmio64(config.memory_bytes, physical_bits);
        let acpi = AcpiConfig { cpus, mmio64 };
        let shared = config
            .devices
            .net
            .as_ref()
            .and_then(|net| net.shared.as_ref());
        let shared = shared.map(File::try_clone).transpose();
        let shared = shared.map_err(MachineError::host("copying a descriptor"))?;
        let kind = match shared {
            Some(file) => Kind::Shared(file),
            None if config.huge_pages => Kind::Huge,
            None => Kind::Ordinary,
        };
        let (memory, beginning) = begin(config.origin, config.memory_bytes, kind, &acpi)?;
        let memory = Arc::new(memory);
        let vm = Arc::new(kvm::create(&kvm, &memory)?);
        let routes = Arc::new(kvm::GsiRoutes::new(vm.clone()));
        let saved = match &beginning {
            Beginning::Kernel(..) => None,
            Beginning::State(state) => Some(&**state),
        };
        if let Some(state) = saved
            && state.template != template
        {
            let (was, is) = (state.template.name(), template.name());
            let why = format!("its CPU template is {was}, and the machine's {is}");
            return Err(SnapshotError::Mismatch(why).into());
        }

        let serial_irq = new_eventfd()?;
        routes
            .connect_pin(layout::SERIAL_IRQ, &serial_irq)
            .map_err(MachineError::host("connecting the serial port's interrupt"))?;
        let serial = Arc::default();
        let Devices {
            net,
            disks,
            vsock,
            balloon,
            serial: serial_io,
        } = config.devices;
        let uart = saved.map(|state| &state.serial);
        let console = Console::start(serial_io, serial_irq, uart, &serial, &config.threads)
            .map_err(MachineError::host("starting the serial console"))?;
        let new_generation = match saved {
            Some(_) => {
                let signal = new_eventfd()?;
                routes
                    .connect_pin(layout::GENERATION_IRQ, &signal)
                    .map_err(MachineError::host(
                        "connecting the generation id's interrupt",
                    ))?;
                Some(signal)
            }
            None => None,
        };
        let doorbells = Arc::new(kvm::KvmDoorbells(vm.clone()));
        let platform = Platform {
            memory: memory.clone(),
            msi: routes.clone(),
            doorbells,
            mmio64,
        };
        let made = devices::make(&platform, net, disks, (vsock, balloon), &config.threads)?;
        let shared = Arc::new(vcpu::Shared {
            memory,
            bus: Bus {
                console,
                pm_timer: PmTimer::start(),
                rtc: Rtc::default(),
                pci: made.root,
            },
            balloon: made.balloon,
            counters: Arc::new(Counters::new(cpus, serial, made.counters)),
            ending: Ending::new().map_err(MachineError::host("making an eventfd"))?,
            gate: Gate::default(),
            stopping: AtomicBool::new(false),
            meeting: Meeting::of(cpus.into()),
            abilities: vcpu::Abilities::of(&kvm, template)?,
            template,
            may_restart,
        });
        let none = Control::new(shared.clone(), vm.clone(), Vec::new());
        let mut machine = Machine {
            vcpus: Vec::new(),
            shared,
            control: none,
            new_generation,
            restart: None,
        };
        for index in 0..cpus {
            let made = match &beginning {
                Beginning::Kernel(kernel, _) => vcpu::create(&host, &vm, index, cpus, kernel)?,
                Beginning::State(state) => {
                    let saved = &state.vcpus[usize::from(index)];
                    let saved = (saved, &machine.shared.abilities);
                    vcpu::restore(&host, &vm, index, cpus, saved)?
                }
            };
            let power_on = may_restart.then(|| vcpu::power_on(&made, &machine.shared.abilities));
            let power_on = power_on.transpose()?;
            let shared = machine.shared.clone();
            let thread = vcpu::start(index, made, power_on, shared, &config.threads)
                .map_err(MachineError::host("starting a vCPU's thread"))?;
            machine.vcpus.push(thread);
        }
        if let Beginning::State(state) = &beginning {
            kvm::restore(&vm, &state.kvm)?;
            routes
                .at_once(|| machine.shared.restore(state))
                .map_err(MachineError::host(
                    "setting the routes of the devices' interrupts",
                ))??;
        }
        if may_restart && let Beginning::Kernel(kernel, source) = beginning {
            let bus = &machine.shared.bus;
            let (pci_address, functions) = bus.pci.state();
            let power_on = MachineState {
                base: None,
                memory_bytes: config.memory_bytes,
                template,
                kvm: kvm::save(&vm)?,
                vcpus: Vec::new(),
                serial: bus.console.state(),
                rtc_index: bus.rtc.index(),
                pm_timer_ns: 0,
                pci_address,
                functions,
            };
            machine.restart = Some(Box::new(Restart {
                source,
                acpi,
                kernel,
                power_on,
            }));
        }
        // SAFETY: `shut_down` closes the control before it joins the threads.
        let target = |thread| unsafe { kick::Target::of(thread) };
        let targets = machine.vcpus.iter().map(target).collect();
        machine.control = Control::new(machine.shared.clone(), vm, targets);
        config
            .threads
            .finish()
            .map_err(MachineError::host("confining a thread"))?;
        Ok(machine)
    }

    /// Returns a handle that gives orders to the machine while it runs.
    pub fn control(&self) -> Control {
        self.control.clone()
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
    pub fn run(self) -> Outcome {
        self.run_again(|_| false)
    }

    /// As [`Machine::run`], but begins the machine anew when its guest resets it and `go_on` agrees
    /// ([`Outcome::is_reset`]). It is asked while the guest and its devices rest.
    pub fn run_again(mut self, mut go_on: impl FnMut(&Outcome) -> bool) -> Outcome {
        if let Some(signal) = &self.new_generation {
            self.shared.bus.pci.resume();
            self.shared.bus.pci.signal_again();
            self.shared.bus.console.signal_again();
            // A new eventfd's count is not at its limit.
            let _ = signal.write(1);
        }
        self.shared.gate.open();
        let outcome = loop {
            let (outcome, is_stopped) = self.shared.ending.wait();
            let Some(again) = self.restart.as_deref().filter(|_| outcome.is_reset()) else {
                break outcome;
            };
            if is_stopped {
                break Outcome::Stopped;
            }
            match self.control.restart(again, || go_on(&outcome)) {
                Ok(true) => {}
                Ok(false) => break outcome,
                Err(error) => {
                    tracing::error!("the machine can't begin anew: {error}");
                    break outcome;
                }
            }
        };
        self.shut_down();
        outcome
    }

    fn shut_down(&mut self) {
        self.shared.stop();
        self.shared.gate.open();
        self.control.close();
        self.vcpus.iter().for_each(kick::kick);
        self.vcpus.drain(..).for_each(kick::until_joined);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// What the memory of a machine that boots is.
enum Kind {
    /// Anonymous, in pages as the host has them.
    Ordinary,
    /// Anonymous, in huge pages.
    Huge,
    /// A file that another process has too.
    Shared(File),
}

/// Makes the memory, with what the machine begins with.
fn begin(
    origin: Origin,
    bytes: u64,
    kind: Kind,
    acpi: &AcpiConfig,
) -> Result<(GuestMemory, Beginning), MachineError> {
    match origin {
        Origin::Snapshot { .. } if matches!(kind, Kind::Shared(_)) => {
            let why =
                "its memory is private, so no other process can serve the network card's rings";
            Err(SnapshotError::Mismatch(why.to_owned()).into())
        }
        Origin::Snapshot { .. } if matches!(kind, Kind::Huge) => {
            let why = "its memory is a file's, which has no huge pages";
            Err(SnapshotError::Mismatch(why.to_owned()).into())
        }
        Origin::Boot(source) => {
            let memory = match kind {
                Kind::Shared(file) => memory::shared(bytes, file, shared_bytes(bytes))?,
                Kind::Huge => memory::create_huge(bytes)?,
                Kind::Ordinary => memory::create(bytes)?,
            };
            let kernel = boot::load(&memory, &source)?;
            acpi::write(&memory, acpi)?;
            write_generation_id(&memory)?;
            Ok((memory, Beginning::Kernel(kernel, source)))
        }
        Origin::Snapshot {
            state,
            memory,
            bases,
        } => {
            let mut state = read_state(state)?;
            if state.memory_bytes != bytes || state.vcpus.len() != usize::from(acpi.cpus) {
                let (cpus, there) = (state.vcpus.len(), state.memory_bytes);
                let wanted = acpi.cpus;
                let why = format!(
                    "it has {cpus} CPUs and {there} bytes of memory, and the machine {wanted} and \
                     {bytes}"
                );
                return Err(SnapshotError::Mismatch(why).into());
            }
            let layers = Layers::of(memory, bytes, state.base.take(), bases)?;
            let memory = memory::of_layers(bytes, layers)?;
            write_generation_id(&memory)?;
            Ok((memory, Beginning::State(Box::new(state))))
        }
    }
}

fn read_state(file: File) -> Result<MachineState, SnapshotError> {
    let mut bytes = Vec::new();
    // One byte more than any state, with its header.
    file.take(snapshot::MAX_STATE_BYTES + 4096)
        .read_to_end(&mut bytes)
        .map_err(SnapshotError::file("read the state's file"))?;
    snapshot::decode(&bytes)
}

/// Gives the VM an id that no other has.
fn write_generation_id(memory: &GuestMemory) -> Result<(), MachineError> {
    let mut id = [0u8; 16];
    // SAFETY: the pointer and the length are those of `id`.
    let got = unsafe { libc::getrandom(id.as_mut_ptr().cast(), id.len(), 0) };
    if usize::try_from(got) != Ok(id.len()) {
        let source = io::Error::last_os_error();
        let what = "getting random bytes for the generation id";
        return Err(MachineError::Host { what, source });
    }
    memory
        .write_slice(&id, GuestAddress(layout::GENERATION_ID.start))
        .map_err(|e| MachineError::host("writing the generation id")(io::Error::other(e)))
}

fn new_eventfd() -> Result<EventFd, MachineError> {
    EventFd::new(EFD_CLOEXEC).map_err(MachineError::host("making an eventfd"))
}
