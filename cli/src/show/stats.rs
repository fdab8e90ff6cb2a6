//! `slipgate stats`: counters of each VM and in all, read from the pinned maps.
mod ipv6;
pub(crate) mod limits;
mod links;
mod machines;
mod rules;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::Path,
};

use serde::Serialize;
use serde_json::Value;
use slipgate_abi::{
    Counter, DropCounters, DropReason, IfIndex, Refusal, Slot, VmCounters, VmRow,
    activity::LastPackets, vm::VmFlags,
};
use slipgate_control::{attach::chain, maps::ReadOnlyMaps};
use slipgate_ipc::engine::{
    GuestTcpCounts, MappingCounts, NameCounts, RefusedSample, RelayedCounts,
};
use slipgate_model::{MacMismatch, Silence};

pub(crate) use self::rules::RefusedBy;
use self::{ipv6::GuestIpv6, limits::VmByteLimits, links::Links};
use super::{
    names, now_ns, open, print, served,
    table::{amount, span, table},
};
use crate::{args::StatsArgs, brokers};

/// Maximum number of readings if a flow ends during one.
const ATTEMPTS: usize = 5;

/// Output of `stats --json`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Stats {
    pub(crate) vms: Vec<VmStats>,
    /// Sum over all VMs, with traffic that belongs to no known VM.
    pub(crate) total: VmStats,
    /// Devices at which somebody else's program runs before slipgate's; absent while there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) displaced: Vec<String>,
}

/// A VM's counters. Packets and L3 bytes as if segmented.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct VmStats {
    pub(crate) vm: String,
    /// Translated in the kernel, live and ended flows.
    pub(crate) kernel: Kernel,
    /// Through the engine port.
    pub(crate) engine: Engine,
    /// Dropped packets by reason; reasons that did not happen are left out.
    pub(crate) drops: BTreeMap<&'static str, Packets>,
    /// Frames handed over that never came out at the engine.
    pub(crate) lost_after_redirect: u64,
    /// Packets that the TAP dropped after they were counted, by the device's counter; absent while
    /// there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tap_tx_dropped: Option<u64>,
    /// Limits of bytes, and what is left of budgets; absent without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) limits: Option<VmByteLimits>,
    /// Number of live flows.
    pub(crate) flows: u64,
    /// Time since the guest's last packet that counts as the VM's activity, ms; absent if there was
    /// none, and in the sum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_from_guest_ms: Option<u64>,
    /// The same of the last packet to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_to_guest_ms: Option<u64>,
    /// Flows that the engine relays, since it started; in none of the other counts of flows. Absent
    /// while there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) relayed: Option<RelayedCounts>,
    /// What the engine's own TCP toward the guest keeps, since it started: of flows of user mode, and
    /// of relayed ones. Absent while there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tcp: Option<GuestTcpCounts>,
    /// Flows admitted so far.
    pub(crate) admitted: u64,
    /// Flows ended so far.
    pub(crate) ended: u64,
    /// Refused flows by reason; reasons that did not happen are left out.
    pub(crate) refused: BTreeMap<&'static str, u64>,
    /// Flows that a rule refused, by rule, the most frequent first.
    pub(crate) refused_by: Vec<RefusedBy>,
    /// Flows that further rules refused: at most 16 rules are counted separately per VM.
    pub(crate) refused_by_others: u64,
    /// The last one of each kind, flows and DNS questions that were over a rate alike, since the
    /// engine began; absent when there is none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) refused_last: Vec<RefusedSample>,
    /// RST and ICMP errors sent for refused flows.
    pub(crate) refusals_answered: u64,
    /// Translated ports (address, port and protocol) in use by live flows.
    pub(crate) ports: u64,
    /// Endpoint-independent mappings; absent while there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mappings: Option<MappingCounts>,
    pub(crate) dns_queries: u64,
    pub(crate) dns_cache_hits: u64,
    pub(crate) dns_failures: u64,
    /// DNS refusals by name; absent while there were none and no address is open by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) names: Option<NameCounts>,
    pub(crate) dhcp_messages: u64,
    /// Answered by the engine and in the kernel.
    pub(crate) arp_answers: u64,
    /// Neighbour solicitations answered by the engine and in the kernel.
    pub(crate) ndp_answers: u64,
    /// Router advertisements sent to the guest.
    pub(crate) router_advertisements: u64,
    pub(crate) echo_answers: u64,
    /// IPv6 of the guest; absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ipv6: Option<GuestIpv6>,
    /// Records of ended flows that the flow log lost.
    pub(crate) records_lost: u64,
    /// Packets that `--pcap` or `capture` had no room for.
    pub(crate) pcap_lost: u64,
    /// Everything from and to it is dropped, until it is thawed; absent otherwise.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) frozen: bool,
    /// Whether packets for it are held until it is resumed; absent otherwise.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) asleep: bool,
    /// Frames that were dropped because they came from another MAC than the configured one; absent
    /// while there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mac_mismatch: Option<MacMismatch>,
    /// The machine's own counters, when `slipgate run` runs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vmm: Option<Value>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct Kernel {
    pub(crate) tx_packets: u64,
    pub(crate) tx_bytes: u64,
    pub(crate) rx_packets: u64,
    pub(crate) rx_bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct Engine {
    pub(crate) from_guest: Packets,
    pub(crate) to_guest: Packets,
    pub(crate) from_world: Packets,
    pub(crate) to_world: Packets,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct Packets {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
}

impl From<Counter> for Packets {
    fn from(c: Counter) -> Self {
        Self {
            packets: c.packets,
            bytes: c.bytes,
        }
    }
}

impl std::ops::AddAssign for Packets {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
    }
}

