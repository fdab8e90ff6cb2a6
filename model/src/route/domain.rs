//! Look-ups for VMs whose policies choose other routes than those of the table `main`: a table, a
//! VRF, or what the host's rules say about a mark.
//!
//! # Theory of operation
//! The broker turns what a policy names into steps ([`RouteDomain`]): one table, or the rules of the
//! host that concern packets with the mark, in their order. A look-up takes the steps in turn, as the
//! kernel does (`fib_rules_lookup`), and the first table that has a route decides. A table without
//! one, or with a route of the type `throw`, passes the look-up on; one that refuses ends it.
//!
//! Where a rule depends on what is not looked at, the kernel is asked which table decides
//! ([`Ask`]). What is not known leads nowhere: a domain of which the broker has not told, a table that
//! does not exist, a rule about which the kernel could not be asked. No packet of such a VM leaves by the
//! routes of the table `main` instead.
use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use slipgate_abi::IfIndex;
use slipgate_policy::EgressRoutes;

use super::{
    Choose, Route, RouteDomain, RouteKind, RouteSnapshot, RouteStep, RouteTable, StepAction,
    ask::{Answer, Ask},
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

/// What a route is looked up for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Query {
    /// Destination.
    pub to: IpAddr,
    /// Only link by which the packets may leave, if the VM has one of its own.
    pub uplink: Option<IfIndex>,
    /// Source address of the packets, if they have one already.
    pub source: Option<IpAddr>,
    /// Address that rules take for the source, where it is not `source`.
    pub from: Option<IpAddr>,
}

impl Query {
    /// Creates a query about packets to an address that have no source yet.
    pub fn to(to: impl Into<IpAddr>) -> Self {
        Self {
            to: to.into(),
            uplink: None,
            source: None,
            from: None,
        }
    }

    /// Returns the source address that rules compare.
    pub fn rule_source(&self) -> Option<IpAddr> {
        self.source.or(self.from)
    }
}

/// Numbers of the kernel's own tables, `RT_TABLE_*` of `linux/rtnetlink.h`.
const MAIN: u32 = 254;
const LOCAL: u32 = 255;

impl RouteTable {
    /// Looks up a route among those that a policy chooses; `None`: it chooses none, so they are
    /// those of the table main. `choose`: one of several next hops. `ask`: the kernel, where a rule is
    /// by what is not looked at.
    pub fn lookup_for(
        &self,
        egress: Option<&EgressRoutes>,
        query: &Query,
        choose: &mut Choose<'_>,
        ask: &mut Ask<'_>,
    ) -> Route {
        let (addr, uplink) = (query.to, query.uplink);
        let Some(egress) = egress else {
            return self.lookup_from(addr, uplink.or(self.uplink()), query.source, choose);
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
        let steps = steps.filter(|step| step.is_for(addr, query.rule_source()));
        for step in steps {
            let suppressed_len = step.suppressed_len;
            let answer = match step.action {
                StepAction::Refuse(kind) => Some(Route::Refused(kind)),
                StepAction::Main => self.of_main(false, query, suppressed_len, choose),
                StepAction::AnyOfMain => self.of_main(true, query, suppressed_len, choose),
                StepAction::Table(number) => self.of_table(number, query, suppressed_len, choose),
                StepAction::Undecided { priority, .. } => {
                    let by_any = matches!(egress, EgressRoutes::Host { .. });
                    let answer =
                        ask().and_then(|answer| self.as_told(answer, by_any, query, choose));
                    Some(answer.unwrap_or(Route::Undecided { priority }))
                }
            };
            if let Some(route) = answer {
                return route;
            }
        }
        Route::Unreachable
    }

    /// Returns the route that the kernel's answer gives; `None`: there is no copy of the table that
    /// it names.
    fn as_told(
        &self,
        answer: Answer,
        by_any: bool,
        query: &Query,
        choose: &mut Choose<'_>,
    ) -> Option<Route> {
        let route = match answer {
            Answer::Refused(kind) => Some(Route::Refused(kind)),
            Answer::NoRoute => None,
            Answer::Table(LOCAL) => Some(Route::HostLocal),
            Answer::Table(MAIN) => self.of_main(by_any, query, None, choose),
            Answer::Table(number) => {
                self.domains.tables.get(&number)?;
                self.of_table(number, query, None, choose)
            }
        };
        Some(route.unwrap_or(Route::Unreachable))
    }

    /// Looks up a route in a table besides `main`; `None`: it has none.
    fn of_table(
        &self,
        number: u32,
        query: &Query,
        suppressed_len: Option<u8>,
        choose: &mut Choose<'_>,
    ) -> Option<Route> {
        let table = self.domains.tables.get(&number)?;
        let by = (query.uplink, query.source);
        self.answer(table, query.to, by, suppressed_len, choose)
    }

    /// Looks up a route in the table `main`; `None`: it has none. `by_any`: by any link to which the
    /// programs are attached, and not by the uplink of all VMs only.
    fn of_main(
        &self,
        by_any: bool,
        query: &Query,
        suppressed_len: Option<u8>,
        choose: &mut Choose<'_>,
    ) -> Option<Route> {
        let of_all = self.uplink().filter(|_| !by_any);
        let by = (query.uplink.or(of_all), query.source);
        let route = self.answer(&self.routes, query.to, by, suppressed_len, choose)?;
        Some(match route {
            Route::Via { ifindex, .. } if !self.is_uplink(ifindex) => {
                Route::OtherUplink { ifindex }
            }
            route => route,
        })
    }

    /// Whether the programs are attached to a link, so that flows may leave by it.
    fn is_uplink(&self, link: IfIndex) -> bool {
        self.uplink() == Some(link) || self.vm_uplinks.binary_search(&link).is_ok()
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
