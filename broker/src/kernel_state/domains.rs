//! Routes of VMs whose policies name a routing table, a VRF or a mark (`[egress]`).
//!
//! Tables, and with marks the rules of the host (`ip rule`), are followed as long as a policy in force
//! names them. The engine gets the routes with a list of tables for each name, which it asks in turn
//! as the kernel would. Flows leave by any device that these routes name, so the programs are attached
//! to all of them; a route by a device that they are not attached to refuses.
//!
//! A rule by what the engine does not look at (ports, users, types of service) leaves what comes behind
//! it undecided: the engine asks the kernel which table decides, and sends nothing by a guess. So all
//! tables are followed that such an answer may name.
use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::IpAddr,
};

use ipnet::IpNet;
use slipgate_abi::IfIndex;
use slipgate_control::netlink::{Followed, Link, Network, Route, Rule, RuleKind, Table};
use slipgate_ipc::engine::{FurtherRoutes, RouteDomain, RouteKind, RouteStep, StepAction};
use slipgate_model::route::{
    OUT_THERE, Query, Route as Found, RouteSnapshot, RouteTable,
    ask::{self, Answer, Ask},
    spread,
};
use slipgate_policy::{EgressRoutes, document::LoadedPolicy};

use super::{Attached, network_view};
use crate::config::VmConfig;

/// Tables of the kernel's that a domain does not have as its own.
const MAIN: u32 = 254;
const LOCAL: u32 = 255;

/// The routes that policies name, and the ways to them.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    named: BTreeSet<EgressRoutes>,
    /// Last logged complaint about each whose way leads nowhere.
    troubles: BTreeMap<EgressRoutes, String>,
}

impl Attached {
    /// Returns the routes that a VM's flows leave by; `None`: those of the table main.
    pub(super) fn routes_of(&self, vm: &VmConfig) -> Option<&EgressRoutes> {
        let policy = self.policies.loaded(&vm.policy)?;
        policy.settings.egress.routes.as_ref()
    }

    /// Follows the tables that policies in force name. To be called when these, the rules or the links
    /// may have changed, before the uplinks are attached to.
    ///
    /// # Errors
    /// The kernel does not tell. Routes that are named since lead nowhere then: the engine is not told of
    /// them.
    pub(crate) fn follow_domains(&mut self) -> anyhow::Result<()> {
        let named = self.named_routes();
        self.follow_routes(&named)?;
        self.domains.named = named;
        self.warn_of_domains();
        Ok(())
    }

