//! `slipgate exec`: one command in a network namespace of its own, with the user-mode engine as its only
//! way out. Nothing here needs a privilege.
//!
//! # Theory of operation
//! Three processes: this one, the engine, and the command. The command's process is this binary first
//! ([`inside`]): it enters a user, a network and a mount namespace, makes a TAP there, passes the TAP's
//! queue out, and then waits. This process fills in the VM's row in the maps, which are files of memory,
//! starts the engine with the queue, and lets the command begin once the engine serves. The engine stays
//! in the host's network namespace, where its sockets reach the world; the command has nothing but the
//! TAP, so that nothing it does leaves but by the engine.
//!
//! Afterwards this process answers `why`, `cut`, `freeze` and the others at its control socket, tells the
//! engine of changes of the host's network, passes signals on to the command, and ends with the command's
//! status. If the engine ends, its flows end with it, and the command has no network any more.
mod clients;
mod inside;

use std::{
    ffi::OsString,
    fs::File,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{Signal, kill},
        signalfd::SignalFd,
    },
    unistd::geteuid,
};
use slipgate_abi::RuleIndex;
use slipgate_control::{
    GuestDevice, InMemory, Owner, Paths, Users,
    netlink::NetworkWatch,
    paths,
    vm::{self, OpenVm},
};
use slipgate_ipc::{
    channel::{Received, memory_file},
    client::ControlServer,
    engine::{FromEngine, NetworkView, OnExit, Start, ToEngine, UserspaceStart, VmSpec},
};
use slipgate_model::{USERSPACE_GUEST, USERSPACE_PORT};
use slipgate_policy::PolicySet;

pub use self::inside::{Inside, run_inside};
use self::{clients::Clients, inside::Command};
use crate::{
    config::{Config, VmConfig},
    host::{self, HostResolvers},
    kernel_state::{
        GATEWAY_MAC, MOST_CREDITS, Uplink, Writer, check_source, described, find_uplink,
        forward_texts, network_view, write_rules,
    },
    output_files::{open_flow_log, open_pcap},
    process::{ChildProcess, Outgoing},
    role::Role,
    serve::signals,
};

/// MTU of the TAP, L3 bytes. Longer frames bring nothing: those of TCP and UDP pass joined.
const DEFAULT_MTU: u32 = 1_500;
/// Largest packet that a socket takes, whatever the links behind it, bytes.
const SOCKET_MTU: u32 = 65_535;
/// Time limits for the engine to serve, and to stop.
const SERVES_WITHIN: Duration = Duration::from_secs(30);
const STOPS_WITHIN: Duration = Duration::from_secs(30);
/// Messages to the engine that may wait for room.
const MOST_QUEUED: usize = 64;
/// Directory of root's files of memory.
const MEMORY_OF_ROOT: &str = "/run/slipgate/userspace";

/// Configuration of `slipgate exec`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExecConfig {
    /// The NAT, with its one VM.
    pub nat: Config,
    /// The command and its arguments.
    pub command: Vec<OsString>,
}

/// Directory of files of memory that a `--pin-dir` stands for; `None`: it is a directory of pins.
pub(crate) fn memory_base(pin_dir: &Path) -> Option<PathBuf> {
    if pin_dir.starts_with(MEMORY_OF_ROOT) {
        return Some(pin_dir.to_owned());
    }
    (!geteuid().is_root() && pin_dir == Path::new(paths::PINS)).then(own_memory_base)
}

/// Directory of this user's files of memory.
fn own_memory_base() -> PathBuf {
    if geteuid().is_root() {
        return MEMORY_OF_ROOT.into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if Path::new(&dir).is_absolute() => Path::new(&dir).join("slipgate"),
        _ => format!("/tmp/slipgate-{}", geteuid()).into(),
    }
}

