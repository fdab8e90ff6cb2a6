//! The network stack: one smoltcp interface per CPU, each over its own queue pair, all with one MAC
//! and one address of each family.
//!
//! # Theory of operation
//! Each CPU opens connections from a range of local ports of its own, so the destination port of an
//! arriving frame identifies its CPU. A device that remembers the pair on which a flow was sent
//! delivers the frame there. A frame that arrives on another pair is copied into the inbox of its
//! CPU ([`steering`]). Answers to ARP requests, and neighbours' advertisements by IPv6, go to all CPUs,
//! because the CPU that asked is not known. So no CPU's stack ever sees a segment of another's connection, which it would answer with
//! RST.
//!
//! ```text
//!  pair 0 ──► steering ──► smoltcp, CPU 0        pair 1 ──► steering ──► smoltcp, CPU 1
//!                 └──────── inbox 1 ───────────────────────────▲
//! ```
//!
//! Before a CPU sleeps, it sets a flag in [`Lanes`] and then checks its inbox once more. A CPU that
//! puts a frame there and finds the flag set wakes it.

pub mod inbox;
pub mod ipv6;
pub mod lease;
pub mod ports;
mod run_clock;
pub mod stack;
pub mod steering;

pub use self::{
    inbox::{Inbox, InboxCounters},
    ipv6::Ipv6Lease,
    lease::Lease,
    ports::Ports,
    stack::{Stack, Turn},
    steering::Lanes,
};
