//! The host's own NAT beside guests' flows: followed while slipgate serves.
//!
//! The start refuses to share guests' tuples with it ([`crate::host::check_tuples`]), and so do later requests
//! that would bring such sharing: a VM, a policy, a pool, an uplink, routes that a policy names, by the
//! devices that these lead to at that time. What the host does by itself afterwards can't be refused.
//! It is noticed and logged: rules of nftables by the kernel's notices, within [`SETTLES_IN`] or, if
//! looks are costly or frequent, [`APART`]; legacy iptables and the ports of the host's sockets at the
//! next regular look.
//!
//! While something is shared, ports of connections that the host's NAT has by then are left alone, as
//! those of its sockets are: guests' new flows do not take their tuples. The other way round nothing
//! keeps the host's NAT from the tuple of a guest's flow.
//!
//! What is shared is kept in sentences. Only a sentence that is new is logged, and only by one that is new
//! a request is refused: what is shared already, with the same chain at the same device, is shared by
//! others too.
//!
//! # What looks cost
//! A look reads the rules if they changed, 23 ms for 10,000 of them, and compares them with what all VMs
//! have. Changes of the host and of VMs are looked at together, [`SETTLES_IN`] after the first, and
//! looks keep apart. A request is judged by the rules that there are then, as long as looks for requests
//! take no more than a twentieth of the time, with [`AT_ONCE`] to spare. Beyond that it is judged by the
//! last look, and the next one logs what it brought. Before a request is refused, there is always a look.
use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd as _, BorrowedFd},
    time::{Duration, Instant},
};

use slipgate_abi::IfIndex;
use slipgate_control::host::{HostFacts, RuleWatch};
use slipgate_ipc::client::HostNatStatus;
use slipgate_policy::{
    AddressPool, EgressRoutes, Settings,
    document::{ConfigError, NAT_ADDRESSES, is_inline},
};

use super::{Attached, ServedVm, translated::TranslatedPorts};
use crate::{
    config::{HostNat, VmConfig},
    host::{self, GuestsAt},
};

/// Time from a notice to a look: a set of rules comes in several transactions.
const SETTLES_IN: Duration = Duration::from_millis(200);
/// Least time from a look to the next.
const APART: Duration = Duration::from_secs(1);
/// The same in times of what the look took, for a host with very many rules.
const APART_IN_LOOKS: u32 = 20;
/// Time that looks for requests may take at once.
const AT_ONCE: Duration = Duration::from_millis(250);
/// Most sentences in an answer to a client.
const MOST_TOLD: usize = 16;

/// The host's own NAT as last seen, and what it shares with guests.
#[derive(Debug)]
pub(crate) struct HostNatWatch {
    /// `None`: the kernel gives no notices. Rules are read at each regular look then.
    rules: Option<RuleWatch>,
    facts: HostFacts,
    /// Whether rules changed since they were read.
    is_stale: bool,
    /// Time of the next look, if anything changed.
    due: Option<Instant>,
    /// Before that time only a request has the rules read.
    not_before: Instant,
    /// What is shared and logged, in sentences.
    told: BTreeSet<String>,
    /// The same, as if all devices were named as uplinks: no request is refused for these.
    accepted: BTreeSet<String>,
    /// Whether something is shared since the ports of the host's connections were asked for.
    has_news: bool,
    /// Ports of connections that the host translates.
    translated: TranslatedPorts,
    /// What looks for requests may take.
    allowance: Allowance,
}

/// Time that looks for requests have taken, less a twentieth of the time since.
#[derive(Debug)]
struct Allowance {
    spent: Duration,
    at: Instant,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self {
            spent: Duration::ZERO,
            at: now,
        }
    }

    /// Whether there may be another look.
    fn allows(&mut self, now: Instant) -> bool {
        let regained = now.saturating_duration_since(self.at) / APART_IN_LOOKS;
        self.spent = self.spent.saturating_sub(regained);
        self.at = now;
        self.spent < AT_ONCE
    }
}

impl HostNatWatch {
    /// Begins to watch, and reads what there is.
    pub(crate) fn open() -> Self {
        // Before the rules are read: what changes meanwhile is noticed.
        let rules = RuleWatch::open();
        if let Err(e) = &rules {
            tracing::debug!("changes of the host's NAT are noticed late: {e}");
        }
        let facts = HostFacts::read_about_tuples();
        Self {
            rules: rules.ok(),
            is_stale: facts.source_nat.is_none(),
            facts,
            due: Some(Instant::now()),
            not_before: Instant::now(),
            told: BTreeSet::new(),
            accepted: BTreeSet::new(),
            has_news: false,
            translated: TranslatedPorts::default(),
            allowance: Allowance::new(Instant::now()),
        }
    }