/// Runs a command, and returns its exit status.
///
/// # Errors
/// This host lacks what is needed, the command can't be started, or the engine fails.
pub fn exec(config: ExecConfig, log: &str) -> anyhow::Result<ExitCode> {
    let signals = signals(&[]).context("waiting for signals")?;
    let ExecConfig { nat, command } = config;
    let files = [
        nat.flow_log.as_deref().map(open_flow_log).transpose()?,
        nat.pcap.as_deref().map(open_pcap).transpose()?,
    ];
    let mut policies = nat.load_policies()?.compile()?;
    let [vm] = &nat.vms[..] else {
        bail!("a command is one VM, not {}", nat.vms.len());
    };
    let watch = NetworkWatch::open()?;
    let uplink = find_uplink(&nat, watch.network())?;
    check_source(&nat, &uplink, watch.network())?;
    let view = view(&nat, &watch, &uplink);
    policies.set_local(&view.local);

    let mtu = nat.network.mtu.unwrap_or(DEFAULT_MTU);
    let mut command = Command::start(&nat, vm, mtu, &command)?;
    let Some(device) = command.device()? else {
        // It has said why.
        return command.ended();
    };
    let place = Place::take(&nat, vm, mtu, &policies)?;
    let begun = place.listen().and_then(|control| {
        let start = Beginning {
            nat: &nat,
            device: &device,
            files: &files,
            policies: &policies,
            view: &view,
            vm: spec(&nat, vm, &place.open, mtu),
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
        engine: Some(engine),
        outgoing: Outgoing::new(MOST_QUEUED),
        clients: Clients::new(control, vm.name.clone(), place.open.row),
        place,
        watch,
        uplink,
        view,
        nat: nat.clone(),
    };
    let ended = served.await_engine().and_then(|()| {
        // The engine alone has it now: it ends with the engine.
        drop(device);
        command.begin()?;
        served.serve(&signals, &mut command)
    });
    served.stop();
    ended?;
    command.ended()
}

/// What an engine starts with.
struct Beginning<'b> {
    nat: &'b Config,
    device: &'b GuestDevice,
    /// The flow log and the pcap file.
    files: &'b [Option<File>; 2],
    policies: &'b PolicySet,
    view: &'b NetworkView,
    vm: VmSpec,
    log: &'b str,
}

impl Beginning<'_> {
    /// Starts the engine. Does not wait until it serves.
    fn engine(self, place: &Place) -> anyhow::Result<ChildProcess> {
        let users = match geteuid().is_root() {
            true => Users::claim(),
            false => Users::of_the_caller(),
        };
        let process = ChildProcess::start(Role::Engine, &users)?;
        let compiled = memory_file(&self.policies.to_bytes())?;
        let [flow_log, pcap] = self.files;
        let nat = self.nat;
        let start = Start {
            maps: place.memory.maps.fds(),
            port: self.device.queue.as_fd(),
            userspace: Some(UserspaceStart {
                takes_uso: self.device.takes_uso,
            }),
            flow_log: flow_log.as_ref().map(AsFd::as_fd),
            pcap: pcap.as_ref().map(AsFd::as_fd),
            locks: place.owner.lock_fds().collect(),
            owner_row: place.owner.row(),
            epoch: place.owner.epoch(),
            flow_log_events: nat.flow_log_events.clone(),
            vms: vec![self.vm],
            policies: compiled.as_fd(),
            rule_base: RuleIndex::new(place.rules.start),
            forward_texts: forward_texts(nat).collect(),
            resolvers: HostResolvers::find().now().to_vec(),
            nat_ports: (*nat.nat_ports.start(), *nat.nat_ports.end()),
            reserved_ports: host::bound(&nat.nat_ports).unwrap_or_default(),
            network: self.view.clone(),
            open_questions: Vec::new(),
            log: self.log.to_owned(),
        };
        let channel = process.channel();
        channel.send(ToEngine::Start(Box::new(start)))?;
        channel.send(ToEngine::<BorrowedFd<'_>>::Begin)?;
        Ok(process)
    }
}

/// The VM's place in the maps.
#[derive(Debug)]
struct Place {
    memory: InMemory,
    owner: Owner,
    open: OpenVm,
    rules: Range<u32>,
}

impl Place {
    fn take(nat: &Config, vm: &VmConfig, mtu: u32, policies: &PolicySet) -> anyhow::Result<Self> {
        let base = memory_base(&nat.pin_dir).unwrap_or_else(own_memory_base);
        let paths = Paths::in_memory(&base)?;
        let (memory, owner) = InMemory::open(paths, nat.flow_table)
            .with_context(|| format!("making the tables in {}", base.display()))?;
        let row = vm::VmSpec {
            name: vm.name.clone(),
            guest: vm.ip,
            gateway: nat.network.gateway,
            prefix_len: nat.network.prefix_len,
            guest_mac: vm.mac,
            gateway_mac: GATEWAY_MAC,
            mtu,
            credits: MOST_CREDITS,
            policy: vm.policy,
            tap_ifindex: Some(USERSPACE_GUEST),
            port_ifindex: USERSPACE_PORT,
        };
        match fill(&memory, &owner, nat, &row, policies) {
            Ok((open, rules)) => {
                let rates = vm.limits.rates;
                let rates = rates.is_limited().then_some(rates);
                memory.maps.set_rates(open.row, rates);
                Ok(Self {
                    memory,
                    owner,
                    open,
                    rules,
                })
            }
            Err(e) => {
                // The cause is told; a directory that is left is the next one's.
                let _ = memory.close(owner);
                Err(e)
            }
        }
    }

    /// Listens for requests of other commands.
    fn listen(&self) -> anyhow::Result<ControlServer> {
        let socket = format!("{}.sock", self.owner.row());
        let socket = self.memory.paths().run_dir.join(socket);
        let control = ControlServer::bind(&socket, geteuid().as_raw())
            .with_context(|| format!("listening at {}", socket.display()))?;
        Ok(control.of_its_owner())
    }

    fn leave(self) {
        let closed = vm::close(&self.memory.maps, self.open.row);
        if let Err(e) = closed.and(self.memory.close(self.owner)) {
            tracing::warn!("{e}");
        }
    }
}

fn fill(
    memory: &InMemory,
    owner: &Owner,
    nat: &Config,
    row: &vm::VmSpec,
    policies: &PolicySet,
) -> anyhow::Result<(OpenVm, Range<u32>)> {
    owner.divide_queue(&memory.maps, MOST_CREDITS, u32::MAX);
    let writer = Writer {
        paths: memory.paths(),
        rows: &[owner.row()],
        own: &[],
        kept: &[],
    };
    let rules = write_rules(&memory.maps, &described(policies, nat), writer)?;
    Ok((vm::open(&memory.maps, owner, row)?, rules))
}

/// Everything that serves the command.
#[derive(Debug)]
struct Served {
    /// `None` once it has ended.
    engine: Option<ChildProcess>,
    outgoing: Outgoing,
    clients: Clients,
    place: Place,
    watch: NetworkWatch,
    uplink: Uplink,
    /// The network in the last message to the engine.
    view: NetworkView,
    nat: Config,
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

    /// Serves until the command has ended.
    fn serve(&mut self, signals: &SignalFd, command: &mut Command) -> anyhow::Result<()> {
        while !command.has_ended() {
            let input = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let mut fds = vec![
                input(command.pidfd()),
                input(signals.as_fd()),
                input(self.watch.as_fd()),
            ];
            if let Some(engine) = &self.engine {
                let wants = match self.outgoing.is_empty() {
                    true => PollFlags::POLLIN,
                    false => PollFlags::POLLIN | PollFlags::POLLOUT,
                };
                fds.push(PollFd::new(engine.channel().as_fd(), wants));
            }
            fds.extend(self.clients.fds().map(input));
            let wait = |due: Instant| due.saturating_duration_since(Instant::now());
            let timeout = match (self.clients.has_waiting(), self.watch.due().map(wait)) {
                (true, _) => PollTimeout::ZERO,
                (false, None) => PollTimeout::NONE,
                (false, Some(wait)) => PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX),
            };
            match poll(&mut fds, timeout) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e).context("waiting for the command"),
            }
            while let Ok(Some(signal)) = signals.read_signal() {
                pass_on(signal.ssi_signo, command);
            }
            self.follow_network()?;
            for request in self.clients.requests(&self.place) {
                self.send(request)?;
            }
            self.hear_engine();
        }
        Ok(())
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

    fn hear_engine(&mut self) {
        let Some(engine) = &mut self.engine else {
            return;
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
                Ok(Received::Message(FromEngine::Reply { id, reply })) => {
                    self.clients.replied(id, reply, &self.place);
                }
                Ok(Received::Message(_)) => {}
                Ok(Received::End) => break Some(engine.how_it_ended()),
                Err(e) => break Some(e.to_string()),
            }
        };
        if let Some(how) = failed.or_else(|| self.outgoing.failure()) {
            tracing::error!("the engine {how}: the command has no network any more");
            self.engine = None;
            self.clients.forget("the engine has ended");
        }
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
        self.send(ToEngine::Network(now))
    }

    /// Stops the engine in order, so that its flows are recorded, and leaves the maps.
    fn stop(mut self) {
        if let Some(engine) = self.engine.take()
            && let Err(e) = stop_engine(&engine, &mut self.outgoing)
        {
            tracing::warn!("{e:#}");
        }
        drop(self.clients);
        self.place.leave();
    }
}

