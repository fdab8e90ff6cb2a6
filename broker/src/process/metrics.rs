//! Supervision of the metrics process: the broker starts it with the maps and the socket, and again
//! when it ends.
use std::{
    net::TcpListener,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    time::Instant,
};

use slipgate_control::Users;
use slipgate_ipc::{
    channel::Received,
    engine::EngineReply,
    metrics::{FromMetrics, MetricsStart, ToMetrics},
};

use super::{MESSAGES_AT_ONCE, supervisor::Supervisor};
use crate::{kernel_state::Attached, role::Role};

/// Source of the figures of a process that serves clients, and its user.
pub(crate) trait Scraped {
    /// The maps, in the order of their layout.
    fn map_fds(&self) -> Vec<BorrowedFd<'_>>;
    /// Rows in `OWNERS` whose VMs are shown.
    fn owner_rows(&self) -> Vec<u32>;
    /// Keys of the VMs' labels that are shown.
    fn label_keys(&self) -> &[String];
    /// Users that slipgate's processes run as.
    fn users(&self) -> &Users;
}

impl Scraped for Attached {
    fn map_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.datapath.maps().fds()
    }

    fn owner_rows(&self) -> Vec<u32> {
        self.rows()
    }

    fn label_keys(&self) -> &[String] {
        &self.config.metrics_labels
    }

    fn users(&self) -> &Users {
        &self.users
    }
}

/// The listening socket, and the process that serves it.
#[derive(Debug)]
pub(crate) struct Metrics {
    listener: TcpListener,
    log: String,
    supervisor: Supervisor,
    /// Whether its end was logged.
    is_logged: bool,
    /// Worker whose engine it asks, and the question's number.
    pub(crate) asking: Option<(usize, u64)>,
}

impl Metrics {
    /// Creates the state of a socket that is served from now on.
    pub(crate) fn new(listener: TcpListener, of: &impl Scraped, log: &str) -> Self {
        let mut metrics = Self {
            listener,
            log: log.to_owned(),
            supervisor: Supervisor::default(),
            is_logged: false,
            asking: None,
        };
        metrics.start(of);
        metrics
    }

    /// The socket that clients connect to.
    pub(crate) fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Descriptors to poll for input.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let running = self.supervisor.process().into_iter();
        running.flat_map(|process| [process.pidfd(), process.channel().as_fd()])
    }

    /// Returns the time at which [`Metrics::turn`] must be called; `None` if there is none.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.supervisor.due()
    }

    /// Handles its messages and its end, and restarts it. Returns the start of the page of names
    /// that it requests, if it requests one. A second question is not passed on before the first is
    /// answered.
    pub(crate) fn turn(&mut self, of: &impl Scraped) -> Option<u64> {
        let Some(process) = self.supervisor.process_mut() else {
            if self.supervisor.is_due() {
                self.start(of);
            }
            return None;
        };
        let mut wanted = None;
        for _ in 0..MESSAGES_AT_ONCE {
            match process.try_receive() {
                Ok(Received::Message(FromMetrics::Inventory { from })) => wanted = Some(from),
                Ok(Received::Nothing) => break,
                Ok(Received::End) | Err(_) => {
                    let how = process.how_it_ended();
                    self.ended(&how);
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
        if let Some(process) = self.supervisor.process() {
            // One that does not listen has its own limit to its patience.
            let page = ToMetrics::<OwnedFd>::Inventory(page);
            let _ = process.channel().try_send(page);
        }
    }

    fn start(&mut self, of: &impl Scraped) {
        let start = ToMetrics::Start(MetricsStart {
            maps: of.map_fds(),
            listener: self.listener.as_fd(),
            owner_rows: of.owner_rows(),
            label_keys: of.label_keys().to_vec(),
            log: self.log.clone(),
        });
        self.asking = None;
        let started = self.supervisor.start(Role::Metrics, of.users(), start);
        if let Err(how) = started {
            self.ended(&how);
        }
    }

    fn ended(&mut self, how: &str) {
        if self.supervisor.ended() {
            self.is_logged = false;
        }
        if !std::mem::replace(&mut self.is_logged, true) {
            tracing::warn!(
                "the metrics process {how}; guests are served all the same, and it is started \
                 again, at most once a minute"
            );
        }
    }
}
