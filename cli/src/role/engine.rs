//! The engine process: parses guests' packets with the descriptors that it was given.
//!
//! It receives descriptors and settings, confines itself for good ([`crate::sandbox`]), and runs
//! [`userspace_nat`]'s engine over the kernel's tables until the broker sends a stop or is gone.
mod control;
mod kernel;
mod kernel_routes;
mod port_io;
mod userspace;

use std::{fs::File, rc::Rc, time::Duration};

use anyhow::{Context as _, bail};
use slipgate_control::maps::SharedMaps;
use slipgate_ipc::{
    channel::{Channel, read_memory_file},
    engine::{ForwardSocket, FromEngine, Start, ToEngine, UserspaceStart},
};
use slipgate_policy::PolicySet;
use userspace_nat::{
    clock::SystemClock,
    dns,
    event_loop::{Engine, Parts},
    name_gate::{ByRules, Judge},
    record::{self, Background, FlowLog, Unwritten},
    relay::{self, NamespaceSockets, Relay},
    services::Services,
};

use self::{
    control::BrokerChannel,
    kernel::KernelDatapath,
    kernel_routes::KernelRoutes,
    port_io::{Port, PortIo},
};
use super::inherited_channel;
use crate::{args::ChildArgs, log, sandbox};

/// Questions in one message: as JSON they fit a packet, each as long as a datagram may be.
const QUESTIONS_AT_ONCE: usize = 8;
/// Time for the process inside a command's namespace to make the first sockets, which takes milliseconds
/// where it has a CPU.
const INSIDE_SOCKETS_WITHIN: Duration = Duration::from_secs(3);

