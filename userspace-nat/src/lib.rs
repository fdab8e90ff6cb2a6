//! The userspace half of slipgate: takes every decision about a guest's traffic.
//!
//! The kernel's programs translate established flows and hand everything else to an *engine port*.
//! The [`event_loop`] reads that port, and
//! - admits new flows ([`admission`], [`flow`], [`nat_ports`], [`quota`], [`name_gate`],
//!   [`route`]),
//! - answers the guest's requests to its network ([`dhcp`], [`dns`], [`arp`], [`icmp`];
//!   with IPv6 [`ndp`] and [`dhcpv6`]),
//! - relays connections that can't be translated ([`relay`]),
//! - finds the end of every flow and records it ([`flow`], [`record`]).
//!
//! No kernel facility is used directly: frames pass through [`port::FrameIo`], flows through
//! [`datapath::FlowMap`] and [`datapath::Tables`], time through [`clock::Clock`]. So the whole
//! engine runs under test with a simulated clock and an in-memory datapath (`fake`).
//!
//! Everything that is read from the port is hostile: it is parsed by bounds-checked views, work and
//! memory per guest are bounded, and packets that are not served are counted ([`stats`]).

// Only modules that share memory with the kernel's programs or a guest, or make calls of the kernel's that
// have no safe form, say `expect(unsafe_code)`. Tests may.
#![cfg_attr(not(test), deny(unsafe_code))]

pub mod admission;
pub mod arp;
pub mod clock;
pub mod control;
pub mod datagram;
pub mod datapath;
pub mod dhcp;
pub mod dhcpv6;
pub mod dns;
pub mod event_loop;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod flow;
mod gso;
mod guest_buffers;
pub mod guest_link;
pub mod host_sockets;
pub mod icmp;
mod inet;
pub mod inspection;
pub mod mss;
pub mod name_gate;
pub mod nat_ports;
pub mod ndp;
pub mod observe;
pub mod packet;
pub mod packet_path;
pub mod payload;
pub mod poll;
pub mod port;
pub mod quota;
pub mod record;
pub mod relay;
pub mod reply;
pub mod services;
pub mod sockets;
pub mod software;
pub mod space;
mod state;
pub mod stats;
pub mod tcp;
#[cfg(test)]
mod test_child;
#[cfg(test)]
mod test_vm;
pub mod userspace_port;
pub mod vm;

pub use slipgate_model::route;
