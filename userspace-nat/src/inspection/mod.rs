//! Inspection: what a connection says of the server that it is for, before it gets there.
//!
//! The parsers depend on nothing but bytes: [`tls`] and [`client_hello`], [`http`], [`quic`].
//! [`spoken`] follows a client's stream by them. [`reassembly`] makes a stream of a guest's segments,
//! and [`tcp`] holds it until it is decided.
mod host_name;

pub mod client_hello;
pub mod http;
pub mod quic;
pub mod reassembly;
pub(crate) mod sessions;
pub mod spoken;
pub mod tcp;
pub mod tls;

pub use host_name::HostName;
pub use slipgate_policy::{InspectionRefusal as Refused, RefusedCounts};