    /// Follows the tables of policies that are to be put in force besides those that are, so that it is
    /// known where they lead. Returns whether there are any; [`Self::follow_domains`] forgets those that
    /// are not in force then.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub(crate) fn follow_domains_with(&mut self, put: &[LoadedPolicy]) -> anyhow::Result<bool> {
        let named = self.named_routes();
        let mut routes = named.clone();
        routes.extend(
            put.iter()
                .filter_map(|it| it.settings.egress.routes.clone()),
        );
        if routes == named {
            return Ok(false);
        }
        self.follow_routes(&routes)?;
        Ok(true)
    }

    /// Returns the routes that policies in force name.
    fn named_routes(&self) -> BTreeSet<EgressRoutes> {
        let policies = self.policies.all_loaded();
        let named = policies.filter_map(|policy| policy.settings.egress.routes.clone());
        named.collect()
    }

    fn follow_routes(&mut self, named: &BTreeSet<EgressRoutes>) -> anyhow::Result<()> {
        let network = self.watch.network();
        let tables = named.iter().filter_map(|routes| match routes {
            EgressRoutes::Table(number) => Some(*number),
            EgressRoutes::Vrf(device) => vrf_table(network, device),
            EgressRoutes::Mark(_) | EgressRoutes::Host { .. } => None,
        });
        let followed = Followed {
            tables: tables.collect(),
            rules: named.iter().any(|routes| routes.mark().is_some()),
        };
        Ok(self.watch.follow(followed)?)
    }

    /// Returns the names of the devices by which flows of these routes leave. None is a VM's TAP: a
    /// route by it refuses.
    pub(super) fn domain_devices(&self) -> BTreeSet<String> {
        self.devices_of(&self.domains.named)
    }

    /// Returns the same of these routes alone, which policies name.
    pub(super) fn devices_of(&self, routes: &BTreeSet<EgressRoutes>) -> BTreeSet<String> {
        let network = self.watch.network();
        let devices = self.routes_by(routes).filter(|route| is_unicast(route));
        let devices = devices.filter_map(|route| network.links.get(&route.oif?));
        let devices = devices.filter(|link| self.is_way_out(link));
        devices.map(|link| link.name.clone()).collect()
    }

    /// Returns the same, and the uplink of all VMs if routes of `main` by it may decide.
    pub(super) fn devices_by(&self, routes: &EgressRoutes) -> BTreeSet<String> {
        let mut devices = self.devices_of(&BTreeSet::from([routes.clone()]));
        let domain = domain(self.watch.network(), routes);
        let leads_there = |step: &RouteStep| {
            matches!(step.action, StepAction::Main | StepAction::Undecided { .. })
        };
        if domain.ipv4.iter().chain(&domain.ipv6).any(leads_there) {
            devices.insert(self.uplink.name.clone());
        }
        devices
    }

    /// Whether flows may leave by a device that routes name.
    fn is_way_out(&self, link: &Link) -> bool {
        let is_tap = || self.vms.on_tap(&link.name).is_some() || self.is_served(link.ifindex);
        !link.loopback && link.vrf_table.is_none() && !is_tap()
    }

    /// Whether packets of a VM with these routes leave for [`OUT_THERE`], by `uplink` if it is given.
    /// `from`: the address that they have before they are routed. A rule that is by more than
    /// addresses counts as if it led to each table in turn, because it does for some packets.
    pub(super) fn domain_leads_to_ipv6(
        &self,
        routes: &EgressRoutes,
        uplink: Option<IfIndex>,
        from: Option<IpAddr>,
    ) -> bool {
        let network = self.watch.network();
        let way = Query {
            uplink,
            from,
            ..Query::to(OUT_THERE)
        };
        let all = (self.uplink.ifindex, |link: &Link| self.is_way_out(link));
        leads(network, domain(network, routes), &way, all)
    }

    /// Whether a device is a VRF that a policy names.
    pub(super) fn is_named_vrf(&self, name: &str) -> bool {
        let is_it = |routes: &EgressRoutes| matches!(routes, EgressRoutes::Vrf(it) if it == name);
        self.domains.named.iter().any(is_it)
    }

    /// Returns the routes, for the engine. `attached`: devices by which packets may leave.
    pub(super) fn further_routes(&self, attached: &BTreeSet<IfIndex>) -> FurtherRoutes {
        let network = self.watch.network();
        let domains: Vec<RouteDomain> = self.domain_steps();
        let mut tables: BTreeMap<u32, Vec<_>> = BTreeMap::new();
        for number in tables_of(network, &domains) {
            tables.insert(number, Vec::new());
        }
        for (number, routes) in &mut tables {
            let its = network.routes.iter();
            let its = its.filter(|route| route.table == Table::Other(*number));
            routes.extend(network_view::routes(its));
            for route in routes {
                let is_by_none = !attached.contains(&route.ifindex);
                if route.kind == RouteKind::Unicast && is_by_none {
                    route.kind = RouteKind::Unreachable;
                }
            }
        }
        FurtherRoutes {
            domains,
            tables: tables.into_iter().collect(),
        }
    }

    fn domain_steps(&self) -> Vec<RouteDomain> {
        let network = self.watch.network();
        let named = self.domains.named.iter();
        named.map(|routes| domain(network, routes)).collect()
    }

    /// Returns the routes of the tables that these lead to.
    fn routes_by(&self, named: &BTreeSet<EgressRoutes>) -> impl Iterator<Item = &Route> {
        let network = self.watch.network();
        let domains: Vec<_> = named.iter().map(|routes| domain(network, routes)).collect();
        let tables = tables_of(network, &domains);
        let is_host = |routes: &EgressRoutes| matches!(routes, EgressRoutes::Host { .. });
        let has_main = named.iter().any(is_host);
        network
            .routes
            .iter()
            .filter(move |route| match route.table {
                Table::Main => has_main,
                Table::Local => false,
                Table::Other(number) => tables.contains(&number),
            })
    }

    /// Logs which of the routes lead nowhere, each once.
    fn warn_of_domains(&mut self) {
        let network = self.watch.network();
        let mut now = BTreeMap::new();
        for domain in self.domain_steps() {
            if let Some(trouble) = trouble_with(network, &domain) {
                now.insert(domain.routes, trouble);
            }
        }
        for (routes, trouble) in &now {
            if self.domains.troubles.get(routes) != Some(trouble) {
                tracing::warn!("egress by {routes}: {trouble}");
            }
        }
        self.domains.troubles = now;
    }
}

/// Returns the table of a VRF, by the name of its device.
pub(super) fn vrf_table(network: &Network, device: &str) -> Option<u32> {
    network.link_by_name(device)?.vrf_table
}

