//! Who looks on: captures of flows, and a copy of all that goes over the port.
pub(crate) mod capture;
mod pcap;
pub mod pcapng;
pub(crate) mod watch;

pub use capture::{CaptureRequest, MOST_CAPTURES, NotCaptured, Subject};
pub(crate) use pcap::PortDump;
