//! Descriptors of the processes that serve clients of a user-mode engine, and answers for the metrics process.
use std::os::fd::BorrowedFd;

use slipgate_control::Users;
use slipgate_ipc::engine::{EngineRequest, ToEngine};

use super::{Served, place::Place};
use crate::{config::Config, process::Scraped};

/// Place of a user-mode engine, as a source of metrics.
pub(super) struct ScrapedPlace<'s> {
    pub(super) place: &'s Place,
    pub(super) nat: &'s Config,
    pub(super) users: &'s Users,
}

impl Scraped for ScrapedPlace<'_> {
    fn map_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.place.memory.maps.fds()
    }

    fn owner_rows(&self) -> Vec<u32> {
        vec![self.place.owner.row()]
    }

    fn label_keys(&self) -> &[String] {
        &self.nat.metrics_labels
    }

    fn users(&self) -> &Users {
        self.users
    }
}

impl Served {
    pub(super) fn scraped(&self) -> ScrapedPlace<'_> {
        let Self {
            place, nat, users, ..
        } = self;
        ScrapedPlace { place, nat, users }
    }

    /// Handles requests and the end of the metrics process.
    pub(super) fn see_to_metrics(&mut self) -> anyhow::Result<()> {
        let Some(mut metrics) = self.metrics.take() else {
            return Ok(());
        };
        let wanted = metrics.turn(&self.scraped());
        if let Some(from) = wanted.filter(|_| self.engine.is_some()) {
            let id = self.clients.next_id();
            metrics.asking = Some((0, id));
            let request = EngineRequest::Inventory { from };
            self.metrics = Some(metrics);
            return self.send(ToEngine::Request {
                id,
                about: None,
                request,
            });
        }
        self.metrics = Some(metrics);
        Ok(())
    }
}
