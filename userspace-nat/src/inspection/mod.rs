//! Inspection: reads the name of the intended server in a connection's first data, before the
//! server receives it.
//!
//! The parsers depend on bytes only: [`tls`] and [`client_hello`], [`http`], [`quic`]. [`protocol_sniffer`]
//! follows a client's stream with them. [`reassembly`] builds the stream from a guest's segments,
//! and [`tcp`] holds it until the decision.
mod host_name;

pub mod client_hello;
pub mod http;
pub mod protocol_sniffer;
pub mod quic;
pub mod reassembly;
pub(crate) mod sessions;
pub mod tcp;
pub mod tls;

pub use host_name::HostName;
pub use slipgate_policy::{InspectionRefusal as Refused, RefusedCounts};
