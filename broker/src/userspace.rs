//! The user-mode engine with its guest: a command (`slipgate exec`), a VMM that connects to a socket
//! (`slipgate attach --socket` and `--vhost-user`), or slipgate's own VM (`slipgate run --mode userspace`). Nothing here
//! needs a privilege.
//!
//! # Theory of operation
//! This process fills in the VM's row in the maps, which are files of memory ([`place`]), starts the
//! engine with the guest's link, and lets the guest begin once the engine serves. The engine stays in the
//! host's network namespace, where its sockets reach the world.
//!
//! - A command's process is this binary first ([`command`]): it enters a user, a network and a mount
//!   namespace, makes a TAP there, passes the TAP's queue out, and then waits. The command has nothing but
//!   the TAP, so that nothing it does leaves but by the engine.
//! - A VMM connects to a Unix socket that this process has made ([`socket`]), and the engine accepts.
//! - The VM's machine is made before all else ([`machine`]); its network card has one end of a pair of
//!   sockets, the engine the other.
//!
//! Afterwards this process answers `why`, `cut`, `freeze` and the others at its control socket, and clients of
//! the API by processes of theirs ([`api`]), changes the
//! policy and sees to budgets ([`policy`]), tells the engine of changes of the host's network, and hands
//! signals to the guest. It ends with the command and its status; with a signal; with the VM; or when the
//! one guest of a socket has gone. If the engine ends, its flows end with it: they are recorded
//! ([`orphans`]), a command has no network any more, a socket is closed, and a VM stopped.
mod api;
mod clients;
mod command;
mod definition;
mod described;
mod forwards;
mod inside_sockets;
mod link;
mod machine;
mod metrics;
mod orphans;
mod pid_file;
mod place;
mod policy;
mod socket;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs::File,
    net::TcpListener,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{signal::Signal, signalfd::SignalFd},
    unistd::geteuid,
};
use slipgate_abi::RuleIndex;
use slipgate_control::{Users, netlink::NetworkWatch};
use slipgate_ipc::{
    api::Event,
    channel::{Received, memory_file},
    client::{ClientAnswer, MachineStatus},
    engine::{
        FromEngine, GuestProtocol, NetworkView, OnExit, Silence, Start, ToEngine, UserspaceStart,
        VmId, VmSpec,
    },
};
use slipgate_model::GuestIpv6;
use slipgate_policy::{PolicySet, document::LoadedPolicies};

pub(crate) use self::place::memory_base;
use self::{
    api::{ApiListener, Apis},
    clients::{Asked, Clients},
    command::Command,
    described::{ServedGuest, guest_ipv6, spec},
    forwards::Forwards,
    pid_file::PidFile,
    place::Place,
    policy::PolicyChanges,
    socket::Socket,
};
pub use self::{
    command::{Inside, run_inside},
    machine::run_userspace_vm,
};
use crate::{
    asking::timeout_of,
    config::{Config, VmConfig},
    host::{self, HostResolvers},
    kernel_state::{Ipv6Wish, Uplink, check_source, find_uplink, network_view},
    output_files::{open_flow_log, open_pcap},
    process::{ChildProcess, Metrics, Outgoing},
    role::Role,
    serve::signals,
    start::listen_for_metrics,
};

/// MTU of the guest's link, L3 bytes. Longer frames bring a TAP nothing: those of TCP and UDP pass joined.
const DEFAULT_MTU: u32 = 1_500;
/// Largest packet that a socket takes, bytes. What a link behind it does not carry, the kernel cuts or
/// refuses.
const SOCKET_MTU: u32 = 65_535;
/// Time limits for the engine to serve, and to stop.
const SERVES_WITHIN: Duration = Duration::from_secs(30);
const STOPS_WITHIN: Duration = Duration::from_secs(30);
/// Messages to the engine that may wait for room.
const MOST_QUEUED: usize = 64;
/// Configuration of `slipgate exec`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExecConfig {
    /// The NAT, with its one VM.
    pub nat: Config,
    /// The command and its arguments.
    pub command: Vec<OsString>,
}

/// Configuration of `slipgate attach --socket`, `--vhost-user` and `--fd`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SocketConfig {
    /// The NAT, with its one VM.
    pub nat: Config,
    /// How the VMM is connected.
    pub socket: GuestSocket,
    /// File to write this process's id to when guests may connect; `None`: nowhere.
    pub pid_file: Option<PathBuf>,
}