    /// What was read about the host.
    pub(crate) fn facts(&self) -> &HostFacts {
        &self.facts
    }

    /// Notes what the start has logged.
    pub(crate) fn has_told(&mut self, met: BTreeSet<String>) {
        self.accepted.clone_from(&met);
        self.told = met;
    }

    /// Descriptors to poll for input.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let rules = self.rules.as_ref().map(|rules| rules.as_fd());
        rules.into_iter().chain(self.translated.fd())
    }

    /// Time of the next look, if one is due at all.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due.into_iter().chain(self.translated.due()).min()
    }

    /// Whether something changed since the last look.
    pub(crate) fn is_behind(&self) -> bool {
        self.is_stale || self.due.is_some()
    }

    /// Has a look taken soon: the host's rules or what guests have changed.
    pub(crate) fn look_soon(&mut self) {
        let soon = (Instant::now() + SETTLES_IN).max(self.not_before);
        self.due.get_or_insert(soon);
    }

    /// Takes the kernel's notices in.
    fn take_notices(&mut self) {
        let changed = match self.rules.as_ref().map(RuleWatch::take) {
            Some(Ok(changed)) => changed,
            // It is read anew at each regular look.
            Some(Err(e)) => {
                tracing::debug!("reading notices of the host's rules: {e}");
                self.rules = None;
                true
            }
            None => false,
        };
        if changed {
            self.is_stale = true;
            self.look_soon();
        }
    }

    /// Reads that of which there is no notice. A look is due if it is other than before, or if there are
    /// no notices at all.
    fn read_unnoticed(&mut self) {
        self.take_unnoticed(HostFacts::with_unnoticed_read);
    }

    fn take_unnoticed(&mut self, read: impl FnOnce(HostFacts) -> HostFacts) {
        let facts = std::mem::take(&mut self.facts);
        let before = (facts.source_nat.clone(), facts.local_ports);
        let reserved = facts.reserved_ports.clone();
        self.facts = read(facts);
        let now = (self.facts.source_nat.clone(), self.facts.local_ports);
        self.is_stale |= self.rules.is_none();
        if self.is_stale || before != now || reserved != self.facts.reserved_ports {
            self.look_soon();
        }
    }

    /// Reads the rules again if they changed.
    fn refresh(&mut self) {
        if !std::mem::take(&mut self.is_stale) {
            return;
        }
        let read = HostFacts::read_about_tuples();
        let known = self.facts.source_nat.take();
        // Rules that can't be read now are those of before, until the next regular look.
        self.is_stale = read.source_nat.is_none();
        self.facts = HostFacts {
            source_nat: read.source_nat.or(known),
            ..read
        };
    }

    /// Takes note of what is shared now. Returns what is new.
    fn now_shares(&mut self, met: BTreeSet<String>) -> Vec<String> {
        let new = met.difference(&self.told).cloned().collect();
        if met.is_empty() && !self.told.is_empty() {
            tracing::info!("the host's NAT and sockets keep clear of guests' tuples again");
        }
        self.told = met;
        new
    }
}

/// Returns the earliest time for the look after one from `begun` to `ended`.
fn next_look(begun: Instant, ended: Instant) -> Instant {
    let took = ended.saturating_duration_since(begun);
    ended + APART.max(took * APART_IN_LOOKS)
}

impl Attached {
    /// Takes in notices of changed rules.
    pub(crate) fn follow_host_nat(&mut self) {
        self.host_nat.take_notices();
    }

    /// Looks, if something changed, whether the host's NAT and sockets keep clear of guests' tuples,
    /// and logs where they do not any more. Returns whether the host's NAT has other ports among
    /// guests' than before, as far as they are read.
    pub(crate) fn look_at_host_nat(&mut self) -> bool {
        let is_due = |due: Option<Instant>| due.is_some_and(|due| due <= Instant::now());
        if is_due(self.host_nat.due) {
            self.see_host_nat();
        }
        let has_news = std::mem::take(&mut self.host_nat.has_news);
        if has_news || is_due(self.host_nat.translated.due()) {
            self.look_at_translated();
        }
        self.host_nat.translated.follow()
    }

    /// Returns IP protocol and port of what the host uses itself among guests' ports, sorted: ports of
    /// its sockets, and, where its NAT shares tuples with guests, of connections that it translates, as
    /// last read. `None`: it can't be read now.
    pub(crate) fn ports_in_use(&mut self) -> Option<Vec<(u8, u16)>> {
        let bound = host::bound(self.config.source_ports())?;
        let bound = bound.into_iter();
        let translated = self.host_nat.translated.taken().iter().copied();
        let all: BTreeSet<_> = bound.chain(translated).collect();
        Some(all.into_iter().collect())
    }