/// Whether a domain leads where a query asks. `of_all`: uplink of the VMs that have none of their own;
/// `is_way_out`: whether flows may leave by a device.
fn leads(
    network: &Network,
    domain: RouteDomain,
    query: &Query,
    (of_all, is_way_out): (IfIndex, impl Fn(&Link) -> bool),
) -> bool {
    // The other routes of a host may be many, and none of them decides.
    let covering = || network.routes.iter().filter(|route| route.covers(query.to));
    let devices = covering().filter_map(|route| network.links.get(&route.oif?));
    let devices = devices.filter(|link| is_way_out(link));
    let devices: BTreeSet<IfIndex> = devices.map(|link| link.ifindex).collect();
    let of_main = covering().filter(|route| !matches!(route.table, Table::Other(_)));
    let tables = tables_of(network, std::slice::from_ref(&domain));
    let of_table = |number: u32| {
        let its = covering().filter(|route| route.table == Table::Other(number));
        (number, network_view::routes(its).collect())
    };
    let routes = domain.routes.clone();
    let table = RouteTable::new(&RouteSnapshot {
        uplink_ifindex: Some(of_all),
        vm_uplinks: devices.into_iter().collect(),
        addresses: network_view::addresses(network).collect(),
        routes: network_view::routes(of_main).collect(),
        further: FurtherRoutes {
            domains: vec![domain],
            tables: tables.iter().copied().map(of_table).collect(),
        },
    });
    let by = |ask: &mut Ask<'_>| table.lookup_for(Some(&routes), query, &mut spread::first, ask);
    match by(&mut ask::nobody) {
        Found::Via { .. } => true,
        Found::Undecided { .. } => tables.into_iter().chain([MAIN]).any(|number| {
            let found = by(&mut || Some(Answer::Table(number)));
            matches!(found, Found::Via { .. })
        }),
        _ => false,
    }
}

fn is_unicast(route: &Route) -> bool {
    route.kind == slipgate_control::netlink::RouteKind::Unicast
}

/// Returns the tables besides `main` that domains have steps to, or that the kernel may name where
/// a step asks it.
fn tables_of(network: &Network, domains: &[RouteDomain]) -> BTreeSet<u32> {
    let mut tables = BTreeSet::new();
    for domain in domains {
        for (is_ipv6, steps) in [(false, &domain.ipv4), (true, &domain.ipv6)] {
            tables.extend(steps.iter().filter_map(|step| match step.action {
                StepAction::Table(number) => Some(number),
                _ => None,
            }));
            let asks = |step: &RouteStep| matches!(step.action, StepAction::Undecided { .. });
            let mark = domain.routes.mark().filter(|_| steps.iter().any(asks));
            let Some(mark) = mark else { continue };
            let is_asked = |rule: &&Rule| {
                let is_table = rule.action == RuleKind::ToTable;
                let is_own = [MAIN, LOCAL].contains(&rule.table);
                let may_be_for = is_for_mark(rule, mark) || rule.is_inverted;
                rule.is_ipv6 == is_ipv6 && is_table && !is_own && may_be_for
            };
            let asked = network.rules.iter().filter(is_asked);
            tables.extend(asked.map(|rule| rule.table));
        }
    }
    tables
}

/// Returns the way to the routes that a policy names.
fn domain(network: &Network, routes: &EgressRoutes) -> RouteDomain {
    let by_table = |table: Option<u32>| -> Vec<RouteStep> {
        let steps = table.map(|table| RouteStep::all(StepAction::Table(table)));
        steps.into_iter().collect()
    };
    let steps = |is_ipv6| match routes {
        EgressRoutes::Table(number) => by_table(Some(*number)),
        EgressRoutes::Vrf(device) => by_table(vrf_table(network, device)),
        EgressRoutes::Mark(mark) => {
            steps_of_mark(&network.rules, (*mark, StepAction::Main), is_ipv6)
        }
        EgressRoutes::Host { mark } => {
            steps_of_mark(&network.rules, (*mark, StepAction::AnyOfMain), is_ipv6)
        }
    };
    RouteDomain {
        routes: routes.clone(),
        ipv4: steps(false),
        ipv6: steps(true),
    }
}

