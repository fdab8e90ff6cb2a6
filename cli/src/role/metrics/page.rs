//! The page: the figures of `slipgate stats`, as metrics.
//!
//! Labels are bounded: VMs are (`--max-vms`), reasons, protocols and directions are sets of the
//! program's own; rules are named while there are at most [`MOST_RULES`], the others together.
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};
use slipgate_control::{Sizes, maps::ReadOnlyMaps};
use slipgate_ipc::engine::NameCounts;
use slipgate_model::Labels;

use crate::show::{
    names::Known,
    stats::{self, VmStats, Which, limits::ByteLimits},
};

/// Largest number of rules with a label of their own.
const MOST_RULES: usize = 64;

/// Selection of the figures on a page.
pub(in crate::role) struct Shown {
    /// Rows in `OWNERS` of the VMs.
    pub(in crate::role) owner_rows: Vec<u32>,
    /// Keys of their labels.
    pub(in crate::role) label_keys: Vec<String>,
}

/// Labels of VMs, by the VM's name, as pairs of Prometheus' label and value.
type ShownLabels = BTreeMap<String, Vec<(String, String)>>;

/// Takes the labels that are shown, and gives them names that Prometheus takes: `label_` and the
/// key, in which each other character is `_`.
fn shown_labels(all: &BTreeMap<String, Labels>, keys: &[String]) -> ShownLabels {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let shown = |labels: &Labels| {
        let given = keys.iter().filter_map(|key| Some((key, labels.get(key)?)));
        // Two keys may have one name.
        let named: BTreeMap<String, String> = given
            .map(|(key, value)| {
                let key: String = key.chars().map(plain).collect();
                (format!("label_{key}"), value.clone())
            })
            .collect();
        named.into_iter().collect()
    };
    let all = all.iter().map(|(vm, labels)| (vm.clone(), shown(labels)));
    all.collect()
}

/// Returns the page's text.
pub(in crate::role) fn make(maps: &ReadOnlyMaps, shown: &Shown, known: &Known) -> String {
    let mut stats = stats::read(maps, Which::of_owners(&shown.owner_rows));
    for vm in &mut stats.vms {
        vm.relayed = known.relayed.get(&vm.vm).copied();
        vm.mappings = known.mappings.get(&vm.vm).copied();
        vm.tcp = known.tcp.get(&vm.vm).copied();
    }
    let mut flows = BTreeMap::new();
    let ids: HashMap<u32, String> = maps
        .vms()
        .filter(|(_, vm)| shown.owner_rows.contains(&vm.owner))
        .map(|(_, vm)| (vm.id, ReadOnlyMaps::name(&vm)))
        .collect();
    for name in ids.values() {
        for protocol in ["icmp", "tcp", "udp"] {
            flows.insert((name.clone(), protocol), 0);
        }
    }
    for (_, flow) in maps.flows() {
        if let Some(vm) = ids.get(&flow.vm) {
            *flows.entry((vm.clone(), flow.protocol.name())).or_default() += 1;
        }
    }
    let of_vms: u64 = stats.vms.iter().map(|vm| vm.records_lost).sum();
    let page = Page {
        records_lost_of_none: stats.total.records_lost.saturating_sub(of_vms),
        vms: stats.vms,
        made_s: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        flows,
        names: known.vms.clone(),
        labels: shown_labels(&known.labels, &shown.label_keys),
        room: Room {
            sizes: maps.sizes(),
            vms: maps.vms().count() as u64,
            rules: maps.rules_held() as u64,
        },
    };
    page.text()
}

/// Contents of a page.
#[derive(Debug)]
struct Page {
    vms: Vec<VmStats>,
    /// Time at which it was made, seconds since 1970.
    made_s: u64,
    /// Live flows, by VM and protocol.
    flows: BTreeMap<(String, &'static str), u64>,
    /// Lost lines of the flow log that belong to no single VM.
    records_lost_of_none: u64,
    /// DNS counts of each VM, by its name.
    names: BTreeMap<String, NameCounts>,
    /// Labels of the VMs.
    labels: ShownLabels,
    room: Room,
}

/// How full the maps are, all processes of the network namespace together.
#[derive(Clone, Copy, Debug)]
struct Room {
    sizes: Sizes,
    vms: u64,
    /// Elements of `RULES` that hold a rule, in force or not.
    rules: u64,
}

type Pairs<'a, const N: usize> = [(&'static str, &'a str); N];

impl Page {
    fn text(self) -> String {
        let mut registry = Registry::with_prefix("slipgate");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // Writing to a string can't fail.
        let _ = text::encode(&mut text, &registry);
        text
    }