impl VmStats {
    /// Returns the remark behind the VM's name.
    fn pause(&self) -> &'static str {
        match (self.frozen, self.asleep) {
            (true, _) => " (frozen)",
            (false, true) => " (asleep)",
            (false, false) => "",
        }
    }

    pub(crate) fn new(
        vm: String,
        counters: &VmCounters,
        drops: &DropCounters,
        live: &[Slot],
    ) -> Self {
        let drops = DropReason::ALL.iter().filter_map(|&reason| {
            let count = Packets::from(drops.get(reason));
            (count.packets > 0).then_some((reason.name(), count))
        });
        let refused = Refusal::ALL.iter().filter_map(|&reason| {
            let count = counters.refused.get(reason);
            (count > 0).then_some((reason.name(), count))
        });
        let mut kernel = Kernel {
            tx_packets: counters.ended_tx.packets,
            tx_bytes: counters.ended_tx.bytes,
            rx_packets: counters.ended_rx.packets,
            rx_bytes: counters.ended_rx.bytes,
        };
        let mut ports = HashSet::new();
        for flow in live {
            kernel.tx_packets += flow.tx_packets;
            kernel.tx_bytes += flow.tx_bytes;
            kernel.rx_packets += flow.rx_packets;
            kernel.rx_bytes += flow.rx_bytes;
            ports.insert((flow.nat, flow.nat_port, flow.protocol));
        }
        Self {
            vm,
            kernel,
            engine: Engine {
                from_guest: counters.engine_rx_from_guest.into(),
                to_guest: counters.engine_tx_to_guest.into(),
                from_world: counters.engine_rx_from_world.into(),
                to_world: counters.engine_tx_to_world.into(),
            },
            drops: drops.collect(),
            lost_after_redirect: counters.lost_after_redirect,
            flows: live.len() as u64,
            admitted: counters.admitted,
            ended: counters.ended,
            refused: refused.collect(),
            refused_by_others: counters.refused_by_other_rules,
            refusals_answered: counters.refusals_answered,
            ports: ports.len() as u64,
            dns_queries: counters.dns_queries,
            dns_cache_hits: counters.dns_cache_hits,
            dns_failures: counters.dns_failures,
            dhcp_messages: counters.dhcp_messages,
            arp_answers: counters.arp_answers,
            ndp_answers: counters.ndp_answers,
            router_advertisements: counters.router_advertisements,
            echo_answers: counters.echo_answers,
            records_lost: counters.records_lost,
            pcap_lost: counters.pcap_lost,
            ..Self::default()
        }
    }

    fn add(&mut self, other: &Self) {
        self.kernel.tx_packets += other.kernel.tx_packets;
        self.kernel.tx_bytes += other.kernel.tx_bytes;
        self.kernel.rx_packets += other.kernel.rx_packets;
        self.kernel.rx_bytes += other.kernel.rx_bytes;
        self.engine.from_guest += other.engine.from_guest;
        self.engine.to_guest += other.engine.to_guest;
        self.engine.from_world += other.engine.from_world;
        self.engine.to_world += other.engine.to_world;
        for (&reason, &count) in &other.drops {
            *self.drops.entry(reason).or_default() += count;
        }
        for (&reason, &count) in &other.refused {
            *self.refused.entry(reason).or_default() += count;
        }
        rules::add(&mut self.refused_by, &other.refused_by);
        if let Some(relayed) = other.relayed {
            *self.relayed.get_or_insert_default() += relayed;
        }
        if let Some(dropped) = other.tap_tx_dropped {
            *self.tap_tx_dropped.get_or_insert(0) += dropped;
        }
        for (to, from) in [
            (&mut self.refused_by_others, other.refused_by_others),
            (&mut self.records_lost, other.records_lost),
            (&mut self.pcap_lost, other.pcap_lost),
            (&mut self.lost_after_redirect, other.lost_after_redirect),
            (&mut self.flows, other.flows),
            (&mut self.admitted, other.admitted),
            (&mut self.ended, other.ended),
            (&mut self.refusals_answered, other.refusals_answered),
            (&mut self.ports, other.ports),
            (&mut self.dns_queries, other.dns_queries),
            (&mut self.dns_cache_hits, other.dns_cache_hits),
            (&mut self.dns_failures, other.dns_failures),
            (&mut self.dhcp_messages, other.dhcp_messages),
            (&mut self.arp_answers, other.arp_answers),
            (&mut self.ndp_answers, other.ndp_answers),
            (&mut self.router_advertisements, other.router_advertisements),
            (&mut self.echo_answers, other.echo_answers),
        ] {
            *to += from;
        }
    }
}

