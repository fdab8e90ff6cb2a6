//! An engine process as the broker has it: handed descriptors and how to work, then told of
//! changes.
use std::{
    net::SocketAddrV4,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use userspace_nat::control::OnExit;

use super::{
    attached::{self, Attached},
    child::{ChildProcess, Role},
    outgoing::Outgoing,
};
use crate::channel::{Channel, ForwardSocket, MAX_FDS, Received, Start, ToBroker, ToEngine};

/// A running engine. It is killed when this is dropped.
#[derive(Debug)]
pub(super) struct EngineProcess {
    process: ChildProcess,
    outgoing: Outgoing,
}

impl EngineProcess {
    /// Starts the engine and tells it everything; it is on its way then.
    pub(super) fn start(
        attached: &Attached,
        reserved_ports: &[(u8, u16)],
        log: &str,
    ) -> anyhow::Result<Self> {
        let engine = Self {
            process: ChildProcess::start(Role::Engine, &attached.users)?,
            outgoing: Outgoing::default(),
        };
        attached.warn_of_resolvers();
        let config = &attached.config;
        let start = Start {
            owner_row: attached.owner.row(),
            epoch: attached.owner.epoch(),
            flow_log: attached.flow_log.is_some(),
            flow_log_events: config.flow_log_events,
            pcap: attached.pcap.is_some(),
            vms: attached.vms.iter().map(|vm| attached.vm_spec(vm)).collect(),
            policies: attached.in_force.clone(),
            rule_base: attached.rule_base,
            forward_texts: attached::forward_texts(config).collect(),
            resolvers: attached.resolvers.now().to_vec(),
            nat_ports: (*config.nat_ports.start(), *config.nat_ports.end()),
            reserved_ports: reserved_ports.to_vec(),
            network: attached.network_view(),
            log: log.to_owned(),
        };
        let mut fds = attached.datapath.maps().fds();
        fds.push(attached.port.fd.as_fd());
        fds.extend(attached.flow_log.as_ref().map(AsFd::as_fd));
        fds.extend(attached.pcap.as_ref().map(AsFd::as_fd));
        fds.extend(attached.owner.lock_fds());
        engine
            .channel()
            .send(&ToEngine::Start(Box::new(start)), &fds)?;
        let forwards: Vec<_> = forwards(attached).collect();
        for some in forwards.chunks(MAX_FDS) {
            let names = some.iter().map(|(name, _)| name.clone()).collect();
            let fds: Vec<_> = some.iter().map(|(_, fd)| *fd).collect();
            engine.channel().send(&ToEngine::Forwards(names), &fds)?;
        }
        engine.channel().send(&ToEngine::Begin, &[])?;
        Ok(engine)
    }

    /// Readable when the engine has ended.
    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd()
    }

    pub(super) fn channel(&self) -> &Channel {
        self.process.channel()
    }

    /// Sends a message, now or when there is room.
    pub(super) fn tell(&mut self, message: ToEngine) -> anyhow::Result<()> {
        self.outgoing.send(self.process.channel(), message, None)
    }

    /// Sends a message with a descriptor.
    pub(super) fn hand(&mut self, message: ToEngine, fd: OwnedFd) -> anyhow::Result<()> {
        self.outgoing
            .send(self.process.channel(), message, Some(fd))
    }

    /// Sends what waits, as far as there is room.
    pub(super) fn flush(&mut self) -> anyhow::Result<()> {
        self.outgoing.flush(self.process.channel())
    }

    /// What to wait for on its channel.
    pub(super) fn wants(&self) -> PollFlags {
        match self.outgoing.is_empty() {
            true => PollFlags::POLLIN,
            false => PollFlags::POLLIN | PollFlags::POLLOUT,
        }
    }

    /// Whether it is better asked nothing more for now.
    pub(super) fn is_behind(&self) -> bool {
        self.outgoing.is_behind()
    }

    /// Why it is of no use any more, though it may run.
    pub(super) fn failure(&self) -> Option<String> {
        self.outgoing.failure()
    }

    /// Waits until it serves; how many flows it took over.
    pub(super) fn await_ready(&mut self, within: Duration) -> anyhow::Result<u64> {
        loop {
            match self.process.next(within)? {
                Some(ToBroker::Ready { adopted }) => return Ok(adopted),
                Some(_) => {}
                None => return Err(self.process.ended_before("it was ready")),
            }
        }
    }

    /// Waits until it answers.
    pub(super) fn await_answer(&mut self, within: Duration) -> anyhow::Result<()> {
        // No question of the watch's.
        let asked = u64::MAX;
        self.tell(ToEngine::Ping { request: asked })?;
        self.await_message(
            within,
            "answered",
            |message| matches!(message, ToBroker::Answered { request } if *request == asked),
        )
    }

    /// Has it stop, and waits until it has.
    pub(super) fn stop(&mut self, exit: OnExit, within: Duration) -> anyhow::Result<()> {
        self.tell(ToEngine::Shutdown(exit))?;
        let is_stopped = |message: &ToBroker| matches!(message, ToBroker::Stopped);
        self.await_message(within, "stopped", is_stopped)
    }

    fn await_message(
        &mut self,
        within: Duration,
        what: &str,
        is_it: impl Fn(&ToBroker) -> bool,
    ) -> anyhow::Result<()> {
        let until = Instant::now() + within;
        loop {
            self.flush()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("the engine has not {what} within {} s", within.as_secs());
            }
            let mut fds = [PollFd::new(self.channel().as_fd(), self.wants())];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut fds, timeout) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e).context("waiting for the engine"),
            }
            match self.process.heard::<ToBroker>()? {
                Received::Message(message, _) if is_it(&message) => return Ok(()),
                Received::Message(..) | Received::Nothing => {}
                Received::End => {
                    return Err(self.process.ended_before(&format!("it had {what}")));
                }
            }
        }
    }

    /// How one that has closed its channel ended, in words.
    pub(super) fn how_it_ended(&mut self) -> String {
        let end = self.process.end();
        end.unwrap_or_else(|| "closed its channel".into())
    }
}

/// What it is told of the forwards, each with its socket.
fn forwards(attached: &Attached) -> impl Iterator<Item = (ForwardSocket, BorrowedFd<'_>)> {
    let all = attached.config.forwards.iter();
    all.zip(&attached.forward_sockets).map(|(forward, socket)| {
        let vm = &attached.vms[forward.vm].open;
        let name = ForwardSocket {
            vm: vm.id,
            vm_row: vm.row as u16,
            protocol: forward.protocol,
            host: SocketAddrV4::new(forward.host, forward.host_port),
            guest_port: forward.guest_port,
            rule: attached.forward_rule(forward),
        };
        (name, socket.as_fd())
    })
}
