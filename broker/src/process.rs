//! The other processes of slipgate: start, messages in both directions, and restart.
mod api;
pub(crate) mod child;
mod engine;
mod engine_process;
mod engines;
mod metrics;
mod outgoing;
pub(crate) mod spawn;
mod supervisor;

pub(crate) use self::{
    api::Api,
    child::ChildProcess,
    engine::{Engine, GivenUp},
    engines::{Engines, page_of, reply_of_all},
    metrics::{Metrics, Scraped},
    outgoing::Outgoing,
};

/// Messages of one process handled at a time, so that a process that never stops sending does not
/// block the others.
pub(crate) const MESSAGES_AT_ONCE: usize = 64;