impl Stats {
    /// Adds the data that only the engines have.
    pub(crate) fn add_known(&mut self, mut known: names::Known) {
        for vm in &mut self.vms {
            // Of a VM without anything by name there are counts of nothing.
            let names = known.vms.remove(&vm.vm);
            vm.names = names.filter(|names| *names != NameCounts::default());
            vm.refused_last = known.refused.remove(&vm.vm).unwrap_or_default();
            vm.relayed = known.relayed.remove(&vm.vm);
            vm.mappings = known.mappings.remove(&vm.vm);
            vm.tcp = known.tcp.remove(&vm.vm);
        }
        for mappings in self.vms.iter().filter_map(|vm| vm.mappings) {
            *self.total.mappings.get_or_insert_default() += mappings;
        }
        for tcp in self.vms.iter().filter_map(|vm| vm.tcp) {
            *self.total.tcp.get_or_insert_default() += tcp;
        }
        for relayed in self.vms.iter().filter_map(|vm| vm.relayed) {
            *self.total.relayed.get_or_insert_default() += relayed;
        }
    }
}

/// Runs the command `slipgate stats`.
pub(crate) fn run(args: &StatsArgs) -> anyhow::Result<()> {
    let maps = open(&args.pin_dir)?;
    served(&maps, args.vm.as_deref())?;
    print(args.watch, || {
        let which = Which::named(args.vm.as_deref());
        let mut stats = read(&maps, which);
        let mut machines = machines::ask_all(&args.pin_dir);
        stats.add_known(names::ask_all(&args.pin_dir));
        for vm in &mut stats.vms {
            vm.vmm = machines.remove(&vm.vm);
        }
        stats.displaced = displaced(&args.pin_dir)?;
        if args.json {
            Ok(serde_json::to_string_pretty(&stats)? + "\n")
        } else {
            Ok(text(&stats))
        }
    })
}

/// Describes where slipgate's programs are not the first.
fn displaced(pin_dir: &Path) -> anyhow::Result<Vec<String>> {
    let places = chain::examine(&brokers::paths(pin_dir)?)?;
    let displaced = places.iter().filter(|(.., place)| !place.is_first());
    Ok(displaced
        .map(|(device, _, place)| format!("{device}: slipgate's program {place}"))
        .collect())
}