    /// Has the connections read that the host translates, where that matters, by a thread.
    pub(crate) fn look_at_translated(&mut self) {
        let watch = &mut self.host_nat;
        match watch.told.is_empty() {
            true => watch.translated.forget(),
            false => {
                let ranges: Vec<_> = self.config.source_ports().cloned().collect();
                watch.translated.ask(&ranges);
            }
        }
    }

    /// Reads the connections that the host translates, where that matters, before it returns: for the
    /// start, so that the first flow leaves their ports alone.
    pub(crate) fn read_translated(&mut self) {
        let watch = &mut self.host_nat;
        if !watch.told.is_empty() {
            let ranges: Vec<_> = self.config.source_ports().cloned().collect();
            watch.translated.read_now(&ranges);
        }
    }

    /// Looks at that of which there is no notice, and at all if there are none at all.
    pub(crate) fn look_at_unnoticed_nat(&mut self) {
        self.host_nat.read_unnoticed();
    }

    /// Looks now.
    pub(crate) fn see_host_nat(&mut self) {
        let begun = Instant::now();
        self.host_nat.take_notices();
        self.host_nat.refresh();
        self.host_nat.due = None;
        let (met, accepted) = self.shared_tuples();
        self.host_nat.accepted = accepted;
        let new = self.host_nat.now_shares(met);
        self.host_nat.has_news |= !new.is_empty();
        for new in new {
            tracing::warn!("{new}");
        }
        self.host_nat.not_before = next_look(begun, Instant::now());
    }

    /// Looks for a request whose answer depends on the rules, if they changed and looks may take the
    /// time. Otherwise the next look is due soon in any case.
    pub(crate) fn see_host_nat_for_request(&mut self) {
        self.host_nat.take_notices();
        let begun = Instant::now();
        if self.host_nat.is_stale && self.host_nat.allowance.allows(begun) {
            self.see_host_nat();
            self.host_nat.allowance.spent += begun.elapsed();
        }
    }