fn stop_engine(engine: &ChildProcess, outgoing: &mut Outgoing) -> anyhow::Result<()> {
    outgoing.send(engine.channel(), ToEngine::Shutdown(OnExit::Detach))?;
    loop {
        match engine.next(STOPS_WITHIN)? {
            Some(FromEngine::Stopped) | None => return Ok(()),
            Some(_) => {}
        }
    }
}

/// A terminal sends its signals to the command too; the others are passed on.
fn pass_on(signal: u32, command: &Command) {
    let signal = Signal::try_from(signal as i32);
    if let Ok(signal @ (Signal::SIGTERM | Signal::SIGHUP)) = signal {
        // It may have ended just now.
        let _ = kill(command.pid(), signal);
    }
}

fn view(nat: &Config, watch: &NetworkWatch, uplink: &Uplink) -> NetworkView {
    let mut view = network_view(
        watch.network(),
        uplink.ifindex,
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

fn spec(nat: &Config, vm: &VmConfig, open: &OpenVm, mtu: u32) -> VmSpec {
    VmSpec {
        id: open.id,
        row: open.row,
        name: vm.name.clone(),
        labels: vm.labels.clone(),
        guest: vm.ip,
        gateway: nat.network.gateway,
        dns: nat.network.dns,
        prefix_len: nat.network.prefix_len,
        guest_mac: vm.mac,
        gateway_mac: GATEWAY_MAC,
        mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
        max_flows: vm.limits.max_flows,
        new_flows_per_second: vm.limits.new_flows_per_second,
        policy: vm.policy,
        host_loopback: vm.host_loopback.clone(),
        dns_per_second: vm.limits.dns_per_second,
        idle_after_s: 0,
        is_idle: false,
    }
}