/// One VM's counters, while its broker serves it; `None` when they can't be read.
pub(crate) fn of_vm(pin_dir: &Path, name: &str) -> Option<VmStats> {
    let maps = open(pin_dir).ok()?;
    read(&maps, Which::named(Some(name))).vms.pop()
}

/// Selection of the VMs to read, and of their counters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Which<'a> {
    /// The VM of this name only.
    name: Option<&'a str>,
    /// VMs of this process only: its rows of `OWNERS`.
    owners: Option<&'a [u32]>,
    /// Whether to read the losses of the devices, too, which needs files and sockets.
    links: bool,
}

impl<'a> Which<'a> {
    /// Selects the VM of this name, or all VMs.
    pub(crate) fn named(name: Option<&'a str>) -> Self {
        Self {
            name,
            owners: None,
            links: true,
        }
    }

    /// Selects all VMs, without the losses of the devices.
    pub(crate) fn without_links() -> Self {
        Self {
            links: false,
            ..Self::named(None)
        }
    }

    /// Selects the VMs of this process that the maps know.
    pub(crate) fn of_owners(rows: &'a [u32]) -> Self {
        Self {
            name: None,
            owners: Some(rows),
            links: false,
        }
    }
}

/// Reads the counters of the selected VMs.
pub(crate) fn read(maps: &ReadOnlyMaps, which: Which<'_>) -> Stats {
    let mut stats = read_once(maps, which);
    for _ in 1..ATTEMPTS {
        // A flow that ends goes from its slot to the row; a reading in between counts it twice
        // or not at all.
        let again = read_once(maps, which);
        let settled = again.total.ended == stats.total.ended;
        stats = again;
        if settled {
            break;
        }
    }
    stats
}

fn read_once(maps: &ReadOnlyMaps, which: Which<'_>) -> Stats {
    let mut live: HashMap<u32, Vec<Slot>> = HashMap::new();
    for (_, flow) in maps.flows() {
        live.entry(flow.vm).or_default().push(flow);
    }
    let of_row = |row| {
        (
            maps.counters(row).unwrap_or_default(),
            maps.drops(row).unwrap_or_default(),
        )
    };
    let links = which.links.then(Links::read);
    let now_ns = now_ns();
    let mut vms = Vec::new();
    for (row, vm) in maps.vms() {
        let name = ReadOnlyMaps::name(&vm);
        let other_name = which.name.is_some_and(|wanted| wanted != name);
        if other_name || which.owners.is_some_and(|rows| !rows.contains(&vm.owner)) {
            continue;
        }
        let (counters, drops) = of_row(row);
        let flows = live.get(&vm.id).map_or(&[][..], Vec::as_slice);
        let mut of_vm = VmStats::new(name, &counters, &drops, flows);
        let silence = Silence::of(
            last_packets(&counters, flows, now_ns),
            flows.len() as u64,
            now_ns,
        );
        of_vm.last_from_guest_ms = silence.last_from_guest_ms;
        of_vm.last_to_guest_ms = silence.last_to_guest_ms;
        of_vm.arp_answers += vm.arp_answered;
        if let Some(row) = maps.vm6(row) {
            of_vm.ndp_answers += row.neighbours_answered;
            of_vm.ipv6 = GuestIpv6::of(&row);
        }
        of_vm.refused_by = rules::of(&counters, |rule| maps.rule(rule));
        of_vm.frozen = vm.flags & VmFlags::FROZEN != 0;
        of_vm.asleep = vm.flags & VmFlags::ASLEEP != 0;
        of_vm.mac_mismatch = MacMismatch::of(&vm);
        of_vm.limits = VmByteLimits::read(maps, row);
        let dropped = links
            .as_ref()
            .map(|links| links.tx_dropped(IfIndex::new(vm.tap_ifindex)));
        of_vm.tap_tx_dropped = dropped.flatten();
        vms.push(of_vm);
    }
    // Row 0 is nobody's: what can't be attributed to a VM.
    let mut total = if which.name.is_none() {
        let (counters, drops) = of_row(VmRow::NOBODY);
        VmStats::new("(all)".into(), &counters, &drops, &[])
    } else {
        VmStats {
            vm: "(all)".into(),
            ..VmStats::default()
        }
    };
    for vm in &vms {
        total.add(vm);
    }
    Stats {
        vms,
        total,
        displaced: Vec::new(),
    }
}