/// How a VMM is connected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GuestSocket {
    /// It connects to a socket that is made.
    At {
        /// The flag that gave the path.
        flag: &'static str,
        /// Protocol between the VMM and the engine.
        protocol: GuestProtocol,
        /// Where the socket is made.
        path: PathBuf,
        /// Whether all ends when the first guest has gone.
        is_for_one: bool,
    },
    /// By this descriptor of a connected stream socket, which this process has inherited: by
    /// [`GuestProtocol::Frames`]. All ends with that connection.
    Inherited(RawFd),
}

/// The engine's end of the guest's link.
#[derive(Debug)]
struct GuestEnd {
    link: OwnedFd,
    /// To the process that makes sockets in the guest's network namespace, if that is one of this host.
    namespace: Option<OwnedFd>,
}

impl From<OwnedFd> for GuestEnd {
    fn from(link: OwnedFd) -> Self {
        Self {
            link,
            namespace: None,
        }
    }
}

/// The guest that the engine serves: a command, a machine or a VMM at a socket.
trait Guest {
    /// Have an event when the guest may have ended, or has something to do.
    fn poll_fds(&self) -> Vec<PollFd<'_>>;
    /// Does what there is to do, without waiting. Returns whether it has ended.
    fn has_ended(&mut self) -> bool;
    /// Begins, for the engine serves, and answers requests at `socket`.
    fn begin(&mut self, socket: &Path) -> anyhow::Result<()>;
    /// Handles a signal to this process. Returns whether the files are to be opened again.
    fn signal(&mut self, signal: Signal) -> bool;
    /// Handles the end of the engine. `how` it ended, and what became of its flows.
    fn lost_engine(&mut self, how: String);
    /// Has the guest's counters sent, if it has some: [`Guest::counters`] has them later. Returns whether
    /// it has.
    fn ask_counters(&mut self, _id: u64) -> bool {
        false
    }
    /// Counters that were asked for, by the number of the question.
    fn counters(&mut self) -> Vec<(u64, serde_json::Value)> {
        Vec::new()
    }
    /// The machine of `slipgate run` that the guest is, if it is one.
    fn machine(&self) -> Option<MachineStatus> {
        None
    }
    /// What has happened to it since this was called last.
    fn happened(&mut self) -> Vec<Event> {
        Vec::new()
    }
    /// Ends the guest, if it has not ended. Its tables can still be read, as those of `pin_dir`.
    fn finish(&mut self, _pin_dir: &Path) {}
}

/// Runs a command, and returns its exit status.
///
/// # Errors
/// This host lacks what is needed, the command can't be started, or the engine fails.
pub fn exec(config: ExecConfig, log: &str) -> anyhow::Result<ExitCode> {
    let prepared = Prepared::new(config.nat, command::MORE_SIGNALS)?;
    let (nat, mtu) = (&prepared.nat, prepared.mtu);
    let link = (mtu, prepared.ipv6);
    let mut command = Command::start(nat, prepared.vm()?, link, &config.command)?;
    let Some((device, sockets)) = command.device()? else {
        // It has said why.
        return command.ended();
    };
    let how = UserspaceStart::Tap {
        takes_uso: device.takes_uso,
    };
    // The engine alone has the queue afterwards: it ends with the engine.
    let link = GuestEnd {
        link: device.queue,
        namespace: sockets,
    };
    prepared.serve(&mut command, link, how, log)?;
    command.ended()
}

/// Serves the VMM that connects to a socket, or is connected, until a signal.
///
/// # Errors
/// This host lacks what is needed, the socket can't be made or used, or the engine fails.
pub fn attach_socket(config: SocketConfig, log: &str) -> anyhow::Result<()> {
    // Before anything else is opened.
    let inherited = match config.socket {
        GuestSocket::Inherited(fd) => Some(socket::inherit(fd)?),
        GuestSocket::At { .. } => None,
    };
    let prepared = Prepared::new(config.nat, &[])?;
    let name = prepared.vm()?.name.clone();
    let pid_file = config.pid_file.map(PidFile::open).transpose()?;
    let (mut socket, how) = match (config.socket, inherited) {
        (
            GuestSocket::At {
                flag,
                protocol,
                path,
                is_for_one,
            },
            _,
        ) => {
            let how = UserspaceStart::Socket {
                protocol,
                is_for_one,
            };
            (Socket::listen(flag, path, name, pid_file)?, how)
        }
        (GuestSocket::Inherited(_), Some(connection)) => {
            let socket = Socket::connected(connection, name, pid_file);
            (socket, UserspaceStart::Connected)
        }
        (GuestSocket::Inherited(fd), None) => bail!("--fd {fd}: it was not inherited"),
    };
    let link = socket.link()?;
    prepared.serve(&mut socket, link.into(), how, log)?;
    socket.ended()
}

