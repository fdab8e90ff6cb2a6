//! Life cycle of a broker that serves other programs' TAPs, and of one that runs its own VM.
//!
//! With `slipgate run` the machine is made before any kernel state, so that a kernel that can't be
//! booted leaves nothing behind; the guest runs once its TAP is served. The guest ends before the
//! NAT. If the NAT fails, the VM is stopped, because its flows would no longer be admitted.
use std::{
    collections::BTreeSet,
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    process::ExitCode,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use nix::sys::{signal::Signal, signalfd::SignalFd};
use serde::Serialize;
use slipgate_abi::IfIndex;
use slipgate_control::{Users, device::Device, host::HostFacts};
use slipgate_ipc::{
    client::{ClientAnswer, ClientError, ClientRequest, Target, VmDefinition, ask, ask_within},
    engine::{EngineRequest, OnExit},
    vmm::VmmEnd,
};
use slipgate_policy::document::ConfigError;

use crate::{
    DAEMON_SOCKET,
    asking::Asking,
    asking::StoppedEarly,
    config::{Config, Mode, RunConfig},
    counted,
    handover::HandedOver,
    host,
    joined::{JoinedMachine, JoinedVm},
    kernel_errors::lacks_support,
    kernel_state::Attached,
    privileges,
    process::GivenUp,
    serve::{Broker, End, signals},
    start::{self, Inputs},
    vm::{
        BegunVmm, ENDED_WITHIN, EndingFlows, How, Images, Inherits, Report, ReportFile, Vm, micros,
    },
};

/// Time limit for a TAP to disappear after its VMM has ended: the kernel closes the descriptors of
/// an io_uring a moment after the process's end.
const TAP_GONE_WITHIN: Duration = Duration::from_secs(5);
/// Time after which it is said that the daemon is waited for.
const SAYS_AFTER: Duration = Duration::from_millis(500);
/// Time within which an engine has to deliver what it held for a VM.
const WAKE_WITHIN: Duration = Duration::from_secs(20);

/// Serves other programs' TAPs until stopped: those of the command line, or, for a daemon, those of
/// VMs that clients add.
///
/// # Errors
/// This host can't do what the flags ask for, or the engine fails repeatedly.
pub fn run(config: Config, log: &str) -> anyhow::Result<()> {
    let signals = signals(&[]).context("waiting for signals")?;
    warn_of_host();
    let mut handed_over = HandedOver::by_service_manager();
    if config.takes_over {
        let socket = crate::paths(&config.pin_dir)?.run_dir.join(DAEMON_SOCKET);
        handed_over.ask(&socket)?;
    }
    let inputs = Inputs::open(&config, handed_over, None)?;
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

fn warn_of_host() {
    for warning in host::warnings(&HostFacts::read()) {
        tracing::warn!("{warning}");
    }
}

fn attach_to(config: Config, inputs: Inputs) -> anyhow::Result<Attached> {
    let mode = config.mode;
    start::attach(config, inputs).map_err(|e| match lacks_support(&e) {
        false => e,
        true if mode == Mode::Auto => {
            e.context("--mode auto: the hybrid NAT can't run, and user mode serves no TAP")
        }
        true => e.context("the hybrid NAT can't run"),
    })
}

/// A daemon that is to serve the VM of `slipgate run`.
#[derive(Debug)]
pub struct Daemon {
    /// Path of its control socket.
    pub socket: PathBuf,
    /// The VM as it is to be served; its TAP, and a name after it, come with the machine.
    pub vm: VmDefinition,
    /// Device by which its flows are to leave, if that matters.
    pub uplink: Option<String>,
    /// `Some`: it is a VM that the daemon keeps, and these are its flows to be.
    pub kept: Option<KeptFlows>,
}

/// What becomes of the flows of a VM that the daemon keeps when it has a machine again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeptFlows {
    /// They go on: the guest knows of them.
    GoOn,
    /// They end, with both ends told, before the guest runs.
    End,
}

/// Runs one VM to its end, in hybrid mode.
///
/// `daemon`: the one that serves it; `None`: processes of its own do. `nat_figures`: reads the VM's
/// traffic for the report, while its maps exist.
///
/// # Errors
/// The machine can't be made, its TAP can't be served, or the end was not in order.
pub fn run_vm<N: Serialize>(
    mut config: RunConfig,
    daemon: Option<Daemon>,
    log: &str,
    nat_figures: impl FnOnce(&Path, &str) -> Option<N>,
) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let signals = signals(&[Signal::SIGQUIT]).context("waiting for signals")?;
    let users = Users::claim();
    let begun = BegunVmm::begin(&config.bounds, log, &users, began);
    let images = Images::open(&config.machine)?;
    let inputs = Inputs::open(
        &config.nat,
        HandedOver::by_service_manager(),
        Some(users.clone()),
    )?;
    let read: Vec<_> = images.named().chain(inputs.named()).collect();
    let report = config.report.as_deref();
    let mut report = report
        .map(|path| ReportFile::open(path, &read))
        .transpose()?;
    let kept = daemon.as_ref().and_then(|daemon| {
        let flows = daemon.kept?;
        Some((daemon.socket.clone(), flows))
    });
    let started = start(&mut config, daemon, images, inputs, log, (begun, &signals));
    let mut running = match started {
        Ok(running) => running,
        Err(e) => {
            if let Some(report) = &mut report {
                report.write(&Report::<N>::not_started(&config, &e))?;
            }
            return Err(e);
        }
    };
    let vm = &config.nat.vms[0];
    let (name, tap) = (vm.name.clone(), vm.tap.clone());
    let tap_index = tap_index(&tap);
    tracing::info!("{name} on {tap}, by {}", running.by());
    let is_restored = config.machine.restore.is_some();
    let inherits =
        is_restored.then(|| running.inherits(&config, kept.as_ref().map(|(_, flows)| *flows)));
    let ended_flows = match &kept {
        Some((daemon, KeptFlows::End)) => running.end_former_flows(daemon, &name, &signals),
        _ => Ok(None),
    };
    if let (Some(inherits), Ok(None)) = (&inherits, &ended_flows) {
        inherits.log(&name);
    }
    let prepared = began.elapsed();
    let stages = running.vm().as_ref().map(|vm| vm.stages);
    let mut waking = None;
    let served = ended_flows.and_then(|ended| match ended {
        Some(end) => Ok(end),
        None => match running.boot() {
            Ok(()) => {
                if let Some((daemon, _)) = &kept {
                    waking = begin_wake(daemon.clone(), name.clone());
                }
                running.serve(&signals)
            }
            // It died while the TAP was being served: what was made is taken down all the same.
            Err(_) => Ok(End::VmmGone),
        },
    });
    let (how, vmm) = running.end_vm(tap_index, served);
    if waking.is_some_and(|waking| !waking.is_finished()) {
        tracing::warn!(
            "the machine of {name} ended while {name} was being woken, so it may be awake without a \
             machine: `slipgate sleep {name}` has it sleep"
        );
    }
    let nat = nat_figures(&config.nat.pin_dir, &name);
    let stopped = match how {
        // What is left is for the next one of its name to end.
        How::NatFailed { .. } => Ok(()),
        _ => running.stop(),
    };
    let exit_code = how.exit_code();
    how.log(&name);
    if let Some(report) = &mut report {
        report.write(&Report {
            name: &name,
            tap: Some(&tap),
            machine: &config.machine,
            exit_code,
            prepared_us: Some(micros(prepared)),
            stages,
            first_line_us: vmm.as_ref().and_then(|end| end.first_line_us),
            ran_us: vmm.as_ref().map(|end| end.ran_us),
            inherits: inherits.as_ref(),
            restarts: vmm.as_ref().map_or(0, |end| end.restarts),
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
    daemon: Option<Daemon>,
    images: Images,
    inputs: Inputs,
    log: &str,
    (begun, signals): (anyhow::Result<BegunVmm>, &SignalFd),
) -> anyhow::Result<Running> {
    if let Some(daemon) = &daemon {
        config.nat.network.mtu = mtu_of_taps(daemon, config, signals)?;
    }
    let of = |daemon| absent_taps_of(daemon, &config.machine.tap, signals);
    let taken = daemon.as_ref().map(of).transpose()?.unwrap_or_default();
    let mut vm = Vm::prepare(config, images, &taken, None, log, begun)?;
    let tap = tap_index(&config.machine.tap).filter(|_| !vm.leaves_tap);
    if let Some(daemon) = daemon {
        let joined = join(config, daemon, vm, signals);
        return joined.inspect_err(|_| await_tap_end(tap));
    }
    if let Err(e) = vm.await_made(&config.machine) {
        drop(vm);
        await_tap_end(tap);
        return Err(e);
    }
    warn_of_host();
    let made = Instant::now();
    let served = match attach_to(config.nat.clone(), inputs) {
        Ok(attached) => Broker::start(attached, log, Some(vm)).map(|mut broker| {
            if let Some(vm) = &mut broker.vm {
                vm.stages.served_us = micros(made.elapsed());
            }
            Running::Own(Box::new(broker))
        }),
        Err(e) => {
            let e = vm.blame(e);
            drop(vm);
            Err(e)
        }
    };
    served.inspect_err(|_| await_tap_end(tap))
}

/// The TAPs of a daemon's VMs that have none now: a new VM's TAP of that name would be served as theirs.
/// Those that are there the kernel gives nobody else. Where the user gives the name, it is not asked: it
/// refuses one that is another VM's.
///
/// # Errors
/// A signal asks to stop ([`StoppedEarly`]).
fn absent_taps_of(
    daemon: &Daemon,
    name: &str,
    signals: &SignalFd,
) -> anyhow::Result<BTreeSet<String>> {
    if daemon.kept.is_some() || !name.contains("%d") {
        return Ok(BTreeSet::new());
    }
    Ok(
        match ask_unless_stopped(daemon, ClientRequest::AbsentTaps, signals)? {
            Ok(ClientAnswer::AbsentTaps { taps }) => taps.into_iter().collect(),
            // It will say why it serves none.
            Ok(_) | Err(_) => BTreeSet::new(),
        },
    )
}

/// The MTU that a daemon gives the TAPs that it serves, for the card of a guest that boots: it is made
/// before the daemon serves its TAP. One that is restored knows an MTU already.
///
/// # Errors
/// A signal asks to stop ([`StoppedEarly`]).
fn mtu_of_taps(
    daemon: &Daemon,
    config: &RunConfig,
    signals: &SignalFd,
) -> anyhow::Result<Option<u32>> {
    if config.machine.restore.is_some() {
        return Ok(None);
    }
    Ok(
        match ask_unless_stopped(daemon, ClientRequest::GuestNetwork, signals)? {
            Ok(ClientAnswer::GuestNetwork { network }) => network.mtu,
            // It will say why it serves none.
            Ok(_) | Err(_) => None,
        },
    )
}

/// Asks the daemon a question without descriptors.
fn ask_unless_stopped(
    daemon: &Daemon,
    request: ClientRequest<BorrowedFd<'static>>,
    signals: &SignalFd,
) -> anyhow::Result<Result<ClientAnswer, ClientError>> {
    let socket = daemon.socket.clone();
    Asking::begin("daemon", move || ask(&socket, request))?.answer_unless_stopped(signals)
}

/// Has a daemon serve the machine's TAP, once the machine is made. One that is restored is made
/// meanwhile: what it is made of is known to make a machine.
fn join(
    config: &RunConfig,
    daemon: Daemon,
    mut vm: Vm,
    signals: &SignalFd,
) -> anyhow::Result<Running> {
    let is_restored = config.machine.restore.is_some();
    if !is_restored {
        vm.await_made(&config.machine)?;
    }
    let named = &config.nat.vms[0];
    let definition = VmDefinition {
        name: named.name.clone(),
        tap: named.tap.clone(),
        ..daemon.vm
    };
    let asked = Instant::now();
    let joined = match daemon.kept {
        Some(_) => JoinedVm::run_as(&daemon.socket, &definition.name, signals),
        None => JoinedVm::join(&daemon.socket, definition, daemon.uplink, signals),
    };
    let joined = joined.and_then(|joined| match daemon.kept {
        Some(_) => check_mtu(config).map(|()| joined),
        None => Ok(joined),
    });
    vm.stages.served_us = micros(asked.elapsed());
    // At once: a machine that is still being made ends with `vm`.
    let joined = match joined {
        Err(e) if e.is::<StoppedEarly>() => return Err(e),
        joined => joined,
    };
    if joined.is_ok() {
        // While the machine is being made.
        vm.resets.served_by(&daemon.socket, &named.name);
        privileges::limit_broker(false).context("giving up privileges that are not needed")?;
    }
    if is_restored && let Err(e) = vm.await_made(&config.machine) {
        // The daemon removes it as well when it notices that nobody is there.
        let _ = joined.and_then(JoinedVm::leave);
        return Err(e);
    }
    match joined {
        Ok(joined) => {
            let machine = JoinedMachine::new(vm, joined);
            Ok(Running::Joined(Box::new(machine)))
        }
        Err(e) => Err(vm.blame(e)),
    }
}

/// Checks that a restored guest's TAP has the MTU that the guest knows.
fn check_mtu(config: &RunConfig) -> anyhow::Result<()> {
    let (tap, saved) = (&config.machine.tap, config.machine.mtu);
    let now = Device::named(tap).and_then(|tap| tap.mtu())?;
    match saved.filter(|saved| *saved != now) {
        None => Ok(()),
        Some(saved) => Err(ConfigError::new(
            "--as",
            &config.nat.vms[0].name,
            format!("its TAP {tap} has the MTU {now}, and the snapshot's guest {saved}"),
            format!("ip link set {tap} mtu {saved}, or leave --as out, for a new VM"),
        )
        .into()),
    }
}

/// Has a VM that slept get what was held for it, now that its guest runs. An engine that hangs holds the
/// answer back, so a thread waits for it: the machine is served meanwhile. The thread is finished when the
/// answer has come; `None`: there is none.
fn begin_wake(daemon: PathBuf, name: String) -> Option<JoinHandle<()>> {
    let asking = {
        let name = name.clone();
        move || wake(&daemon, &name)
    };
    let begun = thread::Builder::new().name("wake".into()).spawn(asking);
    begun
        .inspect_err(|e| {
            tracing::warn!("no thread can be started ({e}): `slipgate resume {name}` wakes {name}");
        })
        .ok()
}

/// Asks the daemon, and waits for its answer.
fn wake(daemon: &Path, name: &str) {
    let request = ClientRequest::Engine {
        about: Some(Target::Vm(name.to_owned())),
        ask: EngineRequest::Resume,
    };
    let why = match ask_within(daemon, request, WAKE_WITHIN) {
        Ok(ClientAnswer::Done) => return,
        Ok(ClientAnswer::Error { error, .. }) => error,
        Ok(_) => "an answer to another question".to_owned(),
        Err(e) => format!("{:#}", anyhow::Error::from(e)),
    };
    tracing::warn!("{name} may sleep still ({why}): `slipgate resume {name}` wakes it");
}

/// Returns the index of a TAP; `None` once it is gone.
fn tap_index(name: &str) -> Option<IfIndex> {
    Device::named(name).and_then(|tap| tap.ifindex()).ok()
}

/// Waits until a TAP whose VMM was killed is gone. By its index, because another command may be given
/// the name meanwhile.
fn await_tap_end(tap: Option<IfIndex>) {
    let until = Instant::now() + TAP_GONE_WITHIN;
    while let Some(tap) = tap
        && Device::with_index(tap).is_ok()
        && Instant::now() < until
    {
        thread::sleep(Duration::from_millis(1));
    }
}

/// A machine that is made, and what serves it.
enum Running {
    /// Processes of its own.
    Own(Box<Broker>),
    /// A daemon serves the VM.
    Joined(Box<JoinedMachine>),
}

impl Running {
    fn vm(&mut self) -> &mut Option<Vm> {
        match self {
            Self::Own(broker) => &mut broker.vm,
            Self::Joined(machine) => &mut machine.vm,
        }
    }

    /// What the VM of a restored machine has to the network.
    fn inherits(&self, config: &RunConfig, flows: Option<KeptFlows>) -> Inherits {
        let Self::Joined(machine) = self else {
            return Inherits::of_own(&config.nat);
        };
        let vm = &machine.claimed().definition;
        match flows {
            None => Inherits::of_new(vm),
            Some(flows) => Inherits::of_kept(vm, flows == KeptFlows::GoOn),
        }
    }

    /// Ends the flows of a VM that has another guest from now on, or one from an earlier time. Returns
    /// how the run is to end, if it is, in the place of letting the guest run.
    fn end_former_flows(
        &mut self,
        daemon: &Path,
        name: &str,
        signals: &SignalFd,
    ) -> anyhow::Result<Option<End>> {
        let Self::Joined(machine) = self else {
            return Ok(None);
        };
        let ending = EndingFlows::begin(daemon.to_owned(), name.to_owned())?;
        let waits = || {
            let most = ENDED_WITHIN.as_secs();
            tracing::warn!(
                "{name} waits until the daemon has ended its former flows, {most} s at most: the \
                 daemon's engine does not answer, or is being replaced"
            );
        };
        if let Some(end) = machine.wait(signals, ending.fd(), (SAYS_AFTER, waits))? {
            return Ok(Some(end));
        }
        let ended = ending
            .result()
            .map_err(|why| anyhow!("the former flows of {name} can't be ended: {why}"))?;
        let flows = counted(ended, "flow");
        tracing::info!("ended {flows} of the former generation of {name}");
        Ok(None)
    }

    /// By what it leaves.
    fn by(&self) -> &str {
        match self {
            Self::Own(broker) => &broker.parts.attached.uplink.name,
            Self::Joined(_) => "the daemon",
        }
    }

    /// Lets the guest run.
    fn boot(&mut self) -> anyhow::Result<()> {
        match self.vm() {
            Some(vm) => vm.go(),
            None => Ok(()),
        }
    }

    fn serve(&mut self, signals: &SignalFd) -> anyhow::Result<End> {
        match self {
            Self::Own(broker) => broker.serve(signals),
            Self::Joined(machine) => machine.serve(signals),
        }
    }

    /// Ends the VM and waits for the end of its TAP, whatever ended the loop. Returns how the run
    /// ended.
    fn end_vm(
        &mut self,
        tap: Option<IfIndex>,
        served: anyhow::Result<End>,
    ) -> (How, Option<VmmEnd>) {
        let ended = stop_vm(self.vm(), served);
        let mut leaves_tap = false;
        if let Some(vm) = self.vm() {
            vm.orders.notify_end(&ended.0);
            vm.tell_of_throttling();
            leaves_tap = vm.leaves_tap;
        }
        // Killed, if it did not stop; and the terminal is put back.
        *self.vm() = None;
        match self {
            Self::Own(broker) => broker.parts.attached.await_taps_end(TAP_GONE_WITHIN),
            Self::Joined(_) => await_tap_end(tap.filter(|_| !leaves_tap)),
        }
        ended
    }

    /// Ends the VM's flows, and takes down what was made for it.
    fn stop(self) -> anyhow::Result<()> {
        match self {
            Self::Own(broker) => broker.stop(OnExit::Detach),
            Self::Joined(machine) => machine.leave(),
        }
    }
}

/// Ends the VM, if it has not ended. `served`: what ended the loop.
pub(crate) fn stop_vm(vm: &mut Option<Vm>, served: anyhow::Result<End>) -> (How, Option<VmmEnd>) {
    let how = match served {
        Ok(End::Vm(end)) => return (How::of(&end.outcome), Some(*end)),
        Ok(End::VmmGone) => {
            let end = vm.as_mut().and_then(Vm::end);
            let how = end.unwrap_or_else(|| "closed its channel".into());
            return (How::VmmKilled { how }, None);
        }
        Ok(End::Asked { signal, .. }) => How::Stopped {
            signal: signal as i32,
        },
        Err(e) => How::NatFailed {
            why: format!("{e:#}"),
            leaves_flows: true,
        },
    };
    let end = vm.as_mut().and_then(|vm| vm.vmm.stop());
    (how, end)
}