    /// A counter that each VM has one of.
    fn per_vm(
        &self,
        to: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        of: impl Fn(&VmStats) -> u64,
    ) -> fmt::Result {
        let rows = self.vms.iter().map(|vm| ([("vm", vm.vm.as_str())], of(vm)));
        counters(to, name, help, rows)
    }
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let to = &mut encoder;
        gauges(
            to,
            "build_info",
            "The version, as a label",
            [([("version", env!("CARGO_PKG_VERSION"))], 1)],
        )?;
        self.infos(to)?;
        self.room(to)?;
        counters(
            to,
            "packets",
            "Packets translated, as if segmented; tx is from the guest",
            self.directions(|vm| [vm.kernel.tx_packets, vm.kernel.rx_packets]),
        )?;
        counters(
            to,
            "bytes",
            "L3 bytes translated",
            self.directions(|vm| [vm.kernel.tx_bytes, vm.kernel.rx_bytes]),
        )?;
        let engine = |of: fn(&stats::Packets) -> u64| {
            self.vms.iter().flat_map(move |vm| {
                let e = &vm.engine;
                [
                    ("from_guest", &e.from_guest),
                    ("to_guest", &e.to_guest),
                    ("from_world", &e.from_world),
                    ("to_world", &e.to_world),
                ]
                .map(|(way, counted)| {
                    let labels = [("vm", vm.vm.as_str()), ("direction", way)];
                    (labels, of(counted))
                })
            })
        };
        counters(
            to,
            "engine_packets",
            "Packets over the engine port",
            engine(|p| p.packets),
        )?;
        counters(
            to,
            "engine_bytes",
            "L3 bytes over the engine port",
            engine(|p| p.bytes),
        )?;
        let drops = |of: fn(&stats::Packets) -> u64| {
            self.vms.iter().flat_map(move |vm| {
                vm.drops.iter().map(move |(reason, counted)| {
                    let labels = [("vm", vm.vm.as_str()), ("reason", *reason)];
                    (labels, of(counted))
                })
            })
        };
        counters(
            to,
            "dropped_packets",
            "Packets dropped",
            drops(|p| p.packets),
        )?;
        counters(to, "dropped_bytes", "L3 bytes dropped", drops(|p| p.bytes))?;
        self.per_vm(
            to,
            "lost_after_redirect",
            "Frames that were lost on the way to the engine",
            |vm| vm.lost_after_redirect,
        )?;
        self.budgets(to)?;
        self.flows(to)?;
        self.relayed(to)?;
        self.guest_tcp(to)?;
        self.dns(to)?;
        self.per_vm(to, "dhcp_messages", "DHCP messages", |vm| vm.dhcp_messages)?;
        self.per_vm(to, "arp_answers", "ARP requests answered", |vm| {
            vm.arp_answers
        })?;
        let about = "Neighbour solicitations answered";
        self.per_vm(to, "ndp_answers", about, |vm| vm.ndp_answers)?;
        let about = "Router advertisements sent to the guest";
        self.per_vm(to, "router_advertisements", about, |vm| {
            vm.router_advertisements
        })?;
        self.per_vm(to, "echo_answers", "Pings of the gateway answered", |vm| {
            vm.echo_answers
        })
    }
}

impl Page {
    /// Writes use and capacity of VMs, rules and flows.
    fn room(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Room { sizes, vms, rules } = self.room;
        let most = [
            ([("of", "vms")], u64::from(sizes.vms)),
            ([("of", "rules")], u64::from(sizes.rules)),
            ([("of", "flows")], u64::from(sizes.slots)),
        ];
        gauges(
            to,
            "limit",
            "What there can be in the network namespace",
            most,
        )?;
        let used = [([("of", "vms")], vms), ([("of", "rules")], rules)];
        gauges(
            to,
            "limit_used",
            "What there is of it; of rules the places that hold one, in force or not",
            used,
        )
    }

    /// Budgets of bytes, and what is left of them.
    fn budgets(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let of = |value: fn(&ByteLimits) -> Option<u64>| {
            let vms = self.vms.iter();
            vms.flat_map(move |vm| {
                let limits = vm.limits.unwrap_or_default();
                let both = [("tx", limits.tx), ("rx", limits.rx)];
                both.into_iter().filter_map(move |(direction, limits)| {
                    let labels = [("vm", vm.vm.as_str()), ("direction", direction)];
                    Some((labels, value(&limits)?))
                })
            })
        };
        gauges(
            to,
            "budget_bytes",
            "L3 bytes that a VM may move, in all or in a day",
            of(|it| it.budget),
        )?;
        gauges(
            to,
            "budget_left_bytes",
            "L3 bytes that are left of them",
            of(|it| it.left),
        )
    }

