//! The engines of all workers: what is meant for one VM goes to the engine that has it, what is
//! meant for all goes to each.
//!
//! Each engine is supervised by itself ([`super::engine`]): while one is replaced, the others'
//! guests notice nothing, and messages for it are dropped, because the next one starts with the
//! state that results from them.
//!
//! The inventory is read page by page, one engine's after the other's: a page's start has the
//! worker in its top bits.
use std::{
    num::NonZeroU64,
    time::{Duration, Instant},
};

use nix::poll::PollFd;
use slipgate_ipc::engine::{EngineInventory, EngineReply, OnExit, OpenQuestion, ToEngine};

use super::Engine;
use crate::kernel_state::Attached;

/// The engines, by worker; there is one at least.
#[derive(Debug)]
pub(crate) struct Engines(Vec<Engine>);

impl Engines {
    /// Starts an engine for each worker, and waits until all serve. Returns the number of flows that
    /// they adopted.
    pub(crate) fn start(
        attached: &Attached,
        reserved_ports: &[(u8, u16)],
        log: &str,
        within: Duration,
    ) -> anyhow::Result<(Self, u64)> {
        let begin = |worker| Engine::begin(attached, worker, reserved_ports, log);
        let engines: anyhow::Result<Vec<_>> = (0..attached.workers.len()).map(begin).collect();
        let mut engines = engines?;
        let mut adopted = 0;
        for engine in &mut engines {
            adopted += engine.await_ready(within)?;
        }
        Ok((Self(engines), adopted))
    }

    /// The number of workers.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The workers, by number.
    pub(crate) fn workers(&self) -> std::ops::Range<usize> {
        0..self.0.len()
    }

    /// The engine of a worker.
    pub(crate) fn of(&self, worker: usize) -> &Engine {
        &self.0[worker]
    }

    /// Same as [`Engines::of`], mutable.
    pub(crate) fn of_mut(&mut self, worker: usize) -> &mut Engine {
        &mut self.0[worker]
    }

    /// Sends a message to the engine of a worker.
    pub(crate) fn send(&mut self, worker: usize, message: ToEngine) -> anyhow::Result<()> {
        self.0[worker].send(message)
    }

    /// Sends a message to each engine.
    pub(crate) fn send_all(&mut self, message: impl Fn() -> ToEngine) -> anyhow::Result<()> {
        let mut engines = self.0.iter_mut();
        engines.try_for_each(|engine| engine.send(message()))
    }

    /// Whether an engine is behind, so that clients' requests should wait.
    pub(crate) fn is_behind(&self) -> bool {
        self.0.iter().any(Engine::is_behind)
    }

    /// Returns the descriptors to poll of each running engine, with its worker.
    pub(crate) fn watched(&self) -> impl Iterator<Item = (usize, [PollFd<'_>; 2])> {
        let all = self.0.iter().enumerate();
        all.filter_map(|(worker, engine)| Some((worker, engine.watched()?)))
    }

    /// Returns the time at which an engine has to be seen to.
    pub(crate) fn due(&self) -> impl Iterator<Item = Instant> {
        self.0.iter().map(Engine::due)
    }

    /// Stops the engines in order, each within a time limit. Returns the questions that each leaves
    /// open.
    ///
    /// # Errors
    /// The first failure; the others are stopped all the same.
    pub(crate) fn stop(
        self,
        exit: OnExit,
        attached: &mut Attached,
        reserved_ports: &[(u8, u16)],
        within: Duration,
    ) -> anyhow::Result<Vec<Vec<OpenQuestion>>> {
        let engines = self.0.into_iter();
        let stopped: Vec<_> = engines
            .map(|engine| engine.stop(exit, attached, reserved_ports, within))
            .collect();
        stopped.into_iter().collect()
    }
}

/// Position of the worker's number in the start of a page.
const WORKER_BIT: u32 = 56;

/// Returns the worker whose page begins at this position, and the position at its engine; `None` if
/// there is no such worker.
pub(crate) fn page_of(from: u64, workers: usize) -> Option<(usize, u64)> {
    let worker = usize::try_from(from >> WORKER_BIT).ok()?;
    (worker < workers).then_some((worker, from & ((1 << WORKER_BIT) - 1)))
}

/// Makes an engine's page one of all engines': the last of a worker is followed by the next
/// worker's first.
pub(crate) fn page_of_all(page: EngineInventory, worker: usize, workers: usize) -> EngineInventory {
    let at = |worker: usize, from: u64| (worker as u64) << WORKER_BIT | from;
    let next = match page.next {
        // An engine that goes beyond its part would lead the reader astray.
        Some(next) => (next >> WORKER_BIT == 0).then(|| at(worker, next)),
        None => None,
    };
    let next_engine = (worker + 1 < workers).then(|| at(worker + 1, 0));
    let next = next.or(next_engine);
    EngineInventory {
        next,
        next_engine: next_engine.and_then(NonZeroU64::new),
        ..page
    }
}

/// The same for a reply, if it has a page.
pub(crate) fn reply_of_all(reply: EngineReply, worker: usize, workers: usize) -> EngineReply {
    match reply {
        EngineReply::Inventory(page) => EngineReply::Inventory(page_of_all(page, worker, workers)),
        other => other,
    }
}

#[cfg(test)]
#[path = "engines_test.rs"]
mod tests;