/// Says why flows by these routes can't leave, or not as the policy means it.
fn trouble_with(network: &Network, domain: &RouteDomain) -> Option<String> {
    if let EgressRoutes::Vrf(device) = &domain.routes
        && vrf_table(network, device).is_none()
    {
        return Some(format!(
            "there is no VRF {device} now: flows are refused until there is"
        ));
    }
    let all = || domain.ipv4.iter().chain(&domain.ipv6);
    let has_main = |step: &RouteStep| step.action == StepAction::AnyOfMain;
    if matches!(domain.routes, EgressRoutes::Host { .. }) && all().any(has_main) {
        // They are those of everything that the host sends.
        return None;
    }
    let tables = tables_of(network, std::slice::from_ref(domain));
    if let EgressRoutes::Host { mark: 0 } = domain.routes {
        return tables.iter().all(|table| *table == DEFAULT).then(|| {
            "no rule of `ip rule` leads to a table with routes: flows are refused until one does"
                .to_owned()
        });
    }
    if tables.iter().all(|table| *table == DEFAULT) {
        return Some(
            "no rule of `ip rule` leads packets with this mark to a table of its own: flows leave as \
             those without a mark"
                .to_owned(),
        );
    }
    let has_route = |route: &Route| matches!(route.table, Table::Other(n) if tables.contains(&n));
    let is_empty = !network.routes.iter().any(has_route);
    is_empty.then(|| "there is no route now: flows are refused until there is".to_owned())
}

/// The table `default`, which is empty unless somebody fills it.
const DEFAULT: u32 = 253;

/// Returns the tables that the kernel asks for packets with a mark that the host itself makes, and that
/// are bound to no device. `main`: the step to the table `main`.
fn steps_of_mark(rules: &[Rule], (mark, main): (u32, StepAction), is_ipv6: bool) -> Vec<RouteStep> {
    let mut rules: Vec<&Rule> = rules.iter().filter(|it| it.is_ipv6 == is_ipv6).collect();
    if rules.is_empty() {
        return vec![RouteStep::all(main)];
    }
    rules.sort_by_key(|rule| rule.priority);
    let mut digest = DefaultHasher::new();
    rules.hash(&mut digest);
    let digest = digest.finish();
    let mut steps = Vec::new();
    let mut at = 0;
    while let Some(rule) = rules.get(at) {
        at += 1;
        let undecided = StepAction::Undecided {
            priority: rule.priority,
            rules: digest,
        };
        let (has_addresses, mut step) = match is_for_mark(rule, mark) {
            // All of it or none of it holds, as the rule says.
            false if !rule.is_inverted => continue,
            false => (
                false,
                RouteStep {
                    suppressed_len: rule.suppressed_len,
                    ..RouteStep::all(undecided)
                },
            ),
            // `not`, by addresses and more: it is for all that the addresses do not match, and some others.
            true if rule.is_by_more() && rule.is_inverted => (false, RouteStep::all(undecided)),
            true => (rule.from.is_some() || rule.to.is_some(), by_addresses(rule)),
        };
        if step.is_inverted && !has_addresses {
            // It is for all but all.
            continue;
        }
        let is_undecided = rule.is_by_more() && is_for_mark(rule, mark);
        step.action = match rule.action {
            _ if is_undecided => undecided,
            RuleKind::ToTable if rule.table == MAIN => main,
            // The engine asks it first.
            RuleKind::ToTable if rule.table == LOCAL => continue,
            RuleKind::ToTable => StepAction::Table(rule.table),
            RuleKind::Refuse(kind) => StepAction::Refuse(match kind {
                slipgate_control::netlink::RouteKind::Blackhole => RouteKind::Blackhole,
                _ => RouteKind::Unreachable,
            }),
            RuleKind::Nothing => continue,
            RuleKind::Goto(priority) if !has_addresses => {
                let behind = rules[at..].iter().position(|it| it.priority == priority);
                at = behind.map_or(at, |behind| at + behind);
                continue;
            }
            RuleKind::Goto(_) | RuleKind::Unknown => undecided,
        };
        // What comes behind one that refuses all is for nobody.
        let ends = !has_addresses && matches!(step.action, StepAction::Refuse(_));
        steps.push(step);
        if ends {
            break;
        }
    }
    steps
}

/// Whether a rule may be for packets with a mark, as far as anything but addresses decides.
fn is_for_mark(rule: &Rule, mark: u32) -> bool {
    let is_hosts = rule.iif.as_deref().is_none_or(|iif| iif == "lo");
    // Packets are of no VRF, and bound to no device.
    let is_free = rule.oif.is_none() && !rule.is_of_vrfs;
    (rule.mark ^ mark) & rule.mask == 0 && is_hosts && is_free
}

/// Returns a step that is for the packets that a rule is for, by their addresses.
fn by_addresses(rule: &Rule) -> RouteStep {
    let net = |(address, len)| IpNet::new(address, len).ok();
    RouteStep {
        from: rule.from.and_then(net),
        to: rule.to.and_then(net),
        is_inverted: rule.is_inverted,
        suppressed_len: rule.suppressed_len,
        action: StepAction::Main,
    }
}

#[cfg(test)]
#[path = "domains_test.rs"]
mod tests;
