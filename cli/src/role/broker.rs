//! The broker: the process that `slipgate attach` and `slipgate run` start in. It has CAP_NET_ADMIN
//! and CAP_BPF and never sees a guest's packet.
//!
//! # Theory of operation
//! 1. Everything in the kernel is made or joined, but no TAP is brought up ([`attached`]).
//! 2. The engine is started from this binary, is sent descriptors and how it is to work, drops
//!    what it may, adopts what a predecessor left, and says that it is ready.
//! 3. TAPs are attached to and brought up, and `slipgate: ready` is printed.
//! 4. One loop follows the network, answers the control socket and watches the engine.
//!
//! When the engine ends unasked, or hangs, another one takes its place ([`engine`]). One that ends
//! again and again ends the broker, with an error: established flows go on in the kernel, pins stay,
//! and the next start adopts them. When the broker dies the engine sees the end of the channel, and
//! the kernel kills it in any case. SIGTERM and SIGINT end both in order, as `--on-exit` says,
//! whether the broker gets them alone or all processes do; SIGHUP opens the flow log again and puts
//! the policy's files in force as they are now ([`reload`]).
//!
//! With `run` there is a third process, the VMM, which is started before all of this and let go
//! after step 3 ([`vm`]). The loop watches it too, and its end is the loop's.
mod answers;
mod attached;
mod bound_ports;
mod changes;
mod child;
mod console;
mod engine;
mod engine_process;
mod follow;
mod inputs;
mod metrics;
mod network_view;
mod opened;
mod outgoing;
mod reload;
mod report;
mod reserve;
mod resolvers;
mod rule_texts;
mod survival;
mod terminal;
mod thaws;
mod uplink;
mod vm;
mod vmm_process;
mod xdp;

pub(crate) use self::vm::run as run_vm;

