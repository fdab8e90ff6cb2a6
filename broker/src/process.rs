//! The other processes of slipgate: started, told, heard, and started again.
mod child;
mod engine;
mod engine_process;
mod metrics;
mod outgoing;

pub(crate) use self::{
    child::ChildProcess,
    engine::{Engine, GivenUp},
    metrics::Metrics,
};

/// Messages of another process that are heard at a time: one that never ends to talk keeps nobody
/// else waiting.
pub(crate) const HEARD_AT_ONCE: usize = 64;
