//! Attacks on egress by name: `--default deny` holds with `*.example.test` allowed, or inspected.
//! One test per attack. Each evaluates the packets that arrived in the world: none of the attack
//! with the policy on, the attack with the policy off, and its permitted counterpart with the
//! policy on.

mod addresses;
mod answers;
mod arrivals;
mod by_hand;
mod fragments;
mod hello;
mod quic;
mod resolvers;
mod reuse;
mod stage;
mod two_readings;

use std::net::{Ipv4Addr, SocketAddrV4};

use arrivals::Arrivals;
use stage::{Stage, holds, holds_beside};

/// Slipgate's upstream, which knows every name.
const RESOLVER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);
/// Address of `api.example.test`.
const ALLOWED: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 20);
/// Address of `evil.test`.
const DENIED: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 30);
/// Address of `shared.example.test` and `shared.evil.test`.
const SHARED: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 40);
/// A resolver that answers whatever it is asked.
const SECOND_RESOLVER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 53);
/// A server on somebody's private network.
const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);

const OFF: &[&str] = &["--dns", "203.0.113.10"];
const ALLOW: &[&str] = &[
    "--dns",
    "203.0.113.10",
    "--default",
    "deny",
    "--allow",
    "*.example.test",
];
const INSPECT: &[&str] = &[
    "--dns",
    "203.0.113.10",
    "--default",
    "deny",
    "--inspect",
    "*.example.test",
];
const HTTPS: u16 = 443;

fn https(address: Ipv4Addr) -> SocketAddrV4 {
    SocketAddrV4::new(address, HTTPS)
}