/// Configuration and resources that are checked and opened before there is a guest.
#[derive(Debug)]
struct Prepared {
    nat: Config,
    mtu: u32,
    /// The guest's IPv6 network; `None`: it has none, or not yet.
    ipv6: Option<GuestIpv6>,
    signals: SignalFd,
    /// The flow log and the pcap file.
    files: [Option<File>; 2],
    forwards: Forwards,
    /// Listening socket of `--metrics`.
    metrics: Option<TcpListener>,
    /// Listening sockets of `--api` and `--api-read`.
    apis: Vec<ApiListener>,
    /// Users that the processes run as.
    users: Users,
    /// As they were read, and compiled.
    policies: (LoadedPolicies, PolicySet),
    watch: NetworkWatch,
    uplink: Uplink,
    view: NetworkView,
}

impl Prepared {
    /// `more_signals`: those that the guest handles besides the usual ones.
    fn new(nat: Config, more_signals: &[Signal]) -> anyhow::Result<Self> {
        let signals = signals(more_signals).context("waiting for signals")?;
        let files = [
            nat.flow_log.as_deref().map(open_flow_log).transpose()?,
            nat.pcap.as_deref().map(open_pcap).transpose()?,
        ];
        let loaded = nat.load_policies()?;
        described::check_egress(&nat.flags, &loaded)?;
        let mut policies = loaded.compile()?;
        let watch = NetworkWatch::open()?;
        let uplink = find_uplink(&nat, watch.network())?;
        check_source(&nat, &uplink, watch.network())?;
        let view = view(&nat, &watch, &uplink);
        policies.set_local(&view.local);
        let mtu = nat.network.mtu.unwrap_or(DEFAULT_MTU);
        let ipv6 = match &nat.vms[..] {
            [vm] => guest_ipv6(&nat, vm, mtu, (watch.network(), &uplink)),
            _ => None,
        };
        Ok(Self {
            mtu,
            ipv6,
            forwards: Forwards::reserve(&nat)?,
            metrics: nat.metrics.map(listen_for_metrics).transpose()?,
            apis: ApiListener::listen(&nat)?,
            nat,
            signals,
            files,
            users: match geteuid().is_root() {
                true => Users::claim(),
                false => Users::of_the_caller(),
            },
            policies: (loaded, policies),
            watch,
            uplink,
            view,
        })
    }

    /// Files that stay open, each with its flag.
    fn named(&self) -> impl Iterator<Item = (&'static str, &File)> {
        let named = ["--flow-log", "--pcap"].into_iter().zip(&self.files);
        named.filter_map(|(flag, file)| Some((flag, file.as_ref()?)))
    }

    fn vm(&self) -> anyhow::Result<&VmConfig> {
        match &self.nat.vms[..] {
            [vm] => Ok(vm),
            vms => bail!("a user-mode engine serves one VM, not {}", vms.len()),
        }
    }

