//! Look-ups for VMs whose policies choose other routes than those of the table `main`: a table, a
//! VRF, or what the host's rules say about a mark.
//!
//! # Theory of operation
//! The broker turns what a policy names into steps ([`RouteDomain`]): one table, or the rules of the
//! host that concern packets with the mark, in their order. A look-up takes the steps in turn, as the
//! kernel does (`fib_rules_lookup`), and the first table that has a route decides. A table without
//! one, or with a route of the type `throw`, passes the look-up on; one that refuses ends it.
//!
//! What is not known leads nowhere: a domain of which the broker has not told, a table that does not
//! exist, a rule that depends on what is not looked at. No packet of such a VM leaves by the routes of
//! the table `main` instead.
use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use slipgate_abi::IfIndex;
use slipgate_policy::EgressRoutes;

use super::{
    Route, RouteDomain, RouteKind, RouteSnapshot, RouteStep, RouteTable, StepAction,
    table::{Routes, compiled},
};

/// Domains and their tables.
#[derive(Clone, Debug, Default)]
pub(super) struct Domains {
    domains: HashMap<EgressRoutes, RouteDomain>,
    tables: BTreeMap<u32, Routes>,
}

impl Domains {
    pub(super) fn new(snapshot: &RouteSnapshot) -> Self {
        let further = &snapshot.further;
        let is_of_host = |kind: RouteKind| matches!(kind, RouteKind::Local | RouteKind::Broadcast);
        // The kernel asks the table local first, whatever the rules say next.
        let local = snapshot
            .routes
            .iter()
            .filter(|route| is_of_host(route.kind));
        let local: Vec<_> = local.copied().collect();
        let tables = further.tables.iter().map(|(table, routes)| {
            let all = local.iter().chain(routes).copied().collect();
            (*table, compiled(all, snapshot))
        });
        let domains = further.domains.iter();
        Self {
            domains: domains.map(|it| (it.routes.clone(), it.clone())).collect(),
            tables: tables.collect(),
        }
    }

    /// Whether the way to routes is another one than before, for any domain.
    pub(super) fn differ_in_steps(&self, before: &Self) -> bool {
        self.domains != before.domains || !self.tables.keys().eq(before.tables.keys())
    }

    /// Returns each table as it is now and as it was before, of those that both have.
    pub(super) fn tables_of_both<'a>(
        &'a self,
        before: &'a Self,
    ) -> impl Iterator<Item = (&'a Routes, &'a Routes)> {
        let tables = self.tables.iter();
        tables.filter_map(|(number, now)| Some((now, before.tables.get(number)?)))
    }
}

impl RouteTable {
    /// Looks up the route to `addr` among those that a policy chooses; `None`: it chooses none, so
    /// they are those of the table `main`. `uplink`: only link by which the packets may leave, if
    /// the VM has one of its own. `source`: their source address, if they have one already.
    pub fn lookup_for(
        &self,
        egress: Option<&EgressRoutes>,
        addr: impl Into<IpAddr>,
        uplink: Option<IfIndex>,
        source: Option<IpAddr>,
    ) -> Route {
        let addr = addr.into();
        let Some(egress) = egress else {
            return self.lookup_from(addr, uplink.or(self.uplink()), source);
        };
        if let Some(route) = self.without_table(addr) {
            return route;
        }
        let domain = self.domains.domains.get(egress);
        let steps = domain.map(|domain| match addr {
            IpAddr::V4(_) => &domain.ipv4,
            IpAddr::V6(_) => &domain.ipv6,
        });
        let steps = steps.into_iter().flatten();
        let steps = steps.filter(|step| step.is_for(addr, source));
        for step in steps {
            let answer = match step.action {
                StepAction::Refuse(kind) => Some(Route::Refused(kind)),
                StepAction::Undecided { priority } => Some(Route::Undecided { priority }),
                StepAction::Main => {
                    let by = (uplink.or(self.uplink()), source);
                    self.answer(&self.routes, addr, by, step.suppressed_len)
                }
                StepAction::Table(number) => self.domains.tables.get(&number).and_then(|table| {
                    self.answer(table, addr, (uplink, source), step.suppressed_len)
                }),
            };
            if let Some(route) = answer {
                return route;
            }
        }
        Route::Unreachable
    }
}

impl RouteStep {
    fn is_for(&self, to: IpAddr, from: Option<IpAddr>) -> bool {
        let is_to = self.to.is_none_or(|net| net.contains(&to));
        let is_from = |net: &ipnet::IpNet| from.is_some_and(|from| net.contains(&from));
        let is_from = self.from.as_ref().is_none_or(is_from);
        (is_to && is_from) != self.is_inverted
    }
}

#[cfg(test)]
#[path = "domain_test.rs"]
mod tests;
