//! `slipgate run`: the one VM that is ours, from its files to its exit status.
//!
//! The machine is made before anything is in the kernel, so that a kernel that can't be booted
//! leaves nothing behind; the guest runs once its TAP is served. It ends before the NAT does. When
//! the NAT fails the VM is stopped: nobody would admit its flows any more.
use std::{
    fs::File,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::sys::signal::Signal;
use slipgate_control::{Users, device::Device, guest_tap::GuestTap};

use super::{
    Broker, End,
    console::Console,
    inputs::Inputs,
    report::{How, Report, ReportFile},
    vmm_process::{self, Handed, VmmProcess},
};
use crate::{
    channel::{GuestEnd, VmmEnd},
    config::{MachineSpec, RunConfig},
    kvm,
    log::say,
    show::stats,
};
use slipgate_policy::document::ConfigError;

/// The MTU of a TAP that nobody gave one, L3 bytes.
const TAP_MTU: u16 = 1_500;

/// How long a TAP may outlive its VMM: the kernel closes what a ring of io_uring had open a moment
/// after the process has ended.
const TAP_GONE_WITHIN: Duration = Duration::from_secs(5);

/// Exit statuses: see the help of `slipgate run`.
mod status {
    pub(super) const RESET: u8 = 120;
    pub(super) const CRASHED: u8 = 121;
    pub(super) const VMM_KILLED: u8 = 122;
    pub(super) const NAT_FAILED: u8 = 123;
    /// And the signal's number, as a shell has it.
    pub(super) const SIGNAL: u8 = 128;
}

/// The VM that is ours.
#[derive(Debug)]
pub(super) struct Vm {
    pub(super) vmm: VmmProcess,
    pub(super) console: Console,
}

/// Runs one VM to its end.
pub(crate) fn run(mut config: RunConfig, log: &str) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let signals = super::signals(&[Signal::SIGQUIT]).context("waiting for signals")?;
    let images = Images::open(&config.machine)?;
    let inputs = Inputs::open(&config.nat)?;
    let read: Vec<_> = images.named().chain(inputs.named()).collect();
    let report = config.report.as_deref();
    let mut report = report
        .map(|path| ReportFile::open(path, &read))
        .transpose()?;
    let started = start(&mut config, images, inputs, log);
    let mut broker = match started {
        Ok(broker) => broker,
        Err(e) => {
            if let Some(report) = &mut report {
                report.write(&Report::not_started(&config, &e))?;
            }
            return Err(e);
        }
    };
    let vm = &broker.attached.vms[0].config;
    let (name, tap) = (vm.name.clone(), vm.tap.clone());
    tracing::info!("{} on {tap}, by {}", name, broker.attached.uplink.name);
    let prepared = began.elapsed();
    let served = match broker.boot() {
        Ok(()) => broker.serve(&signals),
        // It died while the TAP was being served: what was made is taken down all the same.
        Err(_) => Ok(End::VmmGone),
    };
    let (how, vmm) = broker.end_vm(served);
    let nat = stats::of_vm(&broker.attached.config.pin_dir, &name);
    let stopped = match how {
        // What is left is for the next one of its name to end.
        How::NatFailed { .. } => Ok(()),
        _ => broker.stop(crate::args::OnExit::Detach),
    };
    let exit_code = how.exit_code();
    how.tell(&name);
    if let Some(report) = &mut report {
        report.write(&Report {
            name: &name,
            tap: &tap,
            machine: &config.machine,
            exit_code,
            prepared_us: Some(micros(prepared)),
            first_line_us: vmm.as_ref().and_then(|end| end.first_line_us),
            ran_us: vmm.as_ref().map(|end| end.ran_us),
            vmm: vmm.map(|end| end.counters),
            nat,
            how,
        })?;
    }
    stopped?;
    Ok(ExitCode::from(exit_code))
}

/// Makes the machine and serves its TAP; the guest does not run yet.
fn start(
    config: &mut RunConfig,
    images: Images,
    inputs: Inputs,
    log: &str,
) -> anyhow::Result<Broker> {
    let mut vm = prepare(config, images, log, &inputs.users)?;
    super::warn_of_host(&config.nat);
    let served = match super::attach(config.nat.clone(), inputs) {
        Ok(attached) => Broker::start(attached, log, Some(vm)),
        Err(e) => {
            let e = vm.blame(e);
            drop(vm);
            Err(e)
        }
    };
    served.inspect_err(|_| await_tap_end(&config.machine.tap))
}

