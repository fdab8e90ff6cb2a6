//! Messages between slipgate's processes: broker and engine, broker and VMM, broker and metrics
//! process, and the commands that ask a broker through its control socket.
//!
//! Messages are JSON: a debugger can read it, and none of them is on a packet's way. A message that
//! passes descriptors owns them in the fields where they belong; [`descriptors`] moves them into the
//! socket's control data and back, and checks their number.
//!
//! Whatever is decoded here may come from a process that a guest has taken over. So packets, lines
//! and numbers of descriptors are bounded, and what does not fit the bound or the message is an error.
#![deny(unsafe_code)]

pub mod channel;
pub mod client;
pub mod descriptors;
pub mod engine;
pub mod metrics;
#[allow(unsafe_code)]
mod rights;
pub mod vmm;
