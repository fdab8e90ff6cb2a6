//! Attacks on egress by name: `--default deny` holds with `*.example.test` allowed, or inspected.
//! One test per attack, in each cell of the matrix. Each evaluates the packets that arrived in the world: none of the attack
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

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use arrivals::Arrivals;
use stage::{Stage, holds, holds_beside};

use crate::{
    Cell,
    matrix::{Family, matrix},
};

/// A host of the world, which has an address of each family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Host {
    Resolver,
    Allowed,
    Denied,
    Shared,
    SecondResolver,
    Private,
}

/// Slipgate's upstream, which knows every name.
const RESOLVER: Host = Host::Resolver;
/// The host of `api.example.test`.
const ALLOWED: Host = Host::Allowed;
/// The host of `evil.test`.
const DENIED: Host = Host::Denied;
/// The host of `shared.example.test` and `shared.evil.test`.
const SHARED: Host = Host::Shared;
/// A resolver that answers whatever it is asked.
const SECOND_RESOLVER: Host = Host::SecondResolver;
/// A server on somebody's private network.
const PRIVATE: Host = Host::Private;

const ALL_HOSTS: [Host; 6] = [RESOLVER, ALLOWED, DENIED, SHARED, SECOND_RESOLVER, PRIVATE];

impl Host {
    const fn ipv4(self) -> Ipv4Addr {
        match self {
            Self::Resolver => Ipv4Addr::new(203, 0, 113, 10),
            Self::Allowed => Ipv4Addr::new(203, 0, 113, 20),
            Self::Denied => Ipv4Addr::new(203, 0, 113, 30),
            Self::Shared => Ipv4Addr::new(203, 0, 113, 40),
            Self::SecondResolver => Ipv4Addr::new(203, 0, 113, 53),
            Self::Private => Ipv4Addr::new(10, 9, 0, 1),
        }
    }

    const fn ipv6(self) -> Ipv6Addr {
        match self {
            Self::Private => Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 1),
            public => Ipv6Addr::new(0x2001, 0xdb8, 0xff, 0, 0, 0, 0, public as u16 + 0x100),
        }
    }

    fn ip(self, family: Family) -> IpAddr {
        family.choose(self.ipv4(), self.ipv6())
    }
}

/// A port of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Service {
    host: Host,
    port: u16,
}

const fn at(host: Host, port: u16) -> Service {
    Service { host, port }
}

/// Flags that a stage has besides its resolver's. `{denied}` stands for a host's address.
const OFF: &[&str] = &[];
const ALLOW: &[&str] = &["--default", "deny", "--allow", "*.example.test"];
const INSPECT: &[&str] = &["--default", "deny", "--inspect", "*.example.test"];
const HTTPS: u16 = 443;

fn https(host: Host) -> Service {
    at(host, HTTPS)
}