/// Times of a VM's last packets that count as its activity, with those of its live flows.
fn last_packets(counters: &VmCounters, live: &[Slot], now_ns: u64) -> LastPackets {
    let noted = LastPackets {
        from_guest_ns: counters.last_from_guest_ns,
        to_guest_ns: counters.last_to_guest_ns,
    };
    let of = |flow| LastPackets::of(flow, now_ns);
    live.iter().map(of).fold(noted, LastPackets::max)
}

/// How long the VMs have been silent, by id: what [`read`] finds, without the rest.
pub(crate) fn silences(maps: &ReadOnlyMaps) -> BTreeMap<u32, Silence> {
    let now_ns = now_ns();
    let noted = |row| last_packets(&maps.counters(row).unwrap_or_default(), &[], now_ns);
    let mut all: BTreeMap<u32, (LastPackets, u64)> = maps
        .vms()
        .map(|(row, vm)| (vm.id, (noted(row), 0)))
        .collect();
    for (_, flow) in maps.flows() {
        if let Some((last, flows)) = all.get_mut(&flow.vm) {
            *last = last.max(LastPackets::of(&flow, now_ns));
            *flows += 1;
        }
    }
    all.into_iter()
        .map(|(id, (last, flows))| (id, Silence::of(last, flows, now_ns)))
        .collect()
}

/// Rows of a VM's DNS refusals.
fn by_name(vm: &str, names: &NameCounts) -> Vec<Vec<String>> {
    let counts = [
        ("addresses open by name".to_owned(), names.open),
        ("DNS refused: name".into(), names.refused_names),
        ("DNS refused: type".into(), names.refused_types),
        (
            "DNS refused: leads to a refused name".into(),
            names.refused_chains,
        ),
        ("DNS refused: protected address".into(), names.rebinding),
        ("DNS refused: no room".into(), names.full),
        ("DNS refused: resolver elsewhere".into(), names.elsewhere),
        ("DNS refused: rate".into(), names.over_rate),
        (
            "DNS refused: beyond the limit of new names".into(),
            names.new_names,
        ),
        (
            "DNS refused: beyond the limit of questions asked again".into(),
            names.asked_again,
        ),
    ];
    let inspected = names.inspected.each();
    let inspected = inspected.map(|(what, count)| (format!("inspected, and ended: {what}"), count));
    let by_rule = names.refused_by.iter().map(|by| {
        let what = format!("DNS refused by {}, last {}", by.rule, by.last);
        (what, by.questions)
    });
    let all = counts.into_iter().chain(inspected).chain(by_rule);
    all.filter(|(_, count)| *count > 0)
        .map(|(what, count)| vec![vm.to_owned(), what, count.to_string()])
        .collect()
}

/// Rows of a VM's relayed traffic.
fn by_relay(vm: &str, relayed: &RelayedCounts) -> [Vec<String>; 4] {
    let count = |what: &str, count: u64| vec![vm.to_owned(), what.to_owned(), count.to_string()];
    let packets = |what: &str, packets: u64, bytes: u64| {
        let bytes = amount(bytes);
        vec![vm.to_owned(), what.to_owned(), packets.to_string(), bytes]
    };
    [
        count("relayed flows that live", relayed.flows),
        count("relayed flows so far", relayed.begun),
        packets(
            "relayed from the guest",
            relayed.tx_packets,
            relayed.tx_bytes,
        ),
        packets("relayed to the guest", relayed.rx_packets, relayed.rx_bytes),
    ]
}

