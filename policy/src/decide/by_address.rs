//! Decision about a destination by its address alone.
use std::net::IpAddr;

use ipnet::IpNet;
use slipgate_abi::Refusal;

use crate::{
    Action, Decision, Destination, Policy, Rule, Space, compile::dns_bypass::dns_bypass, embedded,
};

impl Policy {
    /// Decides on a destination by the rules by address, the safe defaults and the default action.
    ///
    /// An IPv6 address that contains an IPv4 address ([`embedded`]) is judged by both, because the
    /// packet reaches the latter: see [`Policy::judged_as`].
    pub fn decide(&self, to: Destination) -> Decision {
        self.decide_alone(self.judged_as(to))
    }

    /// Returns the destination whose decision applies to `to`: the IPv4 destination inside it where
    /// a rule or a safe default refuses that one, or a rule allows it and none is about `to`.
    pub(crate) fn judged_as(&self, to: Destination) -> Destination {
        let Some(inner) = to.inside() else {
            return to;
        };
        let (outside, inside) = (self.decide_alone(to), self.decide_alone(inner));
        let by_default = |decision: Decision| decision.rule == self.default_id();
        let is_inner = by_default(outside) || !inside.is_allowed();
        match is_inner && !by_default(inside) {
            true => inner,
            false => to,
        }
    }

    /// Decides on a translated port of another guest, or on a guest that sends from one. The address
    /// is the host's and the packets never leave it, so no safe default protects it: the rules by
    /// address and the default action decide.
    pub fn decide_hairpin(&self, to: Destination) -> Decision {
        self.decide_within(to, None)
    }

    /// Decides on a destination, regardless of an IPv4 address inside it.
    pub(crate) fn decide_alone(&self, to: Destination) -> Decision {
        self.decide_within(to, self.protected.space_of(to.addr))
    }

    /// Decides on a destination in this protected space.
    fn decide_within(&self, to: Destination, space: Option<(IpNet, Space)>) -> Decision {
        let bypass = self.bypasses_dns(to);
        let shortest = space.map_or(0, |(range, _)| range.prefix_len());
        let matched = match (space, bypass) {
            (None, false) => self.all.first(to, 0),
            // Only allows as specific as the protected range count; all denies do.
            (Some(_), false) => earliest(self.all.first(to, shortest), self.denies.first(to, 0)),
            // Only allows that open a resolver specifically.
            (_, true) => earliest(
                self.bypass_allows.first(to, shortest),
                self.denies.first(to, 0),
            ),
        };
        if let Some((order, line)) = self.in_files(to, matched) {
            return self.decision(order, Some(line), Action::Deny);
        }
        match matched {
            Some(order) => self.decision(order, None, self.action(order)),
            None if space.is_some() => Decision::by(self.protected_id(), Some(Refusal::Protected)),
            None if bypass => self.by_dns_bypass(),
            None => self.by_default(),
        }
    }

    /// Whether a destination is a resolver by which a guest could bypass the rules by name.
    pub fn bypasses_dns(&self, to: Destination) -> bool {
        let is_bypass = |to| dns_bypass(to).is_some();
        self.judges_names() && (is_bypass(to) || to.inside().is_some_and(is_bypass))
    }

    /// Returns the protected space that contains an address, if no rule by address opens it
    /// specifically. An IPv4 address inside the address ([`embedded`]) counts too.
    pub fn shut_space(&self, addr: IpAddr) -> Option<Space> {
        let inside = || self.shut_space(embedded(addr)?.into());
        let Some((range, space)) = self.protected(addr) else {
            return inside();
        };
        let opens = self.rules.iter().any(|rule| match rule {
            Rule::Match(Action::Allow | Action::Inspect, pattern) => {
                let prefix = pattern.prefix();
                prefix.contains(&addr) && prefix.prefix_len() >= range.prefix_len()
            }
            _ => false,
        });
        if opens { inside() } else { Some(space) }
    }

    pub(crate) fn decision(&self, order: u32, line: Option<u32>, action: Action) -> Decision {
        Decision {
            rule: self.id(order),
            line,
            refusal: (action == Action::Deny).then_some(Refusal::Rule),
        }
    }

    pub(crate) fn by_default(&self) -> Decision {
        let refusal = (self.default == Action::Deny).then_some(Refusal::Default);
        Decision::by(self.default_id(), refusal)
    }

    pub(super) fn by_dns_bypass(&self) -> Decision {
        Decision::by(self.dns_bypass_id(), Some(Refusal::DnsElsewhere))
    }

    /// Returns the position and line of the first deny file that denies `to`, if it stands before
    /// `matched`.
    fn in_files(&self, to: Destination, matched: Option<u32>) -> Option<(u32, u32)> {
        let before = matched.unwrap_or(u32::MAX);
        self.files
            .iter()
            .take_while(|order| **order < before)
            .find_map(|order| match &self.rules[*order as usize] {
                Rule::DenyFile(file) => Some((*order, file.line_for(to)?)),
                Rule::Match(..) | Rule::Name(..) => None,
            })
    }
}

fn earliest(a: Option<u32>, b: Option<u32>) -> Option<u32> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
#[path = "by_address_test.rs"]
pub(crate) mod tests;
