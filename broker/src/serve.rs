//! The broker while it serves: one loop that follows the network, answers the control socket and
//! watches the other processes.
mod host_changes;
mod start_and_stop;

use self::start_and_stop::descriptors;

use std::{
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::{
        signal::{SigHandler, SigSet, Signal, signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use slipgate_control::BpfLog;
use slipgate_ipc::{
    api::Event,
    client::{ClientAnswer, ClientRequest, PermittedRequest, VmChange},
    engine::{EngineReply, EngineRequest, FromEngine, OnExit, ToEngine},
    vmm::VmmEnd,
};

use crate::{
    asking::timeout_of,
    control_api::{BUSY, Pending},
    counted,
    handover::hand_over,
    kernel_state::today,
    machine_orders::MachineOrders,
    parts::Parts,
    passed_tap,
    policy_apply::{Applied, NamedChange, PolicyChanges},
    process::{Api, MESSAGES_AT_ONCE, Metrics, page_of, reply_of_all},
    service_manager::ServiceManager,
    vm::{Heard, Typed, Vm},
    vm_changes::{VmChanges, Wanted},
};

/// Time limit for the engine to adopt flows, or to end them.
const ENGINE_WITHIN: Duration = Duration::from_secs(60);
/// Interval of checks for host changes without notification: sockets bound to translated ports,
/// forwarding turned on for the TAPs, other resolvers.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Time within which machines have to take back what the end of the daemon interrupts.
const TAKEN_BACK_WITHIN: Duration = Duration::from_secs(15);

/// Reason for which the loop ended in order.
#[derive(Debug)]
pub(crate) enum End {
    /// A stop was requested by a signal, over the control socket, or by the console's escape.
    Asked { exit: OnExit, signal: Signal },
    /// The guest ended by itself.
    Vm(Box<VmmEnd>),
    /// The VMM died or no longer responds.
    VmmGone,
}

impl End {
    /// The end of a VM.
    pub(crate) fn of_vm(heard: Heard) -> Self {
        match heard {
            Heard::Ended(end) => Self::Vm(end),
            Heard::Gone => Self::VmmGone,
            Heard::Killed => Self::Asked {
                exit: OnExit::Detach,
                signal: Signal::SIGTERM,
            },
        }
    }
}

pub(crate) struct Broker {
    pub(crate) parts: Parts,
    /// Client requests that wait for the answer of another process.
    pending: Pending,
    policies: PolicyChanges,
    vm_changes: VmChanges,
    /// Orders to machines of other processes.
    machine_orders: MachineOrders,
    /// How and by when the loop ends, once it is to end and something is taken back before.
    stopping: Option<(OnExit, Signal, Instant)>,
    /// The VM of `slipgate run`; `None` for other commands.
    pub(crate) vm: Option<Vm>,
    reserved_ports: Vec<(u8, u16)>,
    look_due: Instant,
    /// The metrics process, with `--metrics`.
    metrics: Option<Metrics>,
    /// The processes that answer the API.
    apis: Vec<Api>,
    /// The service manager that started this process, if one did.
    service_manager: ServiceManager,
    /// Reader of the programs' messages, with `--bpf-log`.
    programs_log: Option<BpfLog>,
}

impl Broker {
    /// Runs the loop. Returns when a stop is requested, or the VM has ended.
    pub(crate) fn serve(&mut self, signals: &SignalFd) -> anyhow::Result<End> {
        loop {
            if let Some(end) = self.stops_now() {
                return Ok(end);
            }
            let ready = self.wait(signals)?;
            if ready.signals
                && let Some(info) = signals.read_signal()?
            {
                let signal = Signal::try_from(info.ssi_signo as i32).unwrap_or(Signal::SIGTERM);
                if signal == Signal::SIGHUP {
                    self.service_manager.reloading();
                    self.reopen_files()?;
                    self.policies.apply(&mut self.parts, None, None)?;
                } else {
                    self.begin_to_stop(self.parts.attached.config.on_exit, signal);
                    continue;
                }
            }
            // Before the network: its TAP goes with it.
            if ready.vmm
                && let Some(end) = self.hear_vm()
            {
                return Ok(end);
            }
            if ready.console
                && let Some(vm) = &mut self.vm
                && vm.console.turn() == Typed::Quit
            {
                return Ok(End::Asked {
                    exit: OnExit::Detach,
                    signal: Signal::SIGINT,
                });
            }
            for worker in ready.channels {
                self.receive_from_engine(worker)?;
            }
            for worker in ready.engines {
                self.parts.engines.of_mut(worker).has_ended();
            }
            for worker in self.parts.engines.workers() {
                self.see_to_engine(worker)?;
            }
            let is_due = |due| due <= Instant::now();
            if ready.network || self.parts.attached.watch.due().is_some_and(is_due) {
                self.follow_network()?;
            }
            if ready.filters {
                self.parts.attached.follow_filters();
            }
            if ready.host_nat {
                self.parts.attached.follow_host_nat();
            }
            if self.parts.attached.look_at_host_nat() {
                self.look_at_ports()?;
            }
            if ready.control
                && let Some(exit) = self.answer_control()?
            {
                self.begin_to_stop(exit, Signal::SIGTERM);
                continue;
            }
            self.policies.see_to_learning(&mut self.parts)?;
            self.vm_changes.see_to_clients(&mut self.parts)?;
            self.answer_machine_orders();
            self.see_to_policies()?;
            self.see_to_metrics()?;
            self.send_events();
            self.connect_apis()?;
            if !self.policies.is_applying() {
                self.service_manager.reloaded();
            }
            self.service_manager.is_alive();
            if let Some(log) = &mut self.programs_log {
                log.flush();
            }
            if self.parts.attached.budgets_due().is_some_and(is_due) {
                for (worker, order) in self.parts.attached.look_at_budgets(today()) {
                    self.pending
                        .order_for_budget(&mut self.parts, worker, order)?;
                }
            }
            if Instant::now() >= self.look_due {
                self.look_due = Instant::now() + LOOK_EVERY;
                self.serve_what_came()?;
                self.parts.attached.look_at_translated();
                self.look_at_ports()?;
                self.look_at_resolvers()?;
                self.parts.attached.look_at_guards();
                self.parts.attached.look_at_places();
                self.parts.attached.look_at_groups();
                self.parts.attached.look_at_unnoticed_nat();
            }
        }
    }

    /// The loop is to end. Snapshots by which VMs sleep are taken back before, which needs the loop.
    fn begin_to_stop(&mut self, exit: OnExit, signal: Signal) {
        let by = match self.stopping {
            None => Instant::now() + TAKEN_BACK_WITHIN,
            // Who asks once more does not want to wait.
            Some(_) => Instant::now(),
        };
        self.stopping = Some((exit, signal, by));
        self.machine_orders.give_up_sleeps();
    }

    fn stops_now(&self) -> Option<End> {
        let (exit, signal, by) = self.stopping?;
        let waits = self.machine_orders.has_sleeps() && Instant::now() < by;
        (!waits).then_some(End::Asked { exit, signal })
    }

    /// Waits until an event arrives or a check is due.
    fn wait(&self, signals: &SignalFd) -> anyhow::Result<Ready> {
        let due = self.metrics.as_ref().and_then(Metrics::due);
        let due = due.into_iter().chain(self.parts.attached.watch.due());
        let due = due.chain(self.parts.engines.due());
        let due = due.chain(self.parts.attached.budgets_due());
        let due = due.chain(self.parts.attached.host_nat.due());
        let due = due.chain(self.vm_changes.due());
        let due = due.chain(self.apis.iter().filter_map(Api::due));
        let due = due.chain(self.service_manager.due());
        let due = due.chain(self.stopping.map(|(_, _, by)| by));
        let due = due.fold(self.look_due, Instant::min);
        let orders_wait = self.vm.as_ref().is_some_and(|vm| vm.orders.has_waiting());
        let waits = self.parts.control.has_waiting() || orders_wait;
        let places = &self.parts.attached.hook_places;
        let wait = match waits || places.is_due() {
            true => Duration::ZERO,
            false => due.saturating_duration_since(Instant::now()),
        };
        let timeout = timeout_of(wait);
        let input = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![
            input(signals.as_fd()),
            input(self.parts.attached.watch.as_fd()),
        ];
        let filters_at = fds.len();
        fds.extend(places.fd().map(input));
        let host_nat_at = fds.len();
        fds.extend(self.parts.attached.host_nat.fds().map(input));
        let engines_at = fds.len();
        let mut watched = Vec::new();
        for (worker, engine) in self.parts.engines.watched() {
            watched.push(worker);
            fds.extend(engine);
        }
        let mut console = None;
        let vmm_at = fds.len();
        let vmm_fds = self.vm.as_ref().map_or(0, |vm| vm.fds().count());
        if let Some(vm) = &self.vm {
            fds.extend(vm.poll_fds());
            let wants = vm.console.wants();
            console = wants.map(|_| fds.len());
            fds.extend(wants.map(|(fd, flags)| PollFd::new(fd, flags)));
        }
        let others = fds.len();
        fds.push(input(self.vm_changes.fd()));
        fds.push(input(self.machine_orders.fd()));
        fds.extend(self.policies.lifelines());
        fds.extend(self.parts.control.fds().map(input));
        fds.extend(self.programs_log.as_ref().map(|log| input(log.as_fd())));
        fds.extend(self.metrics.iter().flat_map(Metrics::fds).map(input));
        fds.extend(self.apis.iter().flat_map(Api::fds));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e).context("waiting for something to do"),
        }
        let is = |at: usize| fds[at].any().unwrap_or(true);
        // Of each the pidfd, and then the channel.
        let ready = |which: usize| {
            let all = watched.iter().enumerate();
            let ready = all.filter(|(n, _)| is(engines_at + 2 * n + which));
            ready.map(|(_, worker)| *worker).collect()
        };
        // One that ended is started again, and what had no room is sent.
        let is_due = |due| due <= Instant::now();
        let mut apis = self.apis.iter();
        let is_api_due = apis.any(|api| api.is_held_back() || api.due().is_some_and(is_due));
        Ok(Ready {
            signals: is(0),
            network: is(1),
            filters: places.is_due() || (filters_at..host_nat_at).any(is),
            host_nat: (host_nat_at..engines_at).any(is),
            engines: ready(0),
            channels: ready(1),
            vmm: orders_wait || (vmm_at..vmm_at + vmm_fds).any(is),
            console: console.is_some_and(is),
            control: waits || is_api_due || (others..fds.len()).any(is),
        })
    }

    /// Handles orders to the VM and messages of the VMM. Returns how the VM ended, or is to end.
    fn hear_vm(&mut self) -> Option<End> {
        let Self {
            vm, pending, parts, ..
        } = self;
        let heard = vm.as_mut()?.hear(MESSAGES_AT_ONCE, |id, counters| {
            pending.answer_machine(parts, id, counters);
        });
        heard.map(End::of_vm)
    }

    fn receive_from_engine(&mut self, worker: usize) -> anyhow::Result<()> {
        let mut refresh = false;
        for message in self.parts.engines.of_mut(worker).receive()? {
            match message {
                FromEngine::NextHopsWanted => refresh = true,
                FromEngine::Reply { id, reply } => self.replied(worker, id, reply),
                FromEngine::Applied {
                    id,
                    cut,
                    kept,
                    left,
                } => self.policies.applied(
                    &mut self.parts,
                    worker,
                    id,
                    Applied { cut, kept, left },
                )?,
                FromEngine::Done { id } => self.vm_changes.done(&mut self.parts, worker, id),
                FromEngine::Activity { idle, busy } => {
                    self.parts.attached.note_activity(worker, idle, true);
                    self.parts.attached.note_activity(worker, busy, false);
                }
                FromEngine::Sleep(changes) => {
                    self.parts.attached.note_sleep(worker, changes);
                }
                FromEngine::Ready { adopted } => self.engine_serves(worker, adopted)?,
                // The first is the watch's, the others are waited for elsewhere.
                FromEngine::Pong { .. } | FromEngine::OpenQuestions(_) | FromEngine::Stopped => {}
            }
        }
        if refresh {
            self.parts.attached.refresh_next_hops()?;
        }
        Ok(())
    }

    /// Passes the engine's reply to the client that asked.
    fn replied(&mut self, worker: usize, id: u64, reply: EngineReply) {
        let workers = self.parts.engines.len();
        match &mut self.metrics {
            Some(metrics) if metrics.asking == Some((worker, id)) => {
                metrics.answer(reply_of_all(reply, worker, workers))
            }
            _ => self.pending.replied(&mut self.parts, worker, id, reply),
        }
    }

    /// Handles client requests: answers them, or passes them on. Returns how to stop, if a client
    /// asked for it.
    fn answer_control(&mut self) -> anyhow::Result<Option<OnExit>> {
        let mut asked = self.parts.control.serve();
        self.take_api_requests(&mut asked);
        let needs_notices = |asked: &PermittedRequest| {
            use ClientRequest::{Apply, PutPolicy, PutVm, RunVm, ServeVm};
            matches!(
                asked.request,
                PutVm { .. } | ServeVm { .. } | RunVm { .. } | PutPolicy { .. } | Apply { .. }
            )
        };
        if asked.iter().any(needs_notices) {
            // The notice of a TAP or a route that was made for the request may be on its way.
            self.follow_network()?;
        }
        let Self {
            parts,
            pending,
            policies,
            vm_changes,
            machine_orders,
            vm,
            metrics,
            apis,
            ..
        } = self;
        for PermittedRequest { client, request } in asked {
            // Others are carried out with the next engine, where there is none.
            let is_held_up = match &request {
                // By the one that it is for.
                ClientRequest::Engine { .. } => false,
                request => request.asks_engine() && parts.engines.is_behind(),
            };
            if is_held_up {
                parts.control.answer(client, &ClientAnswer::busy(BUSY));
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
                ClientRequest::Machine { .. } => parts.refuse(
                    client,
                    "orders to a machine go to its own socket: use `slipgate pause`, `resume`, \
                     `snapshot` or `kill`",
                ),
                ClientRequest::ListMachines => {
                    let machines = vm_changes.machines();
                    let answer = ClientAnswer::MachineList { machines };
                    parts.control.answer(client, &answer);
                }
                ClientRequest::OrderMachine { vm, order } => {
                    let begun = match vm_changes.machine(parts, &vm) {
                        Some(machine) => machine_orders.begin(client, machine, order),
                        None => Err(Box::new(unknown_machine(&vm))),
                    };
                    if let Err(answer) = begun {
                        parts.control.answer(client, &answer);
                    }
                }
                ClientRequest::Machines => {
                    pending.ask_machine(parts, client, vm.as_ref().map(|vm| &vm.vmm));
                }
                ClientRequest::ListVms => {
                    let answer = ClientAnswer::VmList {
                        vms: parts.attached.vm_list(),
                        room: parts.attached.room(),
                        displaced: parts.attached.displaced(),
                    };
                    parts.control.answer(client, &answer);
                }
                ClientRequest::GetVm { name } => match parts.attached.index_of(&name) {
                    Some(at) => parts.answer_vm(client, at, VmChange::Unchanged),
                    None => {
                        let answer = parts.attached.unknown_vm();
                        parts.control.answer(client, &answer);
                    }
                },
                ClientRequest::AbsentTaps => {
                    let taps = parts.attached.absent_taps().map(str::to_owned).collect();
                    let answer = ClientAnswer::AbsentTaps { taps };
                    parts.control.answer(client, &answer);
                }
                ClientRequest::GuestNetwork => {
                    let network = parts.attached.config.network.for_clients();
                    let answer = ClientAnswer::GuestNetwork { network };
                    parts.control.answer(client, &answer);
                }
                ClientRequest::HostNat => {
                    let status = parts.attached.host_nat_status();
                    parts
                        .control
                        .answer(client, &ClientAnswer::HostNat { status });
                }
                ClientRequest::ListPolicies => {
                    let policies = policies.named(&parts.attached);
                    parts
                        .control
                        .answer(client, &ClientAnswer::PolicyList { policies });
                }
                ClientRequest::ApiSockets => {
                    let paths = parts.attached.config.api_paths();
                    parts
                        .control
                        .answer(client, &ClientAnswer::ApiSockets { paths });
                }
                ClientRequest::PutVm { .. }
                | ClientRequest::ServeVm { .. }
                | ClientRequest::PutPolicy { .. }
                | ClientRequest::RemovePolicy { .. }
                | ClientRequest::RemoveVm { .. }
                | ClientRequest::LeaveVm { .. }
                | ClientRequest::KeepVm { .. }
                | ClientRequest::RunVm { .. }
                    if !parts.attached.config.is_daemon =>
                {
                    parts.refuse(
                        client,
                        "this slipgate serves the VMs of its command line: start `slipgate serve`",
                    );
                }
                ClientRequest::PutVm {
                    mut vm,
                    replaces,
                    tap,
                } => match tap.map(passed_tap::name_of).transpose() {
                    Ok(name) => {
                        vm.tap = name.unwrap_or(vm.tap);
                        vm_changes.put(parts, policies, client, &vm, &replaces)?;
                    }
                    Err(e) => parts.refuse(client, format!("{e:#}")),
                },
                ClientRequest::ServeVm {
                    vm,
                    uplink,
                    returns,
                    lifeline,
                } => {
                    let wanted = Wanted {
                        vm: *vm,
                        uplink,
                        returns,
                    };
                    vm_changes.serve(parts, policies, client, wanted, lifeline)?;
                }
                ClientRequest::PutPolicy {
                    name,
                    text,
                    replaces,
                } => {
                    let text = Some(text);
                    let change = NamedChange {
                        client,
                        name,
                        text,
                        replaces,
                    };
                    policies.change_named(parts, change)?;
                }
                ClientRequest::RemovePolicy { name, replaces } => {
                    let change = NamedChange {
                        client,
                        name,
                        text: None,
                        replaces,
                    };
                    policies.change_named(parts, change)?;
                }
                ClientRequest::RemoveVm { name } => vm_changes.remove(parts, client, &name)?,
                ClientRequest::LeaveVm { name } => vm_changes.leave(parts, client, &name)?,
                ClientRequest::KeepVm { name } => {
                    vm_changes.keep(parts, policies, client, &name);
                }
                ClientRequest::RunVm { name, lifeline } => {
                    vm_changes.run(parts, client, &name, lifeline)?;
                }
                ClientRequest::Vms => {
                    let served = parts.attached.unknown_vm();
                    parts.control.answer(client, &served);
                }
                ClientRequest::HandOver { to } => {
                    let fds = descriptors(&parts.attached, metrics.as_ref(), apis);
                    let answer = match hand_over(fds, to) {
                        Ok(()) => ClientAnswer::Done,
                        Err(e) => ClientAnswer::error(format!("{e:#}")),
                    };
                    parts.control.answer(client, &answer);
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

    /// Answers orders to machines that are carried out.
    fn answer_machine_orders(&mut self) {
        for (client, vm, answer) in self.machine_orders.done() {
            // Who hears of it finds the machine so, and the event of it before.
            self.vm_changes.machine(&mut self.parts, &vm);
            self.parts.control.answer(client, &answer);
        }
    }

    /// Begins the next of the changes of policy that wait: in turn of those that VMs' definitions
    /// lead to and those that were put by name.
    fn see_to_policies(&mut self) -> anyhow::Result<()> {
        let Self {
            parts,
            policies,
            vm_changes,
            ..
        } = self;
        if !policies.last_was_put() {
            policies.see_to_puts(parts)?;
        }
        vm_changes.see_to_policies(parts, policies)?;
        policies.see_to_puts(parts)
    }

    /// Collects the requests of the API's clients that their socket permits.
    fn take_api_requests(&mut self, asked: &mut Vec<PermittedRequest>) {
        let Parts {
            attached, control, ..
        } = &mut self.parts;
        for api in &mut self.apis {
            for (client, request) in api.requests(attached, || control.take_in()) {
                match request {
                    Ok(request) if api.permits(&request) => {
                        asked.push(PermittedRequest { client, request })
                    }
                    Ok(_) => control.answer(client, &ClientAnswer::forbidden()),
                    Err(e) => {
                        let why = format!("making a socket for the answer ({e}): try again");
                        control.answer(client, &ClientAnswer::busy(why));
                    }
                }
            }
        }
    }

    /// Passes answers and events on to the processes that answer the API.
    fn send_events(&mut self) {
        let events = std::mem::take(&mut self.parts.attached.events);
        let answers = self.parts.control.answers();
        for api in &mut self.apis {
            events.iter().for_each(|event| api.event(event));
            for (client, answer) in &answers {
                api.answer(*client, answer);
            }
        }
    }

    /// Connects the processes that answer the API to the engines, which send them events of flows.
    fn connect_apis(&mut self) -> anyhow::Result<()> {
        let engines = &mut self.parts.engines;
        for worker in engines.workers() {
            if !engines.of(worker).answers() {
                continue;
            }
            for api in &mut self.apis {
                match api.connect_engine(worker) {
                    Ok(Some(message)) => engines.send(worker, message)?,
                    Ok(None) => {}
                    Err(e) => tracing::debug!("making a pair of sockets: {e}"),
                }
            }
        }
        Ok(())
    }

    /// Watches a worker's engine, and replaces one that ended or hangs.
    fn see_to_engine(&mut self, worker: usize) -> anyhow::Result<()> {
        let Parts {
            attached, engines, ..
        } = &mut self.parts;
        let engine = engines.of_mut(worker);
        if let Some(how) = engine.failed()? {
            let event = Event::EngineEnded { how: how.clone() };
            attached.events.push(event);
            engine.plan(how)?;
            self.pending.forget_engine(&mut self.parts, worker);
        }
        let Parts {
            attached, engines, ..
        } = &mut self.parts;
        let engine = engines.of_mut(worker);
        if engine.is_due() {
            engine.start_again(attached, &self.reserved_ports);
        }
        Ok(())
    }

    /// Handles the readiness of a worker's engine that replaced another.
    fn engine_serves(&mut self, worker: usize, adopted: u64) -> anyhow::Result<()> {
        if !self.parts.engines.of_mut(worker).serves() {
            return Ok(());
        }
        self.parts.attached.write_forwards()?;
        // Adopted flows may have claimed next hops.
        self.parts.attached.refresh_next_hops()?;
        // What was asked while there was none is answered by nobody.
        if let Some(metrics) = &mut self.metrics {
            metrics.asking.take_if(|(asked, _)| *asked == worker);
        }
        self.apis
            .iter_mut()
            .for_each(|api| api.engine_serves(worker));
        self.vm_changes.engine_serves(&mut self.parts, worker);
        let event = Event::EngineServes { adopted };
        self.parts.attached.events.push(event);
        let flows = counted(adopted, "flow");
        tracing::info!("a new engine serves; it took over {flows}");
        self.policies.send_again(&mut self.parts, worker)
    }

    /// Reopens the log files by their names, because the old files were moved away. An old file
    /// stays in use where the new one can't be opened.
    fn reopen_files(&mut self) -> anyhow::Result<()> {
        match self.parts.attached.reopen_files() {
            Ok(files) if files.is_empty() => {}
            Ok(files) => {
                for (worker, message) in files {
                    self.parts.engines.send(worker, message)?;
                }
                tracing::info!("opened the flow log and --pcap's file again");
            }
            Err(e) => tracing::warn!("{e:#}"),
        }
        Ok(())
    }

    /// Handles requests and the end of the metrics process.
    fn see_to_metrics(&mut self) -> anyhow::Result<()> {
        let Some(metrics) = &mut self.metrics else {
            return Ok(());
        };
        if let Some(from) = metrics.turn(&self.parts.attached) {
            let Some((worker, from)) = page_of(from, self.parts.engines.len()) else {
                return Ok(());
            };
            let id = self.parts.next_id();
            metrics.asking = Some((worker, id));
            let request = ToEngine::Request {
                id,
                about: None,
                request: EngineRequest::Inventory { from },
            };
            self.parts.engines.send(worker, request)?;
        }
        Ok(())
    }
}

/// The answer to an order to a machine that is not here.
fn unknown_machine(vm: &str) -> ClientAnswer {
    ClientAnswer::unknown(format!(
        "no machine of `slipgate run` has the VM {vm:?} of this daemon: `slipgate ps` shows those of \
         this host"
    ))
}

/// Results of a poll: the parts that have work to do.
struct Ready {
    signals: bool,
    /// Workers whose engine has ended.
    engines: Vec<usize>,
    /// Workers whose engine has sent a message, or takes one.
    channels: Vec<usize>,
    network: bool,
    /// Others' tc filters changed.
    filters: bool,
    /// Rules of nftables changed, or the host's connections are read.
    host_nat: bool,
    vmm: bool,
    console: bool,
    control: bool,
}

/// Signals that end the loop, or (SIGHUP) have the flow log opened and the policy read again, by
/// descriptor.
pub(crate) fn signals(more: &[Signal]) -> nix::Result<SignalFd> {
    // Whoever started this may ignore it, and the kernel would then keep no child's status, by which its
    // end is known.
    // SAFETY: no function is called by it.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
    blocked_signals(more).thread_block()?;
    let set = ending_signals(more);
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// What [`signals`] blocks: another program that this process becomes is to have them again.
pub(crate) fn blocked_signals(more: &[Signal]) -> SigSet {
    let mut blocked = ending_signals(more);
    blocked.add(Signal::SIGPIPE);
    // A terminal is put back from the background, too.
    blocked.add(Signal::SIGTTOU);
    blocked
}

fn ending_signals(more: &[Signal]) -> SigSet {
    let ending = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
    ending.into_iter().chain(more.iter().copied()).collect()
}

#[cfg(test)]
#[path = "serve_test.rs"]
mod tests;
