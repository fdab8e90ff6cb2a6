//! `slipgate flows`: the live flows, read from the pinned slots, and the relayed flows, read from
//! the engines.
use std::{cmp::Reverse, collections::BTreeSet, net::SocketAddr};

use serde::Serialize;
use slipgate_abi::{
    Protocol, RuleIndex, Slot, SlotIndex, Verdict, VmRow, slot::SlotFlags, tcp::TcpBits,
    vm::VmFlags,
};
use slipgate_control::maps::ReadOnlyMaps;
use slipgate_ipc::engine::LiveRelayed;
use slipgate_model::{FlowAddresses, FlowId, Labels, TranslatedId};

use super::{
    names, now_ns, open, print, served,
    table::{amount, span, table},
};
use crate::args::{FlowOrder, FlowsArgs};

/// A flow as `--json` shows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Flow {
    /// Id of the flow as in the flow log, accepted by `cut` and `capture`.
    pub(crate) id: FlowId,
    /// Name of the VM.
    pub(crate) vm: String,
    /// Labels of the VM, if it has some.
    #[serde(skip_serializing_if = "Labels::is_empty")]
    pub(crate) labels: Labels,
    /// tcp, udp or icmp.
    pub(crate) proto: &'static str,
    /// Address and port (ICMP: query id) on the guest's link.
    pub(crate) guest: String,
    /// The peer's address and port (ICMP: address alone).
    pub(crate) remote: String,
    /// Translated address and port (ICMP: query id); of a relayed one the host's address that its
    /// client came to, or our end toward the host's loopback; absent for DNS.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) nat: String,
    /// The service on the host's loopback that it leads to; absent for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<String>,
    /// `Fast`, `Engine`, ... in lower case; `relay`.
    pub(crate) verdict: &'static str,
    /// Component that carries the flow: kernel, engine, relay; sockets of the user-mode engine.
    pub(crate) path: &'static str,
    /// outbound; or inbound, by a forward.
    pub(crate) direction: &'static str,
    /// Its VM is frozen: nothing of it passes; absent otherwise.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) frozen: bool,
    /// TCP: opening, established, closing, closed, reset. Others: one-way, both-ways.
    pub(crate) state: String,
    /// The rule that admitted it; absent for DNS over TCP.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) rule: String,
    /// Name whose DNS answer opened its address, where a rule by name admitted it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dns_name: Option<String>,
    /// Packets from the guest, counted as if segmented.
    pub(crate) tx_packets: u64,
    /// Bytes from the guest, in IP packets.
    pub(crate) tx_bytes: u64,
    /// Packets to the guest, counted as if segmented.
    pub(crate) rx_packets: u64,
    /// Bytes to the guest, in IP packets.
    pub(crate) rx_bytes: u64,
    /// Time since it was admitted, ms.
    pub(crate) age_ms: u64,
    /// Time since its last packet in either direction, ms.
    pub(crate) idle_ms: u64,
}

impl Flow {
    /// `vm` and `rule`: texts that the slot names by number.
    pub(crate) fn new(
        instance: u32,
        (index, slot): (SlotIndex, &Slot),
        addresses: FlowAddresses,
        vm: String,
        rule: String,
        now_ns: u64,
    ) -> Self {
        let ms_since = |ns: u64| now_ns.saturating_sub(ns) / 1_000_000;
        let at = |address, port| SocketAddr::new(address, port).to_string();
        let last = slot.tx_last_ns.max(slot.rx_last_ns).max(slot.created_ns);
        Self {
            id: FlowId::Translated(TranslatedId {
                instance,
                slot: index,
                generation: slot.generation,
            }),
            vm,
            labels: Labels::new(),
            proto: slot.protocol.name(),
            guest: at(addresses.guest, slot.guest_port),
            remote: match slot.protocol {
                Protocol::Icmp | Protocol::Icmpv6 => addresses.remote.to_string(),
                Protocol::Tcp | Protocol::Udp => at(addresses.remote, slot.remote_port),
            },
            nat: at(addresses.nat, slot.nat_port),
            host: None,
            verdict: slot.verdict.name(),
            path: path(slot),
            direction: direction(slot.flags & SlotFlags::INBOUND != 0),
            frozen: false,
            state: state(slot).into(),
            rule,
            dns_name: None,
            tx_packets: slot.tx_packets,
            tx_bytes: slot.tx_bytes,
            rx_packets: slot.rx_packets,
            rx_bytes: slot.rx_bytes,
            age_ms: ms_since(slot.created_ns),
            idle_ms: ms_since(last),
        }
    }

