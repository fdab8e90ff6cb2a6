//! A running engine process. It receives descriptors and settings at its start, and later changes.
use std::{
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use slipgate_abi::RuleIndex;
use slipgate_ipc::{
    channel::{Channel, MAX_FDS, Received, memory_file},
    engine::{FromEngine, OnExit, OpenQuestion, Start, ToEngine},
};

use super::{child::ChildProcess, outgoing::Outgoing};
use crate::{
    kernel_state::{Attached, forward_texts},
    role::Role,
};

/// Messages that may wait for room in its channel: an engine that takes none of so many hangs.
const MOST_QUEUED: usize = 1_024;

/// Questions that a successor is given at most.
const MOST_QUESTIONS: usize = 4_096;

/// A running engine. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct EngineProcess {
    process: ChildProcess,
    outgoing: Outgoing,
}

impl EngineProcess {
    /// Starts the engine and queues its settings. Does not wait until it serves.
    pub(crate) fn start(
        attached: &Attached,
        worker: usize,
        reserved_ports: &[(u8, u16)],
        log: &str,
    ) -> anyhow::Result<Self> {
        let its = &attached.workers[worker];
        let users = its.users.as_ref().unwrap_or(&attached.users);
        let engine = Self {
            process: ChildProcess::start(Role::Engine, users)?,
            outgoing: Outgoing::new(MOST_QUEUED),
        };
        attached.warn_of_resolvers();
        let config = &attached.config;
        let compiled = memory_file(&attached.policies.set().to_bytes())?;
        let start = Start {
            maps: attached.datapath.maps().fds(),
            port: its.port.fd.as_fd(),
            userspace: None,
            namespace: None,
            flow_log: attached.flow_log.as_ref().map(AsFd::as_fd),
            pcap: attached.pcap.as_ref().map(AsFd::as_fd),
            locks: its.owner.lock_fds().collect(),
            owner_row: its.owner.row(),
            epoch: its.owner.epoch(),
            flow_log_events: config.flow_log_events.clone(),
            vms: attached.vm_specs(worker),
            policies: compiled.as_fd(),
            forward_rules: RuleIndex::new(attached.policies.forwards().start),
            forward_texts: forward_texts(config).collect(),
            resolvers: attached.resolvers.now().to_vec(),
            nat_ports: (*config.nat_ports.start(), *config.nat_ports.end()),
            eim_ports: config.eim_ports.as_ref().map(|r| (*r.start(), *r.end())),
            reserved_ports: reserved_ports.to_vec(),
            network: attached.network_view(),
            open_questions: its.open_questions.clone(),
            log: log.to_owned(),
        };
        engine.channel().send(ToEngine::Start(Box::new(start)))?;
        let mut forwards = attached.forward_sockets(worker).into_iter().peekable();
        while forwards.peek().is_some() {
            let some = forwards.by_ref().take(MAX_FDS).collect();
            engine.channel().send(ToEngine::Forwards(some))?;
        }
        engine.channel().send(ToEngine::<BorrowedFd<'_>>::Begin)?;
        Ok(engine)
    }

    /// Returns the pidfd, which is readable when the engine has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd()
    }

    pub(crate) fn channel(&self) -> &Channel {
        self.process.channel()
    }

    /// Sends a message, now or when there is room.
    pub(crate) fn send(&mut self, message: ToEngine) -> anyhow::Result<()> {
        Ok(self.outgoing.send(self.process.channel(), message)?)
    }

    /// Sends waiting messages while there is room.
    pub(crate) fn flush(&mut self) -> anyhow::Result<()> {
        Ok(self.outgoing.flush(self.process.channel())?)
    }

    /// Returns the events to poll for on the engine's channel.
    pub(crate) fn wants(&self) -> PollFlags {
        match self.outgoing.is_empty() {
            true => PollFlags::POLLIN,
            false => PollFlags::POLLIN | PollFlags::POLLOUT,
        }
    }

    /// Whether the engine is behind, so that clients' requests should wait.
    pub(crate) fn is_behind(&self) -> bool {
        self.outgoing.is_behind()
    }

    /// Returns why the engine is unusable although it may run; `None` if it is usable.
    pub(crate) fn failure(&self) -> Option<String> {
        self.outgoing.failure()
    }

    /// Waits until the engine serves. Returns the number of flows that it adopted.
    pub(crate) fn await_ready(&mut self, within: Duration) -> anyhow::Result<u64> {
        loop {
            match self.process.next(within)? {
                Some(FromEngine::Ready { adopted }) => return Ok(adopted),
                Some(_) => {}
                None => return Err(self.process.ended_before("it was ready")),
            }
        }
    }

    /// Waits until the engine answers.
    pub(crate) fn await_answer(&mut self, within: Duration) -> anyhow::Result<()> {
        // No question of the watch's.
        let asked = u64::MAX;
        self.send(ToEngine::Ping { id: asked })?;
        self.await_message(within, "answered", |message| {
            message == FromEngine::Pong { id: asked }
        })
    }

    /// Stops the engine, and waits until it has ended. Returns the questions that it leaves open.
    pub(crate) fn stop(
        &mut self,
        exit: OnExit,
        within: Duration,
    ) -> anyhow::Result<Vec<OpenQuestion>> {
        self.send(ToEngine::Shutdown(exit))?;
        let mut questions = Vec::new();
        let is_stopped = |message| {
            if let FromEngine::OpenQuestions(some) = message {
                let room = MOST_QUESTIONS.saturating_sub(questions.len());
                questions.extend(some.into_iter().take(room));
                return false;
            }
            message == FromEngine::Stopped
        };
        self.await_message(within, "stopped", is_stopped)?;
        Ok(questions)
    }

    fn await_message(
        &mut self,
        within: Duration,
        what: &str,
        mut is_it: impl FnMut(FromEngine) -> bool,
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
            match self.process.try_receive::<FromEngine>()? {
                Received::Message(message) => {
                    if is_it(message) {
                        return Ok(());
                    }
                }
                Received::Nothing => {}
                Received::End => {
                    return Err(self.process.ended_before(&format!("it had {what}")));
                }
            }
        }
    }

    /// Describes how an engine that has closed its channel ended.
    pub(crate) fn how_it_ended(&mut self) -> String {
        self.process.how_it_ended()
    }
}
