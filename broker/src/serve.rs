//! The broker while it serves: one loop that follows the network, answers the control socket and
//! watches the other processes.
use std::{
    io::Write as _,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use slipgate_control::{BpfLog, netlink::Changes, owner};
use slipgate_ipc::{
    channel::Received,
    client::{Asked, ClientAnswer, ClientRequest, ControlServer},
    engine::{EngineReply, EngineRequest, FromEngine, OnExit, ToEngine},
    vmm::{FromVmm, VmmEnd},
};

use crate::{
    control_api::Pending,
    counted, host,
    kernel_errors::is_shortage,
    kernel_state::Attached,
    parts::Parts,
    policy_apply::{Applied, PolicyChanges},
    privileges,
    process::{Engine, HEARD_AT_ONCE, Metrics},
    vm::{Typed, Vm},
};

/// The line that says that guests are served.
const READY: &str = "slipgate: ready";
/// How long the engine may take to adopt, or to end flows.
const ENGINE_WITHIN: Duration = Duration::from_secs(60);
/// How often the host is looked at for what it sends no notice of: sockets bound to translated
/// ports, forwarding turned on for the TAPs, other resolvers.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Why the loop ended in order.
#[derive(Debug)]
pub(crate) enum End {
    /// By a signal, over the control socket, or by the escape.
    Asked { exit: OnExit, signal: Signal },
    /// The guest ended.
    Vm(Box<VmmEnd>),
    /// The VMM died, or fell silent.
    VmmGone,
}

pub(crate) struct Broker {
    pub(crate) parts: Parts,
    /// What other processes have been asked for clients.
    pending: Pending,
    policies: PolicyChanges,
    /// With `run`.
    pub(crate) vm: Option<Vm>,
    reserved_ports: Vec<(u8, u16)>,
    look_due: Instant,
    /// With `--metrics`.
    metrics: Option<Metrics>,
    /// With `--bpf-log`.
    programs_log: Option<BpfLog>,
}

impl Broker {
    pub(crate) fn start(mut attached: Attached, log: &str, vm: Option<Vm>) -> anyhow::Result<Self> {
        let owner = std::env::var("SUDO_UID").ok();
        let owner = owner.and_then(|uid| uid.parse().ok());
        let owner = owner.unwrap_or_else(|| nix::unistd::getuid().as_raw());
        let socket = format!("{}.sock", attached.owner.row());
        let socket = attached.datapath.paths().run_dir.join(socket);
        let reserved_ports = host::bound(&attached.config.nat_ports).unwrap_or_default();
        let start = |attached: &mut Attached| {
            let control = ControlServer::bind(&socket, owner)
                .with_context(|| format!("listening on the control socket {}", socket.display()))?;
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
            parts: Parts::new(attached, engine, control),
            pending: Pending::default(),
            policies: PolicyChanges::default(),
            vm,
            reserved_ports,
            look_due: Instant::now() + LOOK_EVERY,
            metrics: None,
        };
        broker.parts.attached.close_departed()?;
        if let Err(e) = broker.parts.attached.serve_taps() {
            let goes_on = broker.vm.is_none() && broker.parts.attached.owner.adopted();
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
        broker.parts.attached.forget_former();
        broker.parts.attached.datapath.set_serves(true);
        broker.parts.attached.tell_frozen();
        if let Some(listener) = broker.parts.attached.metrics.take() {
            broker.metrics = Some(Metrics::new(listener, &broker.parts.attached, log));
        }
        privileges::limit_broker().context("giving up what the broker does not need")?;
        Ok(broker)
    }

    pub(crate) fn announce(&self) {
        let a = &self.parts.attached;
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
    pub(crate) fn serve(&mut self, signals: &SignalFd) -> anyhow::Result<End> {
        loop {
            let ready = self.wait(signals)?;
            if ready.signals
                && let Some(info) = signals.read_signal()?
            {
                let signal = Signal::try_from(info.ssi_signo as i32).unwrap_or(Signal::SIGTERM);
                if signal != Signal::SIGHUP {
                    let exit = self.parts.attached.config.on_exit;
                    return Ok(End::Asked { exit, signal });
                }
                self.reopen_files()?;
                self.policies.apply(&mut self.parts, None, None)?;
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
                self.parts.engine.has_ended();
            }
            self.see_to_engine()?;
            let is_due = |due| due <= Instant::now();
            if ready.network || self.parts.attached.watch.due().is_some_and(is_due) {
                self.follow_network()?;
            }
            if ready.control
                && let Some(exit) = self.answer_control()?
            {
                let signal = Signal::SIGTERM;
                return Ok(End::Asked { exit, signal });
            }
            self.policies.see_to_learning(&mut self.parts)?;
            self.see_to_metrics()?;
            if let Some(log) = &mut self.programs_log {
                log.flush();
            }
            if Instant::now() >= self.look_due {
                self.look_due = Instant::now() + LOOK_EVERY;
                self.parts.attached.keep_unrouted();
                self.serve_what_came()?;
                self.look_at_ports()?;
                self.look_at_resolvers()?;
                self.parts.attached.look_at_guards();
            }
        }
    }

    /// Waits until there is something to do, or to look after.
    fn wait(&self, signals: &SignalFd) -> anyhow::Result<Ready> {
        let due = self.metrics.as_ref().and_then(Metrics::due);
        let due = due.into_iter().chain(self.parts.attached.watch.due());
        let due = due.chain([self.parts.engine.due()]);
        let due = due.fold(self.look_due, Instant::min);
        let waits = self.parts.control.has_waiting();
        let wait = match waits {
            true => Duration::ZERO,
            false => due.saturating_duration_since(Instant::now()),
        };
        let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
        let input = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![
            input(signals.as_fd()),
            input(self.parts.attached.watch.as_fd()),
        ];
        let engine = self.parts.engine.watched();
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
        fds.extend(self.policies.lifelines());
        fds.extend(self.parts.control.fds().map(input));
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
                Ok(Received::Message(FromVmm::Ended(end))) => return Some(End::Vm(end)),
                Ok(Received::Message(FromVmm::Counters { id, counters })) => {
                    self.pending.answer_machine(&mut self.parts, id, counters);
                }
                Ok(Received::Message(FromVmm::Ready | FromVmm::Failed { .. })) => {}
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
        for message in self.parts.engine.hear()? {
            match message {
                FromEngine::NextHopsWanted => refresh = true,
                FromEngine::Reply { id, reply } => self.replied(id, reply),
                FromEngine::Applied {
                    id,
                    cut,
                    kept,
                    left,
                } => self
                    .policies
                    .applied(&mut self.parts, id, Applied { cut, kept, left })?,
                FromEngine::Ready { adopted } => self.engine_serves(adopted)?,
                // The first is the watch's, the second is waited for elsewhere.
                FromEngine::Pong { .. } | FromEngine::Stopped => {}
            }
        }
        if refresh {
            self.parts.attached.refresh_next_hops()?;
        }
        Ok(())
    }

    /// Gives the engine's reply to who asked.
    fn replied(&mut self, id: u64, reply: EngineReply) {
        match &mut self.metrics {
            Some(metrics) if metrics.asking == Some(id) => metrics.answer(reply),
            _ => self.pending.replied(&mut self.parts, id, reply),
        }
    }

    /// Answers what can be answered, and asks on. How to stop, when it is asked to.
    fn answer_control(&mut self) -> anyhow::Result<Option<OnExit>> {
        let Self {
            parts,
            pending,
            policies,
            vm,
            ..
        } = self;
        for Asked { client, request } in parts.control.serve() {
            if parts.engine.is_behind() && request.asks_engine() {
                parts.refuse(
                    client,
                    "the engine can be asked nothing more just now: try again",
                );
                continue;
            }
            match request {
                ClientRequest::Engine { about, ask } => {
                    pending.ask_engine(parts, client, about, ask)?;
                }
                ClientRequest::Freeze { vm } => pending.freeze(parts, client, &vm),
                ClientRequest::Apply { file } => policies.apply(parts, Some(client), file)?,
                ClientRequest::Open { vm, lifeline } => {
                    policies.open(parts, client, vm, lifeline)?;
                }
                ClientRequest::Machines => {
                    pending.ask_machine(parts, client, vm.as_ref().map(|vm| &vm.vmm));
                }
                ClientRequest::Vms => {
                    let served = parts.attached.unknown_vm();
                    parts.control.answer(client, &served);
                }
                ClientRequest::Stop { keep: true } if vm.is_some() => parts.refuse(
                    client,
                    "the VM of `slipgate run` ends with it: there is nothing to keep flows for",
                ),
                ClientRequest::Stop { keep } => {
                    parts.control.answer(client, &ClientAnswer::Done);
                    return Ok(Some(if keep { OnExit::Keep } else { OnExit::Detach }));
                }
            }
        }
        Ok(None)
    }

    /// Watches the engine, and has another one in the place of one that ended or hangs.
    fn see_to_engine(&mut self) -> anyhow::Result<()> {
        if let Some(how) = self.parts.engine.failed()? {
            self.pending.forget_engine(&mut self.parts);
            self.parts.engine.plan(how)?;
        }
        if self.parts.engine.is_due() {
            match self.parts.attached.clean_after_engine(owner::WHILE_SERVING) {
                Ok(()) => self
                    .parts
                    .engine
                    .start_again(&self.parts.attached, &self.reserved_ports),
                Err(e) if e.is_locked() || e.is_shortage() => {
                    tracing::warn!("the engine is started a little later: {e}");
                    self.parts.engine.put_off();
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// An engine in the place of another one is ready.
    fn engine_serves(&mut self, adopted: u64) -> anyhow::Result<()> {
        if !self.parts.engine.serves() {
            return Ok(());
        }
        self.parts.attached.write_forwards()?;
        // Adopted flows may have claimed next hops.
        self.parts.attached.refresh_next_hops()?;
        // What was asked while there was none is answered by nobody.
        if let Some(metrics) = &mut self.metrics {
            metrics.asking = None;
        }
        let flows = counted(adopted, "flow");
        tracing::info!("there is an engine again, which took over {flows}");
        self.policies.tell_again(&mut self.parts)
    }

    /// Goes on with other files of the same names: the old ones were moved away. They go on being
    /// written to where the new ones can't be opened.
    fn reopen_files(&mut self) -> anyhow::Result<()> {
        match self.parts.attached.reopen_files() {
            Ok(files) if files.is_empty() => {}
            Ok(files) => {
                for message in files {
                    self.parts.engine.tell(message)?;
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
        if let Some(from) = metrics.turn(&self.parts.attached) {
            let id = self.parts.next_id();
            metrics.asking = Some(id);
            self.parts.engine.tell(ToEngine::Request {
                id,
                about: None,
                request: EngineRequest::Inventory { from },
            })?;
        }
        Ok(())
    }

    /// Takes in what has changed in the host's network, and goes along with it. What can't be done for
    /// want of descriptors or memory is done later, with all else that changed by then.
    fn follow_network(&mut self) -> anyhow::Result<()> {
        let changes = self.parts.attached.watch.update()?;
        let done = self.go_along_with(changes);
        if self.unless_short(done)? {
            self.parts.attached.watch.caught_up();
        }
        Ok(())
    }

    fn go_along_with(&mut self, changes: Changes) -> anyhow::Result<()> {
        // A TAP of ours goes with its VM, whose end is about to be seen.
        if changes.links && self.vm.is_none() {
            self.follow_taps()?;
        }
        if changes.links || changes.routes {
            self.parts.attached.follow_uplink()?;
        }
        if changes.links || changes.routes || changes.addresses {
            let view = self.parts.attached.network_view();
            self.parts.attached.policies.set_local(&view.local);
            self.parts.engine.tell(ToEngine::Network(view))?;
        }
        if changes.any() {
            self.parts.attached.refresh_next_hops()?;
            self.look_at_resolvers()?;
        }
        Ok(())
    }

    /// Serves TAPs that are there and could not be served when they came.
    fn serve_what_came(&mut self) -> anyhow::Result<()> {
        if self.vm.is_none() && self.parts.attached.lacks_a_tap() {
            let done = self.follow_taps();
            self.unless_short(done)?;
        }
        Ok(())
    }

    /// Serves TAPs that came, and has the engine know of MTUs that changed.
    fn follow_taps(&mut self) -> anyhow::Result<()> {
        let changed = self.parts.attached.follow_taps()?;
        let mut vms = changed.into_iter().map(ToEngine::Vm);
        vms.try_for_each(|vm| self.parts.engine.tell(vm))
    }

    /// Whether it was done. What failed for want of descriptors or memory is left to the watch, which
    /// asks for everything again later.
    fn unless_short(&mut self, done: anyhow::Result<()>) -> anyhow::Result<bool> {
        match done {
            Err(e) if is_shortage(&e) => {
                self.parts.attached.watch.fall_behind(&format!("{e:#}"));
                Ok(false)
            }
            other => other.map(|()| true),
        }
    }

    fn look_at_ports(&mut self) -> anyhow::Result<()> {
        // What can't be read now is as it was.
        let Some(now) = host::bound(&self.parts.attached.config.nat_ports) else {
            return Ok(());
        };
        if now != self.reserved_ports {
            self.parts
                .engine
                .tell(ToEngine::ReservedPorts(now.clone()))?;
            self.reserved_ports = now;
        }
        Ok(())
    }

    /// Follows the host's resolvers.
    fn look_at_resolvers(&mut self) -> anyhow::Result<()> {
        if let Some(now) = self.parts.attached.resolvers.changed() {
            tracing::info!("the host's resolvers are {now:?} now");
            self.parts.engine.tell(ToEngine::Resolvers(now))?;
        }
        Ok(())
    }

    /// Ends both processes in order.
    pub(crate) fn stop(mut self, exit: OnExit) -> anyhow::Result<()> {
        self.parts.attached.datapath.set_serves(false);
        if exit == OnExit::Detach {
            // Nothing new comes from the guests while their flows end.
            self.parts.attached.shut_taps()?;
        }
        let ports = &self.reserved_ports;
        self.parts
            .engine
            .stop(exit, &mut self.parts.attached, ports, ENGINE_WITHIN)?;
        match exit {
            OnExit::Keep => tracing::info!("stopped; flows go on in the kernel"),
            OnExit::Detach => {
                // Its socket is in the directory that goes.
                drop(self.parts.control);
                let pin_dir = self.parts.attached.config.pin_dir.clone();
                let all = self.parts.attached.detach()?;
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
pub(crate) fn signals(more: &[Signal]) -> nix::Result<SignalFd> {
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
