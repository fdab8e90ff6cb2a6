//! The network stack: one smoltcp interface per CPU, each over its own queue pair, all with one MAC
//! and one address.
//!
//! # Theory of operation
//! Each CPU opens connections from a range of local ports that is its own, so the destination port
//! of an arriving frame says whose it is. A device that remembers which pair a flow was sent on
//! delivers it there; a frame that arrives elsewhere is copied into the inbox of the CPU whose it
//! is ([`steering`]). Answers to ARP requests go to all, since nobody knows who asked. So no CPU's
//! stack ever sees a segment of another's connection, which it would answer with RST.
//!
//! ```text
//!  pair 0 ──► steering ──► smoltcp, CPU 0        pair 1 ──► steering ──► smoltcp, CPU 1
//!                 └──────── inbox 1 ───────────────────────────▲
//! ```
//!
//! A CPU sleeps only after it has said so in [`Lanes`] and looked into its inbox once more; who
//! puts a frame there and finds it asleep wakes it.

pub mod inbox;
pub mod lease;
pub mod ports;
pub mod stack;
pub mod steering;

pub use self::{
    inbox::{Inbox, InboxCounters},
    lease::Lease,
    ports::Ports,
    stack::{Stack, Turn},
    steering::Lanes,
};