    /// Checks a request against what is known of the host's NAT, and, before it is refused, against what
    /// is so now, with that of which there is no notice.
    ///
    /// # Errors
    /// Those of the check.
    pub(crate) fn unless_shared(
        &mut self,
        check: impl Fn(&Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        match check(self) {
            Ok(()) => Ok(()),
            Err(refused) => {
                let begun = Instant::now();
                self.host_nat.take_notices();
                self.look_at_unnoticed_nat();
                if !self.host_nat.is_behind() {
                    return Err(refused);
                }
                self.see_host_nat();
                self.host_nat.allowance.spent += begun.elapsed();
                check(self)
            }
        }
    }

    /// What a client is told of the host's NAT.
    pub(crate) fn host_nat_status(&mut self) -> HostNatStatus {
        self.see_host_nat();
        let ports = self.config.source_ports();
        HostNatStatus {
            uplink: self.uplink.name.clone(),
            ports: ports.map(|ports| (*ports.start(), *ports.end())).collect(),
            is_known: self.host_nat.facts.source_nat.is_some(),
            shared: self.host_nat.told.iter().take(MOST_TOLD).cloned().collect(),
            further_uplinks: self.vm_uplinks.names().map(str::to_owned).collect(),
            left_alone: self.host_nat.translated.taken().len(),
        }
    }

    /// Checks that flows of a VM with this definition would share no tuple with the host's own NAT that
    /// nobody's flows share yet.
    ///
    /// # Errors
    /// They would, and `--host-nat share` does not accept it.
    pub(crate) fn check_shares_of_vm(&self, vm: &VmConfig) -> Result<(), ConfigError> {
        let settings = self.policies.loaded(&vm.policy);
        let settings = settings.map(|policy| &policy.settings);
        let guests = self.guests_of(vm, settings);
        if let Some(routes) = self.routes_of(vm) {
            let by_others = self.guests_but_for_nat_address(vm, settings);
            let by = ByRoutes::new(routes, self.uplink_named_by(vm));
            return self.check_shares_by_routes(by, &guests, &by_others);
        }
        let texts = vm.nat_addresses.texts().join(", ");
        let (key, value) = match (&vm.uplink, texts.is_empty()) {
            (_, false) => (NAT_ADDRESSES, &*texts),
            (Some(uplink), true) => ("uplink", &**uplink),
            (None, true) => ("--host-nat", "refuse"),
        };
        self.check_shares(key, value, [&guests])
    }

    /// Checks the same of the VMs that have a policy.
    ///
    /// # Errors
    /// As [`Self::check_shares_of_vm`].
    pub(crate) fn check_shares_of_policy(&self, settings: &Settings) -> Result<(), ConfigError> {
        let pool = &settings.nat_addresses;
        let uplink = settings.egress.uplink.as_deref();
        let routes = settings.egress.routes.as_ref();
        if routes.is_none() && pool.is_empty() && uplink.is_none() {
            return Ok(());
        }
        let has_ipv6 = self.config.translates_ipv6() || pool.has_family(true);
        let guests = GuestsAt::new(self.device_named(uplink), has_ipv6).with(pool);
        if let Some(routes) = routes {
            let of_all = self.with_nat_address(guests.clone());
            return self.check_shares_by_routes(ByRoutes::new(routes, uplink), &of_all, &guests);
        }
        let texts = pool.texts().join(", ");
        let (key, value) = match uplink {
            Some(uplink) if pool.is_empty() => ("egress.uplink", uplink),
            _ => (NAT_ADDRESSES, &*texts),
        };
        self.check_shares(key, value, [&guests])
    }

    /// Checks the same of guests that leave by routes which a policy names, at the devices that these lead
    /// to now. `of_all`, `by_others`: see [`Self::at_devices`].
    fn check_shares_by_routes(
        &self,
        by: ByRoutes<'_>,
        of_all: &GuestsAt,
        by_others: &GuestsAt,
    ) -> Result<(), ConfigError> {
        let devices = self.devices_by(by.routes);
        let guests = self.at_devices(by, &devices, of_all, by_others);
        let guests = Vec::from_iter(guests);
        let value = match by.routes {
            EgressRoutes::Table(number) => number.to_string(),
            EgressRoutes::Vrf(device) => device.clone(),
            EgressRoutes::Mark(mark) => format!("{mark:#x}"),
            EgressRoutes::Host { .. } => "host".to_owned(),
        };
        self.check_shares(by.key(), &value, &guests)
    }

    fn check_shares<'g>(
        &self,
        key: &'static str,
        value: &str,
        guests: impl IntoIterator<Item = &'g GuestsAt>,
    ) -> Result<(), ConfigError> {
        if self.config.host_nat == HostNat::Share {
            return Ok(());
        }
        let facts = &self.host_nat.facts;
        let met = host::shared(&self.config, facts, self.watch.network(), guests);
        let new: BTreeSet<String> = met.difference(&self.host_nat.accepted).cloned().collect();
        match new.is_empty() {
            true => Ok(()),
            false => Err(host::refused(key, value, &new)),
        }
    }

    /// Returns what guests share with the host's NAT and sockets, in sentences, and the same as if all
    /// devices were named as uplinks.
    fn shared_tuples(&self) -> (BTreeSet<String>, BTreeSet<String>) {
        let (facts, network) = (&self.host_nat.facts, self.watch.network());
        let all = host::of_all(&self.config, (&self.uplink.name, self.uplink.ifindex));
        let ports = self.config.source_ports();
        let mut met: BTreeSet<String> = ports
            .flat_map(|ports| facts.meets(&all.tuples(network, ports)))
            .collect();
        // Most hosts have no such rule, and then it does not matter which VMs there are.
        if facts.source_nat.iter().flatten().next().is_some() {
            let guests = self.all_guests();
            met.extend(host::shared(&self.config, facts, network, &guests));
            let by_routes = guests.iter().filter(|of| of.by_routes.is_some());
            let at_devices: BTreeSet<GuestsAt> = by_routes
                .map(|of| GuestsAt {
                    by_routes: None,
                    ..of.clone()
                })
                .collect();
            let mut accepted = met.clone();
            accepted.extend(host::shared(&self.config, facts, network, &at_devices));
            return (met, accepted);
        }
        (met.clone(), met)
    }

    /// Returns by which devices and with which addresses flows of the VMs leave.
    fn all_guests(&self) -> BTreeSet<GuestsAt> {
        let mut all: BTreeSet<GuestsAt> = BTreeSet::new();
        // Of each policy's routes once, however many VMs have it.
        let mut devices: BTreeMap<&EgressRoutes, BTreeSet<String>> = BTreeMap::new();
        for ServedVm { config: vm, .. } in self.vms.iter() {
            let settings = self.policies.loaded(&vm.policy);
            let settings = settings.map(|policy| &policy.settings);
            let guests = self.guests_of(vm, settings);
            if let Some(routes) = self.routes_of(vm) {
                let by_others = self.guests_but_for_nat_address(vm, settings);
                let devices = devices
                    .entry(routes)
                    .or_insert_with(|| self.devices_by(routes));
                let whose = whose_routes(routes, vm.policy.as_deref());
                let by = ByRoutes::new(routes, self.uplink_named_by(vm));
                let its = self.at_devices(by, devices, &guests, &by_others);
                all.extend(its.map(|at| GuestsAt {
                    by_routes: Some(whose.clone()),
                    ..at
                }));
            } else {
                all.insert(guests);
            }
        }
        all
    }

