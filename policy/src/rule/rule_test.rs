//! Rules and destinations for tests.
use super::*;

pub(crate) fn allow(text: &str) -> Rule {
    Rule::Match(Action::Allow, text.parse().unwrap())
}

pub(crate) fn deny(text: &str) -> Rule {
    Rule::Match(Action::Deny, text.parse().unwrap())
}

pub(crate) fn to(protocol: Protocol, addr: &str, port: u16) -> Destination {
    Destination {
        addr: addr.parse().unwrap(),
        port,
        protocol,
    }
}