    /// Serves the guest until it has ended, and stops in order. `link`: the guest's; `how`: what it is.
    fn serve(
        mut self,
        guest: &mut impl Guest,
        link: GuestEnd,
        how: UserspaceStart,
        log: &str,
    ) -> anyhow::Result<()> {
        let apis = Apis::new(std::mem::take(&mut self.apis), &self.users)?;
        let vm = self.vm()?;
        let place = Place::take(&self.nat, vm, (self.mtu, self.ipv6), self.policies.clone())?;
        let described = spec(&self.nat, vm, &place, (self.mtu, self.ipv6));
        let begun = place.listen().and_then(|control| {
            let [flow_log, pcap] = &self.files;
            let start = Beginning {
                nat: &self.nat,
                users: &self.users,
                files: [flow_log.as_ref(), pcap.as_ref()],
                forwards: &self.forwards,
                view: &self.view,
                link: link.link.as_fd(),
                namespace: link.namespace.as_ref().map(AsFd::as_fd),
                how,
                vm: described.clone(),
                log,
            };
            Ok((control, start.engine(&place)?))
        });
        let (control, engine) = match begun {
            Ok(begun) => begun,
            Err(e) => {
                place.leave();
                return Err(e);
            }
        };
        let mut served = Served {
            vm: ServedGuest {
                spec: described,
                wish: Ipv6Wish::of(vm, &self.nat.network),
                // A command's namespace is made with its addresses, once.
                takes_ipv6_later: !matches!(how, UserspaceStart::Tap { .. }),
            },
            engine: Some(engine),
            outgoing: Outgoing::new(MOST_QUEUED),
            clients: Clients::new(control, vm.name.clone(), place.open.row),
            place,
            watch: self.watch,
            uplink: self.uplink,
            view: self.view,
            users: self.users,
            nat: self.nat,
            log: log.to_owned(),
            metrics: None,
            apis,
            forwards: self.forwards,
            policy: PolicyChanges::default(),
            definitions: 1,
            generations: BTreeMap::new(),
        };
        served.await_budgets();
        let ready = served.await_engine();
        let has_served = ready.is_ok();
        let ended = ready.and_then(|()| {
            drop(link);
            served.metrics = self
                .metrics
                .map(|it| Metrics::new(it, &served.scraped(), log));
            served.begin_apis()?;
            guest.begin(&served.place.socket())?;
            served.serve(&self.signals, guest)
        });
        guest.finish(&place::pin_dir(&served.nat));
        served.stop(has_served);
        ended
    }
}

/// Values that an engine starts with.
struct Beginning<'b> {
    nat: &'b Config,
    users: &'b Users,
    /// The flow log and the pcap file.
    files: [Option<&'b File>; 2],
    forwards: &'b Forwards,
    view: &'b NetworkView,
    link: BorrowedFd<'b>,
    /// To the process that makes sockets in the guest's network namespace.
    namespace: Option<BorrowedFd<'b>>,
    how: UserspaceStart,
    vm: VmSpec,
    log: &'b str,
}

impl Beginning<'_> {
    /// Starts the engine. Does not wait until it serves.
    fn engine(self, place: &Place) -> anyhow::Result<ChildProcess> {
        let process = ChildProcess::start(Role::Engine, self.users)?;
        let Self {
            nat,
            files: [flow_log, pcap],
            view,
            ..
        } = self;
        let compiled = memory_file(&place.policies.set().to_bytes())?;
        let start = Start {
            maps: place.memory.maps.fds(),
            port: self.link,
            namespace: self.namespace,
            userspace: Some(self.how),
            flow_log: flow_log.map(AsFd::as_fd),
            pcap: pcap.map(AsFd::as_fd),
            locks: place.owner.lock_fds().collect(),
            owner_row: place.owner.row(),
            epoch: place.owner.epoch(),
            flow_log_events: nat.flow_log_events.clone(),
            vms: vec![self.vm],
            policies: compiled.as_fd(),
            forward_rules: RuleIndex::new(place.policies.forwards().start),
            forward_texts: self.forwards.texts().to_vec(),
            resolvers: HostResolvers::find().now().to_vec(),
            nat_ports: (*nat.nat_ports.start(), *nat.nat_ports.end()),
            eim_ports: nat.eim_ports.as_ref().map(|r| (*r.start(), *r.end())),
            reserved_ports: host::bound(nat.source_ports()).unwrap_or_default(),
            network: view.clone(),
            open_questions: Vec::new(),
            log: self.log.to_owned(),
        };
        let channel = process.channel();
        channel.send(ToEngine::Start(Box::new(start)))?;
        // Who records a former engine's flows lets nobody in.
        if self.how != UserspaceStart::RecordOrphans {
            self.forwards.pass_on(place, channel)?;
        }
        channel.send(ToEngine::<BorrowedFd<'_>>::Begin)?;
        Ok(process)
    }
}

/// Everything that serves the guest.
#[derive(Debug)]
struct Served {
    vm: ServedGuest,
    /// `None` once it has ended.
    engine: Option<ChildProcess>,
    outgoing: Outgoing,
    clients: Clients,
    place: Place,
    watch: NetworkWatch,
    uplink: Uplink,
    /// The network in the last message to the engine.
    view: NetworkView,
    users: Users,
    nat: Config,
    /// Level of messages on stderr.
    log: String,
    /// The metrics process, with `--metrics`.
    metrics: Option<Metrics>,
    /// The processes that answer the API, with `--api` and `--api-read`.
    apis: Apis,
    forwards: Forwards,
    policy: PolicyChanges,
    /// Number of definitions that the VM has had.
    definitions: u64,
    /// How often a policy of each name was put.
    generations: BTreeMap<String, u64>,
}

