//! Observation of traffic: captures of flows, and a dump of all frames on the port.
pub(crate) mod capture;
mod pcap;
pub mod pcapng;
pub(crate) mod watch;

pub use capture::{CaptureRequest, MOST_CAPTURES, NotCaptured};
pub(crate) use pcap::PortDump;