fn text(stats: &Stats) -> String {
    const HEAD: [&str; 14] = [
        "VM",
        "KERNEL-TX",
        "BYTES",
        "KERNEL-RX",
        "BYTES",
        "ENGINE-RX",
        "ENGINE-TX",
        "LOST",
        "FLOWS",
        "ADMITTED",
        "REFUSED",
        "PORTS",
        "LAST-TX",
        "LAST-RX",
    ];
    let all = || stats.vms.iter().chain([&stats.total]);
    let rows: Vec<Vec<String>> = all()
        .map(|s| {
            let e = &s.engine;
            vec![
                format!("{}{}", s.vm, s.pause()),
                amount(s.kernel.tx_packets),
                amount(s.kernel.tx_bytes),
                amount(s.kernel.rx_packets),
                amount(s.kernel.rx_bytes),
                amount(e.from_guest.packets + e.from_world.packets),
                amount(e.to_guest.packets + e.to_world.packets),
                amount(s.lost_after_redirect + s.tap_tx_dropped.unwrap_or(0)),
                s.flows.to_string(),
                s.admitted.to_string(),
                s.refused.values().sum::<u64>().to_string(),
                s.ports.to_string(),
                s.last_from_guest_ms.map_or_else(String::new, span),
                s.last_to_guest_ms.map_or_else(String::new, span),
            ]
        })
        .collect();
    let mut text = table(&HEAD, &rows, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]);
    let mut reasons = Vec::new();
    for s in all() {
        for (reason, count) in &s.drops {
            let (packets, bytes) = (count.packets.to_string(), amount(count.bytes));
            reasons.push(vec![s.vm.clone(), format!("drop {reason}"), packets, bytes]);
        }
        for (reason, count) in &s.refused {
            reasons.push(vec![
                s.vm.clone(),
                format!("refused {reason}"),
                count.to_string(),
            ]);
        }
        for by in &s.refused_by {
            let what = format!("refused by {}", by.text);
            reasons.push(vec![s.vm.clone(), what, by.flows.to_string()]);
        }
        for last in &s.refused_last {
            let (proto, guest, remote) = (&last.proto, last.guest, last.remote);
            let what = format!(
                "last {} ({proto} {guest} > {remote}, {} ago)",
                last.reason,
                span(last.last_ms_ago)
            );
            reasons.push(vec![s.vm.clone(), what, last.count.to_string()]);
        }
        if let Some(mappings) = &s.mappings {
            let count = |what: &str, count: u64| vec![s.vm.clone(), what.into(), count.to_string()];
            let all = mappings.udp + mappings.tcp;
            reasons.push(count("endpoint-independent mappings", all));
            reasons.push(count("open to others than peers", mappings.open));
        }
        for (what, value) in s.limits.iter().flat_map(VmByteLimits::rows) {
            reasons.push(vec![s.vm.clone(), what, value]);
        }
        let tcp = s.tcp.unwrap_or_default();
        let counts = [
            ("refused by further rules", s.refused_by_others),
            ("lost after redirect", s.lost_after_redirect),
            ("not taken by the TAP", s.tap_tx_dropped.unwrap_or(0)),
            ("flow records lost", s.records_lost),
            ("packets lost to --pcap or capture", s.pcap_lost),
            ("DNS questions", s.dns_queries),
            ("DNS from cache", s.dns_cache_hits),
            ("DNS failures", s.dns_failures),
            ("DHCP messages", s.dhcp_messages),
            ("ARP answers", s.arp_answers),
            ("NDP answers", s.ndp_answers),
            ("router advertisements", s.router_advertisements),
            ("pings answered", s.echo_answers),
            ("bytes kept of segments that came early", tcp.kept_bytes),
            ("segments not kept for want of room", tcp.not_kept),
            ("segments with urgent data", tcp.urgent),
        ];
        if let Some(names) = &s.names {
            reasons.extend(by_name(&s.vm, names));
        }
        if let Some(relayed) = &s.relayed {
            reasons.extend(by_relay(&s.vm, relayed));
        }
        for (what, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
            reasons.push(vec![s.vm.clone(), what.into(), count.to_string()]);
        }
    }
    if !reasons.is_empty() {
        text.push('\n');
        text.push_str(&table(&["VM", "WHAT", "COUNT", "BYTES"], &reasons, &[2, 3]));
    }
    for vm in &stats.vms {
        if let Some(mismatch) = &vm.mac_mismatch {
            text.push_str(&format!("\n{}: {mismatch}\n", vm.vm));
        }
    }
    for vm in &stats.vms {
        if let Some(ipv6) = &vm.ipv6 {
            text.push_str(&format!("\n{}: {}\n", vm.vm, ipv6.text()));
        }
    }
    for displaced in &stats.displaced {
        text.push_str(&format!("\n{displaced}\n"));
    }
    text.push_str(&machines::text(&stats.vms));
    text
}

#[cfg(test)]
#[path = "stats_test.rs"]
mod tests;
