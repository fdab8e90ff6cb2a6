//! Life cycle of a broker that serves other programs' TAPs, and of one that runs its own VM.
//!
//! With `slipgate run` the machine is made before any kernel state, so that a kernel that can't be
//! booted leaves nothing behind; the guest runs once its TAP is served. The guest ends before the
//! NAT. If the NAT fails, the VM is stopped, because its flows would no longer be admitted.
use std::{
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use nix::sys::signal::Signal;
use serde::Serialize;
use slipgate_control::{device::Device, host::HostFacts};
use slipgate_ipc::{engine::OnExit, vmm::VmmEnd};

use crate::{
    config::{Config, Mode, RunConfig},
    host,
    kernel_errors::lacks_support,
    kernel_state::Attached,
    process::GivenUp,
    serve::{Broker, End, signals},
    start::{self, Inputs},
    vm::{How, Images, Report, ReportFile, Vm},
};

/// Time limit for a TAP to disappear after its VMM has ended: the kernel closes the descriptors of
/// an io_uring a moment after the process's end.
const TAP_GONE_WITHIN: Duration = Duration::from_secs(5);

/// Serves other programs' TAPs until stopped: those of the command line, or, for a daemon, those of
/// VMs that clients add.
///
/// # Errors
/// This host can't do what the flags ask for, or the engine fails repeatedly.
pub fn run(config: Config, log: &str) -> anyhow::Result<()> {
    let signals = signals(&[]).context("waiting for signals")?;
    warn_of_host(&config);
    let inputs = Inputs::open(&config)?;
    let attached = attach_to(config, inputs)?;
    let mut broker = Broker::start(attached, log, None)?;
    let command = if broker.parts.attached.config.is_daemon {
        "serve"
    } else {
        "attach"
    };
    broker.announce();
    match broker.serve(&signals) {
        Ok(End::Asked { exit, .. }) => broker.stop(exit),
        Ok(End::Vm(_) | End::VmmGone) => bail!("a VM has ended that is not there"),
        Err(e) => Err(match e.downcast_ref::<GivenUp>() {
            Some(given_up) => anyhow!(
                "{given_up}; established flows go on in the kernel and new ones are refused: run \
                 `slipgate {command}` again, which takes them over"
            ),
            None => e,
        }),
    }
}

fn warn_of_host(config: &Config) {
    for warning in host::warnings(&HostFacts::read(), &config.nat_ports) {
        tracing::warn!("{warning}");
    }
}

fn attach_to(config: Config, inputs: Inputs) -> anyhow::Result<Attached> {
    let mode = config.mode;
    start::attach(config, inputs).map_err(|e| match lacks_support(&e) {
        false => e,
        true if mode == Mode::Auto => {
            e.context("--mode auto: the hybrid NAT can't run, and there is no other mode yet")
        }
        true => e.context("the hybrid NAT can't run"),
    })
}

/// Runs one VM to its end.
///
/// `nat_figures`: reads the VM's traffic for the report, while its maps exist.
///
/// # Errors
/// The machine can't be made, its TAP can't be served, or the end was not in order.
pub fn run_vm<N: Serialize>(
    mut config: RunConfig,
    log: &str,
    nat_figures: impl FnOnce(&Path, &str) -> Option<N>,
) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let signals = signals(&[Signal::SIGQUIT]).context("waiting for signals")?;
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
                report.write(&Report::<N>::not_started(&config, &e))?;
            }
            return Err(e);
        }
    };
    let vm = &broker.parts.attached.vms[0].config;
    let (name, tap) = (vm.name.clone(), vm.tap.clone());
    tracing::info!(
        "{} on {tap}, by {}",
        name,
        broker.parts.attached.uplink.name
    );
    let prepared = began.elapsed();
    let served = match broker.boot() {
        Ok(()) => broker.serve(&signals),
        // It died while the TAP was being served: what was made is taken down all the same.
        Err(_) => Ok(End::VmmGone),
    };
    let (how, vmm) = broker.end_vm(served);
    let nat = nat_figures(&broker.parts.attached.config.pin_dir, &name);
    let stopped = match how {
        // What is left is for the next one of its name to end.
        How::NatFailed { .. } => Ok(()),
        _ => broker.stop(OnExit::Detach),
    };
    let exit_code = how.exit_code();
    how.log(&name);
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
    let mut vm = Vm::prepare(config, images, log, &inputs.users)?;
    warn_of_host(&config.nat);
    let served = match attach_to(config.nat.clone(), inputs) {
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

    /// Ends the VM and waits for the end of its TAP, whatever ended the loop. Returns how the run
    /// ended.
    fn end_vm(&mut self, served: anyhow::Result<End>) -> (How, Option<VmmEnd>) {
        let ended = self.stop_vm(served);
        // Killed, if it did not stop; and the terminal is put back.
        self.vm = None;
        self.parts.attached.await_taps_end(TAP_GONE_WITHIN);
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