    /// Labels of the VMs, as labels.
    fn infos(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = "A VM's own labels, those of --metrics-label";
        let mut family = to.encode_descriptor("vm_info", about, None, MetricType::Gauge)?;
        for vm in &self.vms {
            let Some(labels) = self.labels.get(&vm.vm).filter(|labels| !labels.is_empty()) else {
                continue;
            };
            let of_vm = labels
                .iter()
                .map(|(key, value)| (key.as_str(), value.as_str()));
            let all: Vec<_> = [("vm", vm.vm.as_str())].into_iter().chain(of_vm).collect();
            ConstGauge::new(1i64).encode(family.encode_family(&all)?)?;
        }
        Ok(())
    }

    fn flows(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let flows = self.flows.iter().map(|((vm, protocol), flows)| {
            let labels = [("vm", vm.as_str()), ("protocol", *protocol)];
            (labels, *flows)
        });
        gauges(to, "flows", "Live flows", flows)?;
        let last = self.vms.iter().flat_map(|vm| {
            let both = [("tx", vm.last_from_guest_ms), ("rx", vm.last_to_guest_ms)];
            both.into_iter().filter_map(move |(direction, age_ms)| {
                let labels = [("vm", vm.vm.as_str()), ("direction", direction)];
                Some((labels, self.made_s.checked_sub(age_ms? / 1_000)?))
            })
        });
        gauges(
            to,
            "last_packet_timestamp_seconds",
            "Time of the last packet that counts as a VM's activity, since 1970; tx is from the guest",
            last,
        )?;
        self.per_vm(to, "flows_admitted", "Flows admitted", |vm| vm.admitted)?;
        self.per_vm(to, "flows_ended", "Flows ended", |vm| vm.ended)?;
        let refused = self.vms.iter().flat_map(|vm| {
            vm.refused.iter().map(|(reason, flows)| {
                let labels = [("vm", vm.vm.as_str()), ("reason", *reason)];
                (labels, *flows)
            })
        });
        counters(to, "flows_refused", "New flows refused, by reason", refused)?;
        let (by_rule, others) = self.refused_by_rule();
        let named = by_rule
            .iter()
            .map(|(rule, flows)| ([("rule", *rule)], *flows));
        let others = std::iter::once(([("rule", "(others)")], others));
        counters(
            to,
            "flows_refused_by_rule",
            "New flows that rules refused, of all VMs",
            named.chain(others),
        )?;
        self.per_vm(
            to,
            "refusals_answered",
            "RST and ICMP errors sent to the guest for refused packets",
            |vm| vm.refusals_answered,
        )?;
        let ports = self
            .vms
            .iter()
            .map(|vm| ([("vm", vm.vm.as_str())], vm.ports));
        gauges(to, "nat_ports", "Translated ports in use", ports)?;
        let mapped = self.vms.iter().flat_map(|vm| {
            let counts = vm.mappings.unwrap_or_default();
            let labels = |protocol| [("vm", vm.vm.as_str()), ("protocol", protocol)];
            [(labels("tcp"), counts.tcp), (labels("udp"), counts.udp)]
        });
        gauges(
            to,
            "eim_mappings",
            "Endpoint-independent mappings, those included whose port rests",
            mapped,
        )
    }

