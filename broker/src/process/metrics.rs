//! Supervision of the metrics process: the broker starts it with the maps and the socket, and again
//! when it ends.
use std::{
    net::TcpListener,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use slipgate_ipc::{
    channel::Received,
    engine::EngineReply,
    metrics::{FromMetrics, MetricsStart, ToMetrics},
};

use super::{HEARD_AT_ONCE, child::ChildProcess};
use crate::{kernel_state::Attached, role::Role};

/// Delay before the first restart, and the maximum delay.
const BACK_OFF: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// The listening socket, and the process that serves it.
#[derive(Debug)]
pub(crate) struct Metrics {
    listener: TcpListener,
    log: String,
    state: State,
    /// Delay before the next start, if this one fails.
    back_off: Duration,
    /// Whether its end was logged.
    told: bool,
    /// Number of its question that is on its way to the engine.
    pub(crate) asking: Option<u64>,
}

#[derive(Debug)]
enum State {
    Runs(ChildProcess, Instant),
    Due(Instant),
}

impl Metrics {
    /// Creates the state of a socket that is served from now on.
    pub(crate) fn new(listener: TcpListener, attached: &Attached, log: &str) -> Self {
        let mut metrics = Self {
            listener,
            log: log.to_owned(),
            state: State::Due(Instant::now()),
            back_off: BACK_OFF[0],
            told: false,
            asking: None,
        };
        metrics.start(attached);
        metrics
    }

    /// Descriptors to poll for input.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let running = match &self.state {
            State::Runs(process, _) => Some(process),
            State::Due(_) => None,
        };
        running
            .into_iter()
            .flat_map(|process| [process.pidfd(), process.channel().as_fd()])
    }

    /// Returns the time at which [`Metrics::turn`] must be called; `None` if there is none.
    pub(crate) fn due(&self) -> Option<Instant> {
        match self.state {
            State::Runs(..) => None,
            State::Due(due) => Some(due),
        }
    }

    /// Handles its messages and its end, and restarts it. Returns the start of the page of names
    /// that it requests, if it requests one. A second question is not passed on before the first is
    /// answered.
    pub(crate) fn turn(&mut self, attached: &Attached) -> Option<u64> {
        let State::Runs(process, since) = &mut self.state else {
            if self.due().is_some_and(|due| due <= Instant::now()) {
                self.start(attached);
            }
            return None;
        };
        let mut wanted = None;
        for _ in 0..HEARD_AT_ONCE {
            match process.heard() {
                Ok(Received::Message(FromMetrics::Inventory { from })) => wanted = Some(from),
                Ok(Received::Nothing) => return wanted.filter(|_| self.asking.is_none()),
                Ok(Received::End) | Err(_) => {
                    let ran = since.elapsed();
                    let how = process.how_it_ended();
                    self.ended(how, ran);
                    return None;
                }
            }
        }
        wanted.filter(|_| self.asking.is_none())
    }

    /// Sends the process the page that it requested.
    pub(crate) fn answer(&mut self, reply: EngineReply) {
        self.asking = None;
        let EngineReply::Inventory(page) = reply else {
            return;
        };
        if let State::Runs(process, _) = &self.state {
            // One that does not listen has its own limit to its patience.
            let _ = process
                .channel()
                .try_send(ToMetrics::<OwnedFd>::Inventory(page));
        }
    }

    fn start(&mut self, attached: &Attached) {
        let start = ToMetrics::Start(MetricsStart {
            maps: attached.datapath.maps().fds(),
            listener: self.listener.as_fd(),
            owner_row: attached.owner.row(),
            label_keys: attached.config.metrics_labels.clone(),
            log: self.log.clone(),
        });
        let started = ChildProcess::start(Role::Metrics, &attached.users).and_then(|process| {
            process.channel().send(start)?;
            Ok(process)
        });
        self.asking = None;
        match started {
            Ok(process) => self.state = State::Runs(process, Instant::now()),
            Err(e) => self.ended(format!("could not be started: {e:#}"), Duration::ZERO),
        }
    }

    fn ended(&mut self, how: String, ran: Duration) {
        if ran >= BACK_OFF[1] {
            (self.back_off, self.told) = (BACK_OFF[0], false);
        }
        if !std::mem::replace(&mut self.told, true) {
            tracing::warn!(
                "the metrics process {how}; guests are served all the same, and it is started \
                 again, at most once a minute"
            );
        }
        self.state = State::Due(Instant::now() + self.back_off);
        self.back_off = (2 * self.back_off).min(BACK_OFF[1]);
    }
}
