//! Explanations of decisions, for people who write a policy or ask about a flow.
pub(crate) mod destination;
mod name;
pub(crate) mod offline;
mod port_53;