use std::{
    collections::VecDeque,
    io::Write as _,
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use slipgate_control::{BpfLog, host::HostFacts, netlink::Changes, owner};
use userspace_nat::control::OnExit as EngineExit;

use self::{
    answers::Questions,
    attached::Attached,
    console::Typed,
    engine::{Engine, GivenUp},
    inputs::Inputs,
    metrics::Metrics,
    opened::Opened,
    reload::{Applied, Applying},
    vm::Vm,
};
use crate::{
    args::{Mode, OnExit},
    channel::{FromVmm, Received, ToBroker, ToEngine, VmmEnd},
    config::Config,
    control_socket::{Answer, ClientId, ControlServer},
    host, sandbox,
    show::table::counted,
};

/// The line that says that guests are served.
const READY: &str = "slipgate: ready";
/// How long the engine may take to adopt, or to end flows.
const ENGINE_WITHIN: Duration = Duration::from_secs(60);
/// How often the host is looked at for what it sends no notice of: sockets bound to translated
/// ports, forwarding turned on for the TAPs, other resolvers.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Messages of another process that are heard at a time: one that never ends to talk keeps nobody
/// else waiting.
const HEARD_AT_ONCE: usize = 64;

/// Serves TAPs of others' until stopped.
pub(crate) fn run(config: Config, log: &str) -> anyhow::Result<()> {
    let signals = signals(&[]).context("waiting for signals")?;
    warn_of_host(&config);
    let inputs = Inputs::open(&config)?;
    let attached = attach(config, inputs)?;
    let mut broker = Broker::start(attached, log, None)?;
    broker.announce();
    match broker.serve(&signals) {
        Ok(End::Asked { exit, .. }) => broker.stop(exit),
        Ok(End::Vm(_) | End::VmmGone) => bail!("a VM has ended that is not there"),
        Err(e) => Err(match e.downcast_ref::<GivenUp>() {
            Some(given_up) => anyhow!(
                "{given_up}; established flows go on in the kernel and new ones are refused: run \
                 `slipgate attach` again, which takes them over"
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

fn attach(config: Config, inputs: Inputs) -> anyhow::Result<Attached> {
    let mode = config.mode;
    Attached::new(config, inputs).map_err(|e| match lacks_support(&e) {
        false => e,
        true if mode == Mode::Auto => {
            e.context("--mode auto: the hybrid NAT can't run, and there is no other mode yet")
        }
        true => e.context("the hybrid NAT can't run"),
    })
}

/// Whether it is for want of privileges or of a kernel that can: not for what the user asked.
fn lacks_support(error: &anyhow::Error) -> bool {
    let ours = error.downcast_ref::<slipgate_control::Error>();
    ours.is_some_and(slipgate_control::Error::is_unsupported)
}

/// Why the loop ended in order.
#[derive(Debug)]
enum End {
    /// By a signal, over the control socket, or by the escape.
    Asked { exit: OnExit, signal: Signal },
    /// The guest ended.
    Vm(Box<VmmEnd>),
    /// The VMM died, or fell silent.
    VmmGone,
}

struct Broker {
    attached: Attached,
    engine: Engine,
    control: ControlServer,
    asked: Questions,
    applying: Option<Applying>,
    /// VMs that learn.
    opened: Vec<Opened>,
    /// And those that are to, with who asked and its socket.
    to_open: VecDeque<(ClientId, String, OwnedFd)>,
    /// SIGHUP came while a policy was being put in force.
    apply_again: bool,
    /// With `run`.
    vm: Option<Vm>,
    reserved_ports: Vec<(u8, u16)>,
    look_due: Instant,
    /// With `--metrics`.
    metrics: Option<Metrics>,
    /// With `--bpf-log`.
    programs_log: Option<BpfLog>,
}

impl Broker {
    fn start(mut attached: Attached, log: &str, vm: Option<Vm>) -> anyhow::Result<Self> {
        let owner = std::env::var("SUDO_UID").ok();
        let owner = owner.and_then(|uid| uid.parse().ok());
        let owner = owner.unwrap_or_else(|| nix::unistd::getuid().as_raw());
        let socket = format!("{}.sock", attached.owner.row());
        let socket = attached.datapath.paths().run_dir.join(socket);
        let reserved_ports = bound_ports::bound(&attached.config.nat_ports).unwrap_or_default();
        let start = |attached: &mut Attached| {
            let control = ControlServer::bind(&socket, owner)?;
            // What may fail for the user's reasons comes first.
            attached.reserve_forwards()?;
            let (engine, adopted) = Engine::start(attached, &reserved_ports, log, ENGINE_WITHIN)?;
            attached.write_forwards()?;
            // Adopted flows and the engine's first ones may have claimed next hops.
            attached.refresh_next_hops()?;
            anyhow::Ok((control, engine, adopted))
        };
        let (control, engine, adopted) = match start(&mut attached) {
            Ok(started) => started,
            Err(e) => {
                attached.give_up();
                return Err(e);
            }
        };
        if attached.owner.adopted() && !attached.config.new_vms {
            match adopted {
                0 => tracing::info!("took over from a predecessor; none of its flows lives on"),
                flows => tracing::info!("took over {} of a predecessor", counted(flows, "flow")),
            }
        }
        let mut broker = Self {
            programs_log: attached.datapath.take_log(),
            attached,
            engine,
            control,
            asked: Questions::default(),
            applying: None,
            opened: Vec::new(),
            to_open: VecDeque::new(),
            apply_again: false,
            vm,
            reserved_ports,
            look_due: Instant::now() + LOOK_EVERY,
            metrics: None,
        };
        broker.attached.close_departed()?;
        if let Err(e) = broker.attached.serve_taps() {
            let goes_on = broker.vm.is_none() && broker.attached.owner.adopted();
            let e = match &mut broker.vm {
                Some(vm) => vm.blame(e),
                None => e,
            };
            // A predecessor's flows go on; none does for a guest that never ran. What fails here is
            // not what went wrong.
            if !goes_on {
                let _ = broker.stop(OnExit::Detach);
            }
            return Err(e);
        }
        broker.attached.forget_former();
        broker.attached.datapath.set_serves(true);
        broker.tell_frozen();
        if let Some(listener) = broker.attached.metrics.take() {
            broker.metrics = Some(Metrics::new(listener, &broker.attached, log));
        }
        sandbox::limit_broker().context("giving up what the broker does not need")?;
        Ok(broker)
    }

    fn announce(&self) {
        let a = &self.attached;
        let names: Vec<_> = a.vms.iter().map(|vm| vm.config.name.as_str()).collect();
        let mut out = std::io::stdout().lock();
        let written = writeln!(
            out,
            "{READY}: {} by {}, engine port {}",
            names.join(", "),
            a.uplink.name,
            a.port.name
        )
        .and_then(|()| out.flush());
        // Guests are served all the same.
        if let Err(e) = written {
            tracing::warn!("saying on stdout that guests are served: {e}");
        }
    }

    /// The loop. Returns when it is asked to stop, or the VM has ended.
    fn serve(&mut self, signals: &SignalFd) -> anyhow::Result<End> {
        loop {
            let ready = self.wait(signals)?;
            if ready.signals
                && let Some(info) = signals.read_signal()?
            {
                let signal = Signal::try_from(info.ssi_signo as i32).unwrap_or(Signal::SIGTERM);
                if signal != Signal::SIGHUP {
                    let exit = self.attached.config.on_exit;
                    return Ok(End::Asked { exit, signal });
                }
                self.reopen_files()?;
                self.apply(None, None)?;
            }
            // Before the network: its TAP goes with it.
            if ready.vmm
                && let Some(end) = self.hear_vmm()
            {
                return Ok(end);
            }
            if ready.typed
                && let Some(vm) = &mut self.vm
                && vm.console.turn() == Typed::Quit
            {
                return Ok(End::Asked {
                    exit: OnExit::Detach,
                    signal: Signal::SIGINT,
                });
            }
            if ready.channel {
                self.hear_engine()?;
            }
            if ready.engine {
                self.engine.has_ended();
            }
            self.see_to_engine()?;
            let is_due = |due| due <= Instant::now();
            if ready.network || self.attached.watch.due().is_some_and(is_due) {
                self.follow_network()?;
            }
            if ready.control
                && let Some(exit) = self.answer_control()?
            {
                let signal = Signal::SIGTERM;
                return Ok(End::Asked { exit, signal });
            }
            self.see_to_opened()?;
            self.see_to_metrics()?;
            if let Some(log) = &mut self.programs_log {
                log.flush();
            }
            if Instant::now() >= self.look_due {
                self.look_due = Instant::now() + LOOK_EVERY;
                self.attached.keep_unrouted();
                self.serve_what_came()?;
                self.look_at_ports()?;
                self.look_at_resolvers()?;
                self.attached.look_at_guards();
            }
        }
    }

    /// Waits until there is something to do, or to look after.
    fn wait(&self, signals: &SignalFd) -> anyhow::Result<Ready> {
        let due = self.metrics.as_ref().and_then(Metrics::due);
        let due = due.into_iter().chain(self.attached.watch.due());
        let due = due.chain([self.engine.due()]);
        let due = due.fold(self.look_due, Instant::min);
        let waits = self.control.has_waiting();
        let wait = match waits {
            true => Duration::ZERO,
            false => due.saturating_duration_since(Instant::now()),
        };
        let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
        let input = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![input(signals.as_fd()), input(self.attached.watch.as_fd())];
        let engine = self.engine.watched();
        let has_engine = engine.is_some();
        let engine_at = fds.len();
        fds.extend(engine.into_iter().flatten());
        let mut typed = None;
        let vmm_at = fds.len();
        if let Some(vm) = &self.vm {
            fds.extend([input(vm.vmm.pidfd()), input(vm.vmm.channel().as_fd())]);
            let wants = vm.console.wants();
            typed = wants.map(|_| fds.len());
            fds.extend(wants.map(|(fd, flags)| PollFd::new(fd, flags)));
        }
        let others = fds.len();
        fds.extend(self.opened.iter().filter_map(Opened::lifeline));
        fds.extend(self.control.fds().map(input));
        fds.extend(self.programs_log.as_ref().map(|log| input(log.as_fd())));
        fds.extend(self.metrics.iter().flat_map(Metrics::fds).map(input));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e).context("waiting for something to do"),
        }
        let is = |at: usize| fds[at].any().unwrap_or(true);
        Ok(Ready {
            signals: is(0),
            network: is(1),
            engine: has_engine && is(engine_at),
            channel: has_engine && is(engine_at + 1),
            vmm: self.vm.is_some() && (is(vmm_at) || is(vmm_at + 1)),
            typed: typed.is_some_and(is),
            control: waits || (others..fds.len()).any(is),
        })
    }

    /// What the VMM has said; how the VM ended, if it did.
    fn hear_vmm(&mut self) -> Option<End> {
        for _ in 0..HEARD_AT_ONCE {
            match self.vm.as_ref()?.vmm.heard() {
                Ok(Received::Nothing) => break,
                Ok(Received::Message(FromVmm::Ended(end), _)) => return Some(End::Vm(end)),
                Ok(Received::Message(FromVmm::Counters { request, counters }, _)) => {
                    self.answer_machine(request, counters);
                }
                Ok(Received::Message(FromVmm::Ready | FromVmm::Failed { .. }, _)) => {}
                Ok(Received::End) => return Some(End::VmmGone),
                Err(e) => {
                    tracing::warn!("the VMM: {e:#}");
                    return Some(End::VmmGone);
                }
            }
        }
        None
    }

    fn hear_engine(&mut self) -> anyhow::Result<()> {
        let mut refresh = false;
        for message in self.engine.hear()? {
            match message {
                ToBroker::NextHopsWanted => refresh = true,
                ToBroker::Why { request, answer } => self.answer_why(request, answer),
                ToBroker::Names { request, page } => self.answer_names(request, page),
                ToBroker::Applied {
                    request,
                    cut,
                    kept,
                    left,
                } => self.applied(request, Applied { cut, kept, left })?,
                ToBroker::Cut { request, flows } => {
                    let cut = flows.map(|flows| Answer::Cut { flows });
                    self.answer_change(request, cut.unwrap_or(Answer::UnknownFlow));
                }
                ToBroker::Capturing { request, refused }
                | ToBroker::Listening { request, refused } => {
                    let refused = refused.map(|error| Answer::Error { error });
                    self.answer_change(request, refused.unwrap_or(Answer::Done));
                }
                ToBroker::Thawed { request } => self.thawed(request),
                ToBroker::Ready { adopted } => self.engine_serves(adopted)?,
                // The first is the watch's, the second is waited for elsewhere.
                ToBroker::Answered { .. } | ToBroker::Stopped => {}
            }
        }
        if refresh {
            self.attached.refresh_next_hops()?;
        }
        Ok(())
    }

    /// Watches the engine, and has another one in the place of one that ended or hangs.
    fn see_to_engine(&mut self) -> anyhow::Result<()> {
        if let Some(how) = self.engine.failed()? {
            self.forget_asked();
            self.engine.plan(how)?;
        }
        if self.engine.is_due() {
            match self.attached.clean_after_engine(owner::WHILE_SERVING) {
                Ok(()) => self
                    .engine
                    .start_again(&self.attached, &self.reserved_ports),
                Err(e) if e.is_locked() || e.is_shortage() => {
                    tracing::warn!("the engine is started a little later: {e}");
                    self.engine.put_off();
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// An engine in the place of another one is ready.
    fn engine_serves(&mut self, adopted: u64) -> anyhow::Result<()> {
        if !self.engine.serves() {
            return Ok(());
        }
        self.attached.write_forwards()?;
        // Adopted flows may have claimed next hops.
        self.attached.refresh_next_hops()?;
        // What was asked while there was none is answered by nobody.
        if let Some(metrics) = &mut self.metrics {
            metrics.asking = None;
        }
        let flows = counted(adopted, "flow");
        tracing::info!("there is an engine again, which took over {flows}");
        self.tell_policies_again()
    }

    /// Goes on with other files of the same names: the old ones were moved away. They go on being
    /// written to where the new ones can't be opened.
    fn reopen_files(&mut self) -> anyhow::Result<()> {
        match self.attached.reopen_files() {
            Ok(files) if files.is_empty() => {}
            Ok(files) => {
                for (message, file) in files {
                    self.engine.hand(message, file)?;
                }
                tracing::info!("opened the flow log and --pcap's file again");
            }
            Err(e) => tracing::warn!("{e:#}"),
        }
        Ok(())
    }

    /// What the metrics process asks for, and its end.
    fn see_to_metrics(&mut self) -> anyhow::Result<()> {
        let Some(metrics) = &mut self.metrics else {
            return Ok(());
        };
        if let Some(from) = metrics.turn(&self.attached) {
            let request = self.asked.next();
            metrics.asking = Some(request);
            self.engine.tell(ToEngine::Names { request, from })?;
        }
        Ok(())
    }

    /// Takes in what has changed in the host's network, and goes along with it. What can't be done for
    /// want of descriptors or memory is done later, with all else that changed by then.
    fn follow_network(&mut self) -> anyhow::Result<()> {
        let changes = self.attached.watch.update()?;
        match self.go_along_with(changes) {
            Err(e) if is_shortage(&e) => self.attached.watch.fall_behind(&format!("{e:#}")),
            Err(e) => return Err(e),
            Ok(()) => self.attached.watch.caught_up(),
        }
        Ok(())
    }

    fn go_along_with(&mut self, changes: Changes) -> anyhow::Result<()> {
        // A TAP of ours goes with its VM, whose end is about to be seen.
        if changes.links && self.vm.is_none() {
            for vm in self.attached.follow_taps()? {
                self.engine.tell(ToEngine::Vm(vm))?;
            }
        }
        if changes.links || changes.routes {
            self.attached.follow_uplink()?;
        }
        if changes.links || changes.routes || changes.addresses {
            let view = self.attached.network_view();
            self.attached.policies.set_local(&view.local);
            self.engine.tell(ToEngine::Network(view))?;
        }
        if changes.any() {
            self.attached.refresh_next_hops()?;
            self.look_at_resolvers()?;
        }
        Ok(())
    }

    /// Serves TAPs that are there and could not be served when they came.
    fn serve_what_came(&mut self) -> anyhow::Result<()> {
        if self.vm.is_none() && self.attached.lacks_a_tap() {
            let links = Changes {
                links: true,
                ..Changes::default()
            };
            match self.go_along_with(links) {
                Err(e) if is_shortage(&e) => self.attached.watch.fall_behind(&format!("{e:#}")),
                other => other?,
            }
        }
        Ok(())
    }

    fn look_at_ports(&mut self) -> anyhow::Result<()> {
        // What can't be read now is as it was.
        let Some(now) = bound_ports::bound(&self.attached.config.nat_ports) else {
            return Ok(());
        };
        if now != self.reserved_ports {
            self.engine.tell(ToEngine::ReservedPorts(now.clone()))?;
            self.reserved_ports = now;
        }
        Ok(())
    }

    /// Follows the host's resolvers.
    fn look_at_resolvers(&mut self) -> anyhow::Result<()> {
        if let Some(now) = self.attached.resolvers.changed() {
            tracing::info!("the host's resolvers are {now:?} now");
            self.engine.tell(ToEngine::Resolvers(now))?;
        }
        Ok(())
    }

    /// Ends both processes in order.
    fn stop(mut self, exit: OnExit) -> anyhow::Result<()> {
        self.attached.datapath.set_serves(false);
        if exit == OnExit::Detach {
            // Nothing new comes from the guests while their flows end.
            self.attached.shut_taps()?;
        }
        let engine_exit = match exit {
            OnExit::Detach => EngineExit::Detach,
            OnExit::Keep => EngineExit::Keep,
        };
        let ports = &self.reserved_ports;
        self.engine
            .stop(engine_exit, &mut self.attached, ports, ENGINE_WITHIN)?;
        match exit {
            OnExit::Keep => tracing::info!("stopped; flows go on in the kernel"),
            OnExit::Detach => {
                // Its socket is in the directory that goes.
                drop(self.control);
                let pin_dir = self.attached.config.pin_dir.clone();
                let all = self.attached.detach()?;
                // Others' may be in it, of other network namespaces.
                let _ = std::fs::remove_dir(pin_dir);
                tracing::info!(
                    "stopped; {}",
                    if all {
                        "nothing is left in the kernel"
                    } else {
                        "others still use the maps"
                    }
                );
            }
        }
        Ok(())
    }
}

/// Whether it failed for want of what the host may have again.
fn is_shortage(error: &anyhow::Error) -> bool {
    let ours = error.downcast_ref::<slipgate_control::Error>();
    ours.is_some_and(slipgate_control::Error::is_shortage)
}

/// Whether it may go well a little later: another process holds the lock, or something is short.
fn is_passing(error: &anyhow::Error) -> bool {
    let ours = error.downcast_ref::<slipgate_control::Error>();
    ours.is_some_and(|error| error.is_locked() || error.is_shortage())
}

/// What there is to do.
struct Ready {
    signals: bool,
    engine: bool,
    channel: bool,
    network: bool,
    vmm: bool,
    typed: bool,
    control: bool,
}

/// Signals that end the loop, or (SIGHUP) have the flow log opened and the policy read again, by
/// descriptor.
fn signals(more: &[Signal]) -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]
        .iter()
        .chain(more)
    {
        set.add(*signal);
    }
    let mut blocked = set;
    blocked.add(Signal::SIGPIPE);
    // A terminal is put back from the background, too.
    blocked.add(Signal::SIGTTOU);
    blocked.thread_block()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}
