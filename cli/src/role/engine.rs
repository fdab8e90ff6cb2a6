//! The engine process: parses what guests send, and owns nothing but what it was handed.
//!
//! It receives descriptors and how to work, confines itself for good ([`crate::sandbox`]), and
//! runs [`userspace_nat`]'s engine over the kernel's tables until the broker says stop or is gone.
mod control;
mod kernel;
mod port_io;

use std::{collections::VecDeque, fs::File, os::fd::OwnedFd, rc::Rc};

use anyhow::{Context as _, bail};
use slipgate_abi::Protocol;
use slipgate_control::{layout::MAPS, maps::SharedMaps};
use userspace_nat::{
    clock::SystemClock,
    dns,
    engine::{ControlMessage, Engine, Forward, HostServices, Parts},
    name_gate::{ByRules, Judge},
    record::{self, Background, FlowLog, Unwritten},
    relay::{self, Relay},
};

use self::{control::BrokerChannel, kernel::KernelDatapath, port_io::PortIo};
use super::inherited;
use crate::{
    args::ChildArgs,
    channel::{Channel, ForwardSocket, Start, ToBroker, ToEngine},
    log, sandbox,
};

/// Runs until the broker says stop.
pub(crate) fn run(args: &ChildArgs) -> anyhow::Result<()> {
    let broker = nix::unistd::getppid();
    let channel = Rc::new(inherited::channel("engine", args.fd)?);
    let Handed {
        start,
        mut fds,
        forwards,
    } = receive(&channel)?;
    log::to_stderr(&start.log)?;

    let mut next = || {
        fds.pop_front()
            .context("the broker sent too few descriptors")
    };
    let maps = (0..MAPS).map(|_| next()).collect::<Result<Vec<_>, _>>()?;
    let maps = Rc::new(SharedMaps::from_fds(maps)?);
    let port = PortIo::new(next()?);
    let flow_log = start.flow_log.then(&mut next).transpose()?.map(File::from);
    let pcap = start.pcap.then(&mut next).transpose()?.map(File::from);
    // The rest are the owner's locks: the row is ours to the last.
    let _locks = fds;
    let policies = start.policies.compile()?;

    // A static binary draws from /dev/urandom, which can't be opened once we are confined. It is
    // opened at the first draw and kept.
    rand::random::<u64>();
    let files = sandbox::engine_files().context("reading how many descriptors it may have")?;
    let has = (flow_log.is_some(), pcap.is_some());
    let (log_writer, pcap_writer) = sandbox::enter(broker, args.user, || {
        let start = |is_wanted: bool, name, unwritten| {
            is_wanted
                .then(|| Background::start(name, unwritten))
                .transpose()
        };
        Ok((
            start(has.0, "flow-log", Unwritten::Lost)?,
            start(has.1, "pcap", Unwritten::TriedAgain)?,
        ))
    })?;

    let mut recorded = hashbrown::HashSet::default();
    let mut log_output = None;
    if let (Some(mut file), Some(mut writer)) = (flow_log, log_writer) {
        recorded = record::recorded_ids(&mut file).context(
            "--flow-log: reading the end of what is in it; give a file that can be appended to",
        )?;
        writer.set_file(Box::new(file));
        log_output = Some(writer.into());
    }
    let log = FlowLog::to(log_output).of(start.flow_log_events);
    let pcap = pcap.zip(pcap_writer).map(|(file, mut writer)| {
        writer.set_file(Box::new(file));
        writer.into()
    });
    let judge = Judge::shared(policies);
    let names = Box::new(ByRules(judge.clone()));
    let parts = Parts {
        datapath: KernelDatapath::new(maps, start.owner_row, start.epoch, channel.clone()),
        port,
        clock: SystemClock,
        control: BrokerChannel::new(channel.clone()),
        services: HostServices::new(
            dns::Proxy::new(&[], dns::Limits::default(), names),
            Relay::new(relay::Limits {
                // The rest is for DNS, forwards' sockets and what it was handed.
                sockets: usize::try_from(files / 2)?,
                ..relay::Limits::default()
            }),
        ),
        judge,
        rule_base: start.rule_base,
        nat_ports: start.nat_ports.0..=start.nat_ports.1,
        log,
    };
    let mut known = known(*start, forwards)?;
    known.extend(pcap.map(ControlMessage::PcapOutput));
    let (mut engine, adoption) = Engine::start(parts, known, &recorded)?;
    tracing::debug!(?adoption, "the engine serves");
    let ended = [
        (adoption.refused, "refused by what is in force now"),
        (
            adoption.uninspected,
            "an inspection that was under way can't go on",
        ),
    ];
    for (flows, why) in ended.into_iter().filter(|(flows, _)| *flows > 0) {
        tracing::info!("of a predecessor's flows {flows} ended: {why}");
    }
    let adopted = adoption.live as u64;
    channel.send(&ToBroker::Ready { adopted }, &[])?;
    engine.run()?;
    channel.send(&ToBroker::Stopped, &[])?;
    Ok(())
}

/// What the broker sends at the start.
struct Handed {
    start: Box<Start>,
    fds: VecDeque<OwnedFd>,
    forwards: Vec<(ForwardSocket, OwnedFd)>,
}

fn receive(channel: &Channel) -> anyhow::Result<Handed> {
    let gone = "the broker is gone before it said how to work";
    let Some((ToEngine::Start(start), fds)) = channel.receive()? else {
        bail!(gone);
    };
    let mut handed = Handed {
        start,
        fds: fds.into(),
        forwards: Vec::new(),
    };
    loop {
        match channel.receive()?.context(gone)? {
            (ToEngine::Forwards(names), fds) if names.len() == fds.len() => {
                handed.forwards.extend(names.into_iter().zip(fds));
            }
            (ToEngine::Begin, _) => return Ok(handed),
            _ => bail!("the broker said something else than how to work"),
        }
    }
}

/// What the engine is to know before it looks at the flows that are there.
fn known(
    start: Start,
    forwards: Vec<(ForwardSocket, OwnedFd)>,
) -> anyhow::Result<Vec<ControlMessage>> {
    let mut messages: Vec<_> = start.vms.into_iter().map(ControlMessage::Vm).collect();
    messages.push(control::routes(start.network));
    messages.push(control::reserved(start.reserved_ports));
    messages.push(control::resolvers(start.resolvers));
    let mut kernel = Vec::new();
    let mut relayed = Vec::new();
    for (forward, socket) in forwards {
        let protocol = Protocol::from_ip(forward.protocol).context("a forward of no protocol")?;
        kernel.push(Forward {
            protocol,
            host: *forward.host.ip(),
            host_port: forward.host.port(),
            vm: forward.vm,
            vm_row: forward.vm_row,
            guest_port: forward.guest_port,
            rule: forward.rule,
        });
        relayed.push(ControlMessage::RelayForward(relay::Forward {
            vm: forward.vm,
            protocol,
            guest_port: forward.guest_port,
            rule: forward.rule,
            socket,
        }));
    }
    messages.push(ControlMessage::Forwards(kernel));
    messages.push(ControlMessage::ForwardTexts(start.forward_texts));
    messages.extend(relayed);
    Ok(messages)
}
