//! The userspace half of slipgate: takes every decision about a guest's traffic.
//!
//! The kernel's programs translate established flows and hand everything else to an *engine port*.
//! The [`event_loop`] reads that port, and
//! - admits new flows ([`admission`], [`flow`], [`nat_ports`], [`quota`], [`name_gate`], [`route`]),
//! - answers what the guest asks of its network ([`dhcp`], [`dns`], [`arp`], [`icmp`]),
//! - relays what can't be translated ([`relay`]),
//! - finds the end of every flow and records it ([`flow`], [`record`]).
//!
//! No kernel facility is reached directly: frames go by [`port::FrameIo`], flows by
//! [`datapath::FlowMap`] and [`datapath::Tables`], time by [`clock::Clock`]. So the whole engine
//! runs under test with a simulated clock and an in-memory datapath (`fake`).
//!
//! Everything that comes over the port is hostile: it is parsed by bounds-checked views, work and
//! memory per guest are bounded, and what is not served is counted ([`stats`]).

// Only modules that share memory with the kernel's programs say `expect(unsafe_code)`. Tests may.
#![cfg_attr(not(test), deny(unsafe_code))]

pub mod admission;
pub mod arp;
pub mod clock;
pub mod context;
pub mod control;
pub mod datagram;
pub mod datapath;
pub mod dhcp;
pub mod dns;
pub mod event_loop;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod flow;
pub mod icmp;
pub mod inspection;
pub mod mss;
pub mod name_gate;
pub mod nat_ports;
pub mod observe;
pub mod packet;
pub mod packet_path;
pub mod poll;
pub mod port;
pub mod quota;
pub mod record;
pub mod relay;
pub mod reply;
pub mod route;
pub mod services;
mod state;
pub mod stats;
#[cfg(test)]
mod test_vm;
pub mod vm;