impl Served {
    fn await_engine(&mut self) -> anyhow::Result<()> {
        let Some(engine) = &mut self.engine else {
            return Ok(());
        };
        loop {
            match engine.next(SERVES_WITHIN)? {
                Some(FromEngine::Ready { .. }) => return Ok(()),
                Some(_) => {}
                None => return Err(engine.ended_before("it was ready")),
            }
        }
    }

    /// Serves until the guest has ended.
    fn serve(&mut self, signals: &SignalFd, guest: &mut impl Guest) -> anyhow::Result<()> {
        while !guest.has_ended() {
            for (id, counters) in guest.counters() {
                self.clients.counted(id, counters);
            }
            self.tell_apis(guest)?;
            let input = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let mut fds = guest.poll_fds();
            fds.extend([input(signals.as_fd()), input(self.watch.as_fd())]);
            if let Some(engine) = &self.engine {
                let wants = match self.outgoing.is_empty() {
                    true => PollFlags::POLLIN,
                    false => PollFlags::POLLIN | PollFlags::POLLOUT,
                };
                fds.push(PollFd::new(engine.channel().as_fd(), wants));
            }
            fds.extend(self.clients.fds().map(input));
            fds.extend(self.metrics.iter().flat_map(Metrics::fds).map(input));
            fds.extend(self.apis.fds());
            let wait = |due: Instant| due.saturating_duration_since(Instant::now());
            let due = self.metrics.as_ref().and_then(Metrics::due);
            let due = self.watch.due().into_iter().chain(due);
            let due = due
                .chain(self.policy.budgets_due)
                .chain(self.apis.due())
                .min();
            let timeout = match (self.clients.has_waiting(), due.map(wait)) {
                (true, _) => PollTimeout::ZERO,
                (false, None) => PollTimeout::NONE,
                (false, Some(wait)) => timeout_of(wait),
            };
            match poll(&mut fds, timeout) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e).context("waiting for the guest"),
            }
            while let Ok(Some(info)) = signals.read_signal() {
                if let Ok(signal) = Signal::try_from(info.ssi_signo as i32)
                    && guest.signal(signal)
                {
                    self.reopen_files()?;
                    self.apply_policy(None, None)?;
                }
            }
            self.follow_network()?;
            let by_api = self.take_api_requests();
            for asked in self.clients.requests(by_api, &self.place, guest) {
                match asked {
                    Asked::Engine(request) => self.send(request)?,
                    Asked::OfDaemon(client, request) => self.of_daemon(client, request, guest)?,
                    Asked::Apply(client, file) => self.apply_policy(Some(client), file)?,
                }
            }
            self.see_to_budgets()?;
            self.see_to_metrics()?;
            if let Some(how) = self.hear_engine()? {
                let flows = self.record_orphans();
                let event = Event::EngineEnded { how: how.clone() };
                self.clients.events.push(event);
                guest.lost_engine(format!("{how}, and {flows}"));
            }
        }
        // Of how it ended.
        self.tell_apis(guest)
    }

    fn send(&mut self, message: ToEngine) -> anyhow::Result<()> {
        match &self.engine {
            Some(engine) => Ok(self.outgoing.send(engine.channel(), message)?),
            None => {
                self.clients.forget("the engine has ended");
                Ok(())
            }
        }
    }

    /// Returns how the engine ended, if it did.
    fn hear_engine(&mut self) -> anyhow::Result<Option<String>> {
        let (mut applied, mut activity) = (None, Vec::new());
        let Some(engine) = &mut self.engine else {
            return Ok(None);
        };
        let failed = loop {
            match engine.try_receive::<FromEngine>() {
                Ok(Received::Nothing) => {
                    break self
                        .outgoing
                        .flush(engine.channel())
                        .err()
                        .map(|e| e.to_string());
                }
                Ok(Received::Message(FromEngine::Reply { id, reply })) => match &mut self.metrics {
                    Some(metrics) if metrics.asking == Some((0, id)) => metrics.answer(reply),
                    _ => self.clients.replied(id, reply, &self.place),
                },
                Ok(Received::Message(FromEngine::Applied {
                    id,
                    cut,
                    kept,
                    left,
                })) => applied = Some((id, ClientAnswer::Applied { cut, kept, left })),
                Ok(Received::Message(FromEngine::Activity { idle, busy })) => {
                    let changes = idle.into_iter().map(|(id, silence)| (id, silence, true));
                    let busy = busy.into_iter().map(|(id, silence)| (id, silence, false));
                    activity.extend(changes.chain(busy));
                }
                Ok(Received::Message(_)) => {}
                Ok(Received::End) => break Some(engine.how_it_ended()),
                Err(e) => break Some(e.to_string()),
            }
        };
        let failed = failed.or_else(|| self.outgoing.failure());
        for (id, silence, is_idle) in activity {
            self.note_activity(id, silence, is_idle);
        }
        if let Some((id, answer)) = applied {
            self.applied(id, answer)?;
        }
        if failed.is_some() {
            self.engine = None;
            self.clients.forget("the engine has ended");
            self.give_up_changes();
        }
        Ok(failed)
    }

    /// The engine has found that the VM is idle, or is not any more.
    fn note_activity(&mut self, id: VmId, silence: Silence, is_idle: bool) {
        let spec = &mut self.vm.spec;
        // It may not be told any more.
        let is_told = spec.id == id && spec.idle_after_s != 0;
        if !is_told || std::mem::replace(&mut spec.is_idle, is_idle) == is_idle {
            return;
        }
        let vm = spec.name.clone();
        self.clients.events.push(match is_idle {
            true => Event::VmIdle { vm, silence },
            false => Event::VmBusy { vm, silence },
        });
    }

    /// Opens flow log and pcap file again: they may have been moved away.
    fn reopen_files(&mut self) -> anyhow::Result<()> {
        let flow_log = self.nat.flow_log.as_deref().map(open_flow_log);
        let pcap = self.nat.pcap.as_deref().map(open_pcap);
        let opened = [
            flow_log.map(|file| file.map(|file| ToEngine::FlowLog(file.into()))),
            pcap.map(|file| file.map(|file| ToEngine::Pcap(file.into()))),
        ];
        for file in opened.into_iter().flatten() {
            match file {
                Ok(message) => self.send(message)?,
                Err(e) => tracing::warn!("{e}: records go on to the file that is open"),
            }
        }
        Ok(())
    }

    /// Tells the engine of a change of the host's network.
    fn follow_network(&mut self) -> anyhow::Result<()> {
        let changes = self.watch.update()?;
        self.watch.caught_up();
        if !changes.any() {
            return Ok(());
        }
        if let Ok(uplink) = find_uplink(&self.nat, self.watch.network()) {
            self.uplink = uplink;
        }
        let now = view(&self.nat, &self.watch, &self.uplink);
        if now == self.view {
            return Ok(());
        }
        self.view = now.clone();
        self.send(ToEngine::Network(now))?;
        self.follow_ipv6()
    }

    /// Stops the engine in order, so that its flows are recorded, and leaves the maps. `has_served`: whether
    /// there may be flows.
    fn stop(mut self, has_served: bool) {
        if let Some(mut engine) = self.engine.take()
            && let Err(e) = stop_engine(&mut engine, &mut self.outgoing)
        {
            // It may still write otherwise.
            drop(engine);
            match has_served {
                true => tracing::warn!("{e:#}, and {}", self.record_orphans()),
                false => tracing::warn!("{e:#}"),
            }
        }
        // After the events of flows that have ended with the engine.
        self.apis.finish();
        drop((self.clients, self.metrics));
        self.place.leave();
    }
}

fn stop_engine(engine: &mut ChildProcess, outgoing: &mut Outgoing) -> anyhow::Result<()> {
    outgoing.send(engine.channel(), ToEngine::Shutdown(OnExit::Detach))?;
    loop {
        match engine.next(STOPS_WITHIN)? {
            Some(FromEngine::Stopped) => return Ok(()),
            Some(_) => {}
            None => return Err(engine.ended_before("it had stopped in order")),
        }
    }
}

fn view(nat: &Config, watch: &NetworkWatch, uplink: &Uplink) -> NetworkView {
    let mut view = network_view(
        watch.network(),
        uplink.ifindex,
        &BTreeSet::new(),
        nat.nat_address,
        &nat.network,
    );
    for link in &mut view.links {
        link.mtu = SOCKET_MTU;
    }
    for route in &mut view.routes.routes {
        route.mtu = None;
    }
    view
}
