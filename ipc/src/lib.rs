//! Messages between slipgate's processes: broker and engine, broker and VMM, broker and metrics
//! process, broker and API, and the commands that ask a broker through its control socket.
//!
//! Messages are JSON, which a debugger can read; no packet of a guest passes through them. A
//! message that passes descriptors owns them in the fields where they belong; [`descriptors`] moves
//! them into the socket's control data and back, and checks their number.
//!
//! Input may come from a process that a guest has taken over. So the sizes of packets and lines and
//! the numbers of descriptors are bounded, and input that exceeds a bound or does not fit the
//! message is an error.
#![forbid(unsafe_code)]

pub mod api;
pub mod channel;
pub mod client;
pub mod descriptors;
pub mod engine;
pub mod metrics;
pub mod rights;
pub mod vmm;
pub mod vsock;
