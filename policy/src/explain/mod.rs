//! Decisions in words, for people who write a policy or ask why.
pub(crate) mod destination;
mod name;
pub(crate) mod offline;
mod port_53;
