//! Tools for people who write policies: what is likely wrong with a file, what it decides, what it
//! would have changed, and the least one that covers what was seen. They read no file themselves.
mod bounds;
pub mod check;
mod compiled;
pub mod diff;
mod explain;
pub mod flow_log;
pub mod learn;

pub use self::{compiled::Compiled, explain::explain};