    /// Appends the values from the guest and to the guest, for each VM.
    fn directions<'a>(
        &'a self,
        of: impl Fn(&VmStats) -> [u64; 2] + 'a,
    ) -> impl Iterator<Item = ([(&'static str, &'a str); 2], u64)> + 'a {
        self.vms.iter().flat_map(move |vm| {
            let [tx, rx] = of(vm);
            let labels = |direction| [("vm", vm.vm.as_str()), ("direction", direction)];
            [(labels("tx"), tx), (labels("rx"), rx)]
        })
    }

    fn relayed(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let of = |vm: &VmStats| vm.relayed.unwrap_or_default();
        let live = self
            .vms
            .iter()
            .map(|vm| ([("vm", vm.vm.as_str())], of(vm).flows));
        gauges(to, "relayed_flows", "Live relayed flows", live)?;
        self.per_vm(
            to,
            "relayed_flows_begun",
            "Relayed flows, since the engine began",
            |vm| of(vm).begun,
        )?;
        counters(
            to,
            "relayed_packets",
            "Packets of relayed flows, since the engine began",
            self.directions(|vm| [of(vm).tx_packets, of(vm).rx_packets]),
        )?;
        counters(
            to,
            "relayed_bytes",
            "L3 bytes of relayed flows, since the engine began",
            self.directions(|vm| [of(vm).tx_bytes, of(vm).rx_bytes]),
        )
    }

    fn guest_tcp(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let of = |vm: &VmStats| vm.tcp.unwrap_or_default();
        let kept = self
            .vms
            .iter()
            .map(|vm| ([("vm", vm.vm.as_str())], of(vm).kept_bytes));
        gauges(
            to,
            "tcp_kept_bytes",
            "Bytes kept of the guest's segments that came early or met a full socket",
            kept,
        )?;
        self.per_vm(
            to,
            "tcp_not_kept",
            "Segments of the guest that were not kept for want of room, since the engine began",
            |vm| of(vm).not_kept,
        )?;
        self.per_vm(
            to,
            "tcp_urgent",
            "Segments of the guest with urgent data, since the engine began",
            |vm| of(vm).urgent,
        )
    }

    /// The first rules by their text, and all others together.
    fn refused_by_rule(&self) -> (BTreeMap<&str, u64>, u64) {
        let mut rules: Vec<_> = self.vms.iter().flat_map(|vm| &vm.refused_by).collect();
        // The first of the policy, so that the choice does not change with traffic.
        rules.sort_by_key(|by| by.rule);
        let mut seen = HashSet::new();
        let mut named: BTreeMap<&str, u64> = BTreeMap::new();
        let mut others = self.vms.iter().map(|vm| vm.refused_by_others).sum();
        for by in rules {
            if seen.contains(by.text.as_str()) || seen.len() < MOST_RULES {
                seen.insert(by.text.as_str());
                *named.entry(&by.text).or_default() += by.flows;
            } else {
                others += by.flows;
            }
        }
        (named, others)
    }

    fn dns(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        self.per_vm(to, "dns_questions", "DNS questions", |vm| vm.dns_queries)?;
        self.per_vm(
            to,
            "dns_cache_hits",
            "DNS questions answered from the cache",
            |vm| vm.dns_cache_hits,
        )?;
        self.per_vm(
            to,
            "dns_failures",
            "DNS questions that no resolver answered",
            |vm| vm.dns_failures,
        )?;
        let of_ours = |vm: &VmStats| self.names.get(&vm.vm);
        let refused = self.vms.iter().filter_map(|vm| {
            let names = of_ours(vm)?;
            let counts = [
                ("name", names.refused_names),
                ("type", names.refused_types),
                ("chain", names.refused_chains),
                ("rebinding", names.rebinding),
                ("full", names.full),
                ("elsewhere", names.elsewhere),
                ("over_rate", names.over_rate),
                ("new_names", names.new_names),
                ("asked_again", names.asked_again),
            ];
            Some(counts.map(|(reason, count)| {
                let labels = [("vm", vm.vm.as_str()), ("reason", reason)];
                (labels, count)
            }))
        });
        counters(
            to,
            "dns_refused",
            "DNS questions and answers refused, since the engine began",
            refused.flatten(),
        )?;
        let inspected = self.vms.iter().filter_map(|vm| {
            let inspected = of_ours(vm)?.inspected.by_key();
            Some(inspected.map(move |(reason, count)| {
                let labels = [("vm", vm.vm.as_str()), ("reason", reason)];
                (labels, count)
            }))
        });
        counters(
            to,
            "inspected_refused",
            "Inspected connections that were refused, since the engine began",
            inspected.flatten(),
        )?;
        let open = self.vms.iter().filter_map(|vm| {
            let labels = [("vm", vm.vm.as_str())];
            Some((labels, of_ours(vm)?.open))
        });
        gauges(to, "dns_open_addresses", "Addresses open by name", open)?;
        let of_vms = self.vms.iter();
        let of_vms = of_vms.map(|vm| ([("vm", vm.vm.as_str())], vm.records_lost));
        counters(
            to,
            "records_lost",
            "Lines that the flow log did not take; without a VM's name: of none in particular",
            of_vms.chain([([("vm", "")], self.records_lost_of_none)]),
        )
    }
}

fn counters<'a, const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    rows: impl IntoIterator<Item = (Pairs<'a, N>, u64)>,
) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in rows {
        ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn gauges<'a, const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    rows: impl IntoIterator<Item = (Pairs<'a, N>, u64)>,
) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in rows {
        // A gauge is signed.
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "page_test.rs"]
mod tests;