    /// Returns how guests leave at the devices that routes lead to. `of_all`: what they have if the routes of
    /// `main` lead them to the uplink of all; `by_others`: elsewhere, where `--nat-address` does not
    /// count and a flow has the address that the routes prefer, unless there is a pool.
    fn at_devices<'a>(
        &'a self,
        by: ByRoutes<'a>,
        devices: &'a BTreeSet<String>,
        of_all: &'a GuestsAt,
        by_others: &'a GuestsAt,
    ) -> impl Iterator<Item = GuestsAt> + 'a {
        let by_main = matches!(by.routes, EgressRoutes::Host { .. } | EgressRoutes::Mark(_));
        let leads = move |device: &&String| by.uplink.is_none_or(|uplink| uplink == **device);
        devices.iter().filter(leads).map(move |device| {
            let (uplink, ifindex) = self.device_named(Some(device));
            let is_of_all = ifindex == self.uplink.ifindex;
            let of = if by_main && is_of_all {
                of_all
            } else {
                by_others
            };
            GuestsAt {
                uplink: uplink.to_owned(),
                ifindex,
                ..of.clone()
            }
        })
    }

    /// Returns by which device and with which addresses flows of a VM leave, where no routes of its
    /// policy say otherwise.
    fn guests_of(&self, vm: &VmConfig, settings: Option<&Settings>) -> GuestsAt {
        let own = self.guests_but_for_nat_address(vm, settings);
        match self.uplink_named_by(vm) {
            Some(_) => own,
            None => self.with_nat_address(own),
        }
    }

    /// Gives guests that leave by the uplink of all `--nat-address`, unless they have a pool.
    fn with_nat_address(&self, guests: GuestsAt) -> GuestsAt {
        match self.config.nat_address {
            Some(address) if guests.ipv4.as_deref() == Some(&[]) => GuestsAt {
                ipv4: Some(vec![address.into()]),
                ..guests
            },
            _ => guests,
        }
    }

    /// The same without `--nat-address`.
    fn guests_but_for_nat_address(&self, vm: &VmConfig, settings: Option<&Settings>) -> GuestsAt {
        let none = AddressPool::default();
        let of_policy = settings.map_or(&none, |settings| &settings.nat_addresses);
        let pool = match vm.nat_addresses.is_empty() {
            true => of_policy,
            false => &vm.nat_addresses,
        };
        let guests = GuestsAt::new(
            self.device_named(self.uplink_named_by(vm)),
            self.config.translates_ipv6_of(vm),
        );
        guests.with(pool)
    }

    /// Returns the uplink of this name, or that of all.
    fn device_named<'a>(&'a self, name: Option<&'a str>) -> (&'a str, IfIndex) {
        let Some(name) = name else {
            return (&self.uplink.name, self.uplink.ifindex);
        };
        let link = self.watch.network().link_by_name(name);
        (name, link.map_or(IfIndex::NONE, |link| link.ifindex))
    }
}

/// Routes that a policy names, and the device by which alone flows leave, if one is named too.
#[derive(Clone, Copy)]
struct ByRoutes<'a> {
    routes: &'a EgressRoutes,
    uplink: Option<&'a str>,
}

impl<'a> ByRoutes<'a> {
    fn new(routes: &'a EgressRoutes, uplink: Option<&'a str>) -> Self {
        Self { routes, uplink }
    }

    /// Returns the key of a policy that names them.
    fn key(&self) -> &'static str {
        match self.routes {
            EgressRoutes::Table(_) | EgressRoutes::Vrf(_) => "egress.table",
            EgressRoutes::Mark(_) => "egress.mark",
            EgressRoutes::Host { .. } => "egress.routes",
        }
    }
}

/// Says whose routes lead to a device.
fn whose_routes(routes: &EgressRoutes, policy: Option<&str>) -> String {
    match policy.filter(|name| !is_inline(name)) {
        Some(name) => format!("by the routes of the policy {name}: {routes}"),
        None => format!("by the routes of the VMs' policy: {routes}"),
    }
}

#[cfg(test)]
#[path = "host_nat_test.rs"]
mod tests;