/// Waits until a TAP whose VMM was killed is gone.
fn await_tap_end(name: &str) {
    let until = Instant::now() + TAP_GONE_WITHIN;
    while Device::named(name).is_ok() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// What the VMM boots.
struct Images {
    kernel: Option<File>,
    initrd: Option<File>,
}

impl Images {
    fn open(machine: &MachineSpec) -> Result<Self, ConfigError> {
        let image = |flag, path: &Option<std::path::PathBuf>| {
            let path = path.as_deref();
            path.map(|path| vmm_process::open_image(flag, path))
                .transpose()
        };
        Ok(Self {
            kernel: image("--kernel", &machine.kernel)?,
            initrd: image("--initrd", &machine.initrd)?,
        })
    }

    /// By flag.
    fn named(&self) -> impl Iterator<Item = (&'static str, &File)> {
        let all = [("--kernel", &self.kernel), ("--initrd", &self.initrd)];
        all.into_iter()
            .filter_map(|(flag, file)| Some((flag, file.as_ref()?)))
    }
}

/// Opens what the VMM is handed, the TAP last; takes in its name; makes the machine.
fn prepare(config: &mut RunConfig, images: Images, log: &str, users: &Users) -> anyhow::Result<Vm> {
    let machine = &config.machine;
    let Images { kernel, initrd } = images;
    let kvm = kvm::open()?;
    let (console, input) = Console::open(kernel.is_some())?;
    let output = vmm_process::stdout()?;
    let tap = GuestTap::make(&machine.tap, machine.queues).context("making the guest's TAP")?;
    config.set_tap(&tap.name);
    let handed = Handed {
        kvm,
        kernel,
        initrd,
        input,
        output,
        taps: tap.queues,
    };
    let mtu = config.nat.network.mtu.map_or(TAP_MTU, |mtu| mtu as u16);
    let vmm = VmmProcess::start(&config.machine, handed, mtu, log, users)?;
    Ok(Vm { vmm, console })
}

impl Vm {
    /// An error before the guest ran, or the VMM's end where that is behind it: its TAP goes too.
    pub(super) fn blame(&mut self, error: anyhow::Error) -> anyhow::Error {
        match self.vmm.end() {
            Some(end) => anyhow::anyhow!("the VMM {end} before its guest ran"),
            None => error,
        }
    }
}

impl Broker {
    /// Lets the guest run.
    fn boot(&mut self) -> anyhow::Result<()> {
        match &mut self.vm {
            Some(vm) => {
                vm.console.begin();
                vm.vmm.go()
            }
            None => Ok(()),
        }
    }

    /// Sees to the VM's end, whatever ended the loop, and to its TAP's.
    fn end_vm(&mut self, served: anyhow::Result<End>) -> (How, Option<VmmEnd>) {
        let ended = self.stop_vm(served);
        // Killed, if it did not stop; and the terminal is put back.
        self.vm = None;
        self.attached.await_taps_end(TAP_GONE_WITHIN);
        ended
    }

    fn stop_vm(&mut self, served: anyhow::Result<End>) -> (How, Option<VmmEnd>) {
        let how = match served {
            Ok(End::Vm(end)) => return (How::of(&end.outcome), Some(*end)),
            Ok(End::VmmGone) => {
                let end = self.vm.as_mut().and_then(|vm| vm.vmm.end());
                let how = end.unwrap_or_else(|| "closed its channel".into());
                return (How::VmmKilled { how }, None);
            }
            Ok(End::Asked { signal, .. }) => How::Stopped {
                signal: signal as i32,
            },
            Err(e) => How::NatFailed {
                why: format!("{e:#}"),
            },
        };
        let end = self.vm.as_mut().and_then(|vm| vm.vmm.stop());
        (how, end)
    }
}

impl How {
    fn of(end: &GuestEnd) -> Self {
        match end {
            GuestEnd::PoweredOff => Self::PoweredOff,
            GuestEnd::Reset => Self::Reset,
            GuestEnd::Exited { status } => Self::Exited { status: *status },
            GuestEnd::Crashed { report } => Self::Crashed {
                report: report.clone(),
            },
            // Unasked: the VMM took a lost channel for a request.
            GuestEnd::Stopped => Self::VmmKilled {
                how: "stopped by itself".into(),
            },
        }
    }

    fn exit_code(&self) -> u8 {
        match self {
            Self::NotStarted { status, .. } => *status,
            Self::PoweredOff => 0,
            Self::Exited { status } => *status,
            Self::Reset => status::RESET,
            Self::Crashed { .. } => status::CRASHED,
            Self::VmmKilled { .. } => status::VMM_KILLED,
            Self::NatFailed { .. } => status::NAT_FAILED,
            Self::Stopped { signal } => status::SIGNAL + (*signal as u8 & 0x7f),
        }
    }

    /// Says it on stderr, where it is not what was wanted.
    fn tell(&self, name: &str) {
        match self {
            // The command's own error.
            Self::NotStarted { .. } => {}
            Self::PoweredOff => tracing::info!("{name} powered off"),
            Self::Exited { status: 0 } => tracing::info!("{name} ended with status 0"),
            Self::Exited { status } => tracing::warn!("{name} ended with status {status}"),
            Self::Reset => tracing::warn!("{name} reset itself, which ends a microVM"),
            // Lines of their own, whatever the level of messages.
            Self::Crashed { report } => say(format_args!("{name}: {}", printable(report))),
            Self::Stopped { .. } => tracing::info!("{name} was stopped"),
            Self::VmmKilled { how } => say(format_args!("the VMM of {name} {}", printable(how))),
            Self::NatFailed { why } => say(format_args!(
                "{why}; {name} was stopped, for nobody would admit its flows. Those it \
                 had are left in the kernel: the next `slipgate run --name {name}` ends them"
            )),
        }
    }
}

/// Without control characters: it comes from a process that a guest may have taken over.
fn printable(text: &str) -> String {
    let keep = |c: char| if c.is_control() && c != '\n' { '?' } else { c };
    text.chars().map(keep).collect()
}