    /// Makes the row of a relayed flow.
    fn relayed(flow: &LiveRelayed, frozen: bool) -> Self {
        let shown = |at: SocketAddr| at.to_string();
        Self {
            id: FlowId::Relayed(flow.id),
            vm: flow.vm.clone(),
            labels: Labels::new(),
            proto: Protocol::from_ip(flow.protocol).map_or("", Protocol::name),
            guest: shown(flow.guest),
            remote: shown(flow.remote),
            nat: flow.nat.map(shown).unwrap_or_default(),
            host: flow.host.map(shown),
            verdict: "relay",
            path: "relay",
            direction: direction(flow.inbound),
            frozen,
            state: flow.state.clone(),
            rule: flow.rule.clone(),
            dns_name: None,
            tx_packets: flow.tx.0,
            tx_bytes: flow.tx.1,
            rx_packets: flow.rx.0,
            rx_bytes: flow.rx.1,
            age_ms: flow.age_ms,
            idle_ms: flow.idle_ms,
        }
    }

    fn row(&self) -> Vec<String> {
        vec![
            self.id.to_string(),
            self.vm.clone(),
            self.proto.into(),
            self.guest.clone(),
            self.remote.clone(),
            self.nat.clone(),
            if self.frozen { "frozen" } else { self.verdict }.into(),
            self.state.clone(),
            amount(self.tx_packets),
            amount(self.tx_bytes),
            amount(self.rx_packets),
            amount(self.rx_bytes),
            span(self.age_ms),
            span(self.idle_ms),
            match &self.dns_name {
                Some(name) => format!("{} ({name})", self.rule),
                None => self.rule.clone(),
            },
        ]
    }
}

fn direction(inbound: bool) -> &'static str {
    match inbound {
        true => "inbound",
        false => "outbound",
    }
}

fn path(slot: &Slot) -> &'static str {
    match slot.verdict {
        _ if slot.flags & SlotFlags::HAIRPIN != 0 => "hairpin",
        Verdict::Engine => "engine",
        _ => "kernel",
    }
}

/// TCP has phases; of the others it is known whether they were answered.
fn state(slot: &Slot) -> &'static str {
    match slot.protocol {
        Protocol::Tcp => TcpBits(slot.tcp).phase().name(),
        Protocol::Udp | Protocol::Icmp | Protocol::Icmpv6
            if slot.tx_packets > 0 && slot.rx_packets > 0 =>
        {
            "both-ways"
        }
        Protocol::Udp | Protocol::Icmp | Protocol::Icmpv6 => "one-way",
    }
}

/// Runs the command `slipgate flows`.
pub(crate) fn run(args: &FlowsArgs) -> anyhow::Result<()> {
    let maps = open(&args.pin_dir)?;
    served(&maps, args.vm.as_deref())?;
    print(args.watch, || {
        let names = names::ask_all(&args.pin_dir);
        let mut flows = list(&maps, &names);
        flows.retain(|flow| is_wanted(flow, args));
        if let Some(order) = args.sort {
            sort(&mut flows, order);
        }
        if args.json {
            return Ok(serde_json::to_string_pretty(&flows)? + "\n");
        }
        const HEAD: [&str; 15] = [
            "ID", "VM", "PROTO", "GUEST", "REMOTE", "NAT", "VERDICT", "STATE", "TX-PKT", "TX-BYTE",
            "RX-PKT", "RX-BYTE", "AGE", "IDLE", "RULE",
        ];
        let rows: Vec<_> = flows.iter().map(Flow::row).collect();
        Ok(table(&HEAD, &rows, &[8, 9, 10, 11, 12, 13]))
    })
}