/// Runs until the broker sends a stop.
pub(crate) fn run(args: &ChildArgs) -> anyhow::Result<()> {
    let broker = nix::unistd::getppid();
    let channel = Rc::new(inherited_channel("engine", args.fd)?);
    // Its locks stay open to the end of this function: the row is ours to the last.
    let (start, forwards) = receive(&channel)?;
    log::to_stderr(&start.log)?;
    let maps = Rc::new(SharedMaps::from_fds(start.maps)?);
    let files = sandbox::engine_files().context("reading the limit of open descriptors")?;
    let port = match start.userspace {
        None => {
            maps.map_packets()?;
            Port::Kernel(PortIo::new(start.port))
        }
        // No turn of the loop reads or writes it.
        Some(UserspaceStart::RecordOrphans) => Port::Kernel(PortIo::new(start.port)),
        Some(link) => {
            let port = userspace::port(maps.clone(), start.port, link, &start.vms, files)?;
            Port::Userspace(Box::new(port))
        }
    };
    // The guest of `exec`, and the process that makes sockets in its namespace.
    let inside = start
        .namespace
        .map(|channel| NamespaceSockets::new(channel, files));
    let inside = start.vms.first().map(|vm| vm.id).zip(inside);
    // In user mode nobody has to find a next hop: the host's own stack does.
    let hops = start.userspace.is_none().then(|| channel.clone());
    let (flow_log, pcap) = (start.flow_log.map(File::from), start.pcap.map(File::from));
    let policies = PolicySet::from_bytes(&read_memory_file(start.policies)?)?;

    // A static binary draws from /dev/urandom, which can't be opened once we are confined. It is
    // opened at the first draw and kept.
    rand::random::<u64>();
    let has = (flow_log.is_some(), pcap.is_some());
    let is_kernels = start.userspace.is_none();
    let (log_writer, pcap_writer, routes) =
        sandbox::enter(broker, args.user, start.userspace.is_some(), || {
            let start = |is_wanted: bool, name, unwritten| {
                is_wanted
                    .then(|| Background::start(name, unwritten))
                    .transpose()
            };
            Ok((
                start(has.0, "flow-log", Unwritten::Lost)?,
                start(has.1, "pcap", Unwritten::TriedAgain)?,
                // By whoever has no capability any more: nothing can be changed by it.
                is_kernels.then(KernelRoutes::open).flatten(),
            ))
        })?;

    let mut recorded = hashbrown::HashSet::default();
    let mut log_output = None;
    if let (Some(mut file), Some(mut writer)) = (flow_log, log_writer) {
        recorded = record::recorded_ids(&mut file).context(
            "--flow-log: reading the file's end; give a file that can be read and appended to",
        )?;
        if let Err(e) = writer.continue_log(file) {
            tracing::warn!(
                "--flow-log: the end of a torn line can't be written: {e}; the next record that is written \
                 ends it. A full disk needs room"
            );
        }
        log_output = Some(writer.into());
    }
    let mut log = FlowLog::to(log_output).of(start.flow_log_events.into_iter().collect());
    if start.userspace.is_some() {
        log.set_by_sockets();
    }
    let pcap = pcap.zip(pcap_writer).map(|(file, mut writer)| {
        writer.set_file(Box::new(file));
        writer.into()
    });
    let judge = Judge::shared(policies);
    let names = Box::new(ByRules(judge.clone()));
    let parts = Parts {
        datapath: KernelDatapath::new(maps, start.owner_row, start.epoch, hops),
        port,
        clock: SystemClock,
        services: Services::new(
            dns::Proxy::new(&[], dns::Limits::default(), names),
            Relay::new(relay::Limits {
                // The rest is for DNS, forwards' sockets and what it was handed.
                sockets: usize::try_from(files / 2)?,
                ..relay::Limits::default()
            }),
        ),
        judge,
        nat_ports: start.nat_ports.0..=start.nat_ports.1,
        log,
    };
    let mut engine = Engine::new(parts)?;
    if start.userspace.is_some() {
        engine.set_world_of_sockets();
    }
    if let Some(routes) = routes {
        engine.set_route_kernel(Box::new(routes));
    }
    // What the engine is to know before it looks at the flows that are there.
    for vm in start.vms {
        engine.set_vm(vm);
    }
    engine.set_eim_ports(start.eim_ports.map(|(first, last)| first..=last));
    engine.set_network(&start.network);
    engine.set_reserved_ports(control::known_ports(start.reserved_ports));
    engine.set_resolvers(&start.resolvers);
    let forwards: Option<Vec<_>> = forwards.into_iter().map(control::forward).collect();
    let forwards = forwards.context("a forward of no protocol")?;
    let (translated, relayed): (_, Vec<_>) = forwards.into_iter().unzip();
    engine.set_forwards(translated);
    engine.set_forward_texts(start.forward_rules, start.forward_texts);
    if let Some((vm, mut sockets)) = inside {
        // The command begins once this is ready.
        if let Err(error) = sockets.await_first(INSIDE_SOCKETS_WITHIN) {
            tracing::warn!(
                "the process that makes sockets in the command's network {error}: without its \
                 sockets, connections of forwards go by the TAP"
            );
        }
        engine.set_namespace(vm, sockets);
    }
    for forward in relayed.into_iter().flatten() {
        engine.add_relay_forward(forward)?;
    }
    if let Some(output) = pcap {
        engine.set_pcap(output);
    }
    let adopted = engine.begin_adoption(recorded) as u64;
    if start.userspace == Some(UserspaceStart::RecordOrphans) {
        engine.end_orphans();
        channel.send(FromEngine::Ready { adopted })?;
        return Ok(());
    }
    engine.ask_again(start.open_questions);
    channel.send(FromEngine::Ready { adopted })?;
    engine.run(&mut BrokerChannel::new(channel.clone()))?;
    let questions: Vec<_> = engine.open_questions().collect();
    for some in questions.chunks(QUESTIONS_AT_ONCE) {
        channel.send(FromEngine::OpenQuestions(some.to_vec()))?;
    }
    channel.send(FromEngine::Stopped)?;
    Ok(())
}

/// Receives the broker's messages up to the start.
fn receive(channel: &Channel) -> anyhow::Result<(Start, Vec<ForwardSocket>)> {
    let gone = "the broker is gone before it said how to work";
    let Some(ToEngine::Start(start)) = channel.receive()? else {
        bail!(gone);
    };
    let mut forwards = Vec::new();
    loop {
        match channel.receive()?.context(gone)? {
            ToEngine::Forwards(some) => forwards.extend(some),
            ToEngine::Begin => return Ok((*start, forwards)),
            _ => bail!("the broker sent another message than those of the start"),
        }
    }
}