fn is_wanted(flow: &Flow, args: &FlowsArgs) -> bool {
    let proto = args.proto.map(|proto| Protocol::from(proto).name());
    let by_name = |wanted: &str| {
        let name = flow.dns_name.as_deref().unwrap_or_default();
        match wanted.strip_prefix('*') {
            Some(below) => name.ends_with(&below.to_ascii_lowercase()),
            None => name.eq_ignore_ascii_case(wanted),
        }
    };
    args.vm.as_ref().is_none_or(|vm| *vm == flow.vm)
        && proto.is_none_or(|proto| proto == flow.proto)
        && args.name.as_deref().is_none_or(by_name)
}

/// Puts flows in order; equal ones stay as they are.
pub(crate) fn sort(flows: &mut [Flow], order: FlowOrder) {
    match order {
        FlowOrder::Bytes => flows.sort_by_key(|f| Reverse(f.tx_bytes + f.rx_bytes)),
        FlowOrder::Packets => flows.sort_by_key(|f| Reverse(f.tx_packets + f.rx_packets)),
        FlowOrder::Age => flows.sort_by_key(|f| Reverse(f.age_ms)),
        FlowOrder::Idle => flows.sort_by_key(|f| Reverse(f.idle_ms)),
        FlowOrder::Vm => flows.sort_by(|a, b| (&a.vm, &a.guest).cmp(&(&b.vm, &b.guest))),
        FlowOrder::Name => flows.sort_by(|a, b| {
            let key = |f: &Flow| (f.dns_name.is_none(), f.dns_name.clone(), f.remote.clone());
            key(a).cmp(&key(b))
        }),
    }
}

/// Returns all live flows.
pub(crate) fn list(maps: &ReadOnlyMaps, names: &names::Known) -> Vec<Flow> {
    let (now, instance) = (now_ns(), maps.instance());
    let frozen = frozen(maps);
    let relayed = names.relayed_flows.iter();
    let relayed = relayed.map(|flow| Flow::relayed(flow, frozen.contains(&flow.vm)));
    maps.flows()
        .map(|(index, slot)| {
            let rule = maps.rule(RuleIndex::new(slot.rule)).unwrap_or_default();
            let name = names.flows.get(&(index, slot.generation));
            // Of a slot within its array.
            let six = maps.addresses6(index).unwrap_or_default();
            let addresses = FlowAddresses::of(&slot, &six);
            let vm = vm_name(maps, &slot);
            Flow {
                dns_name: name.cloned(),
                path: match (maps.are_of_userspace(), slot.verdict) {
                    (false, _) | (_, Verdict::Engine) => path(&slot),
                    (true, _) => "sockets",
                },
                frozen: frozen.contains(&vm),
                ..Flow::new(instance, (index, &slot), addresses, vm, rule, now)
            }
        })
        .chain(relayed)
        .map(|flow| Flow {
            labels: names.labels.get(&flow.vm).cloned().unwrap_or_default(),
            ..flow
        })
        .collect()
}

/// VMs of which nothing passes, by name.
pub(crate) fn frozen(maps: &ReadOnlyMaps) -> BTreeSet<String> {
    let vms = maps.vms();
    let frozen = vms.filter(|(_, vm)| vm.flags & VmFlags::FROZEN != 0);
    frozen.map(|(_, vm)| ReadOnlyMaps::name(&vm)).collect()
}

/// The name in the VM's row; a number when the row is another VM's by now.
fn vm_name(maps: &ReadOnlyMaps, slot: &Slot) -> String {
    match maps.vm(VmRow::new(slot.vm_row)) {
        Some(vm) if vm.id == slot.vm => ReadOnlyMaps::name(&vm),
        _ => format!("#{}", slot.vm),
    }
}

#[cfg(test)]
#[path = "flows_test.rs"]
mod tests;
