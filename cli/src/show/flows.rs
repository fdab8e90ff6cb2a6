//! `slipgate flows`: the live flows, read from the pinned slots, and the relayed flows, read from
//! the engines.
mod in_parts;

use std::{
    borrow::Cow,
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    fmt::{self, Display},
    io::{self, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use serde::{Serialize, Serializer};
use slipgate_abi::{
    Addresses6, IfIndex, Protocol, RuleIndex, Slot, SlotIndex, Verdict, VmRow, link::NextHopFlags,
    slot::SlotFlags, tcp::TcpBits, vm::VmFlags,
};
use slipgate_control::maps::ReadOnlyMaps;
use slipgate_ipc::engine::LiveRelayed;
use slipgate_model::{FlowAddresses, FlowId, FlowUplink, Labels, TranslatedId};

pub(crate) use self::in_parts::InParts;
use super::{
    names, now_ns, open, print_as_written, served,
    table::{Amount, Columns, Span},
};
use crate::args::{FlowOrder, FlowsArgs};

/// A flow as `--json` shows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Flow {
    /// Id of the flow as in the flow log, accepted by `cut` and `capture`.
    pub(crate) id: FlowId,
    /// Name of the VM.
    #[serde(serialize_with = "shared")]
    pub(crate) vm: Arc<str>,
    /// Labels of the VM, if it has some.
    #[serde(serialize_with = "shared", skip_serializing_if = "is_empty")]
    pub(crate) labels: Arc<Labels>,
    /// tcp, udp or icmp.
    pub(crate) proto: &'static str,
    /// Address and port (ICMP: query id) on the guest's link.
    pub(crate) guest: SocketAddr,
    /// The peer's address and port (ICMP: address alone).
    pub(crate) remote: Remote,
    /// Translated address and port (ICMP: query id); of a relayed one the host's address that its
    /// client came to, or our end toward the host's loopback; absent for DNS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) nat: Option<SocketAddr>,
    /// The service on the host's loopback that it leads to; absent for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<SocketAddr>,
    /// Link and neighbour by which it leaves; absent where a socket of the host does, or none.
    #[serde(
        serialize_with = "shared_if_any",
        skip_serializing_if = "Option::is_none"
    )]
    pub(crate) uplink: Option<Arc<FlowUplink<String>>>,
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
    pub(crate) state: Cow<'static, str>,
    /// The rule that admitted it; absent for DNS over TCP.
    #[serde(serialize_with = "shared", skip_serializing_if = "is_blank")]
    pub(crate) rule: Arc<str>,
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

/// The other end of a flow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Remote {
    /// Of ICMP, which has no ports.
    Address(IpAddr),
    /// Of TCP and UDP.
    Port(SocketAddr),
}

impl Remote {
    /// Returns its port, if it has one.
    pub(crate) fn port(self) -> Option<u16> {
        match self {
            Self::Address(_) => None,
            Self::Port(at) => Some(at.port()),
        }
    }
}

impl Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Port(at) => at.fmt(f),
        }
    }
}

/// Serializes what several flows share as each one's own.
fn shared<T: Serialize + ?Sized, S: Serializer>(value: &Arc<T>, to: S) -> Result<S::Ok, S::Error> {
    T::serialize(value, to)
}

fn shared_if_any<T: Serialize, S: Serializer>(
    value: &Option<Arc<T>>,
    to: S,
) -> Result<S::Ok, S::Error> {
    value.as_deref().serialize(to)
}

fn is_empty(labels: &Arc<Labels>) -> bool {
    labels.is_empty()
}

fn is_blank(text: &Arc<str>) -> bool {
    text.is_empty()
}

impl Flow {
    /// `vm` and `rule`: texts that the slot names by number.
    pub(crate) fn new(
        instance: u32,
        (index, slot): (SlotIndex, &Slot),
        addresses: FlowAddresses,
        vm: Arc<str>,
        rule: Arc<str>,
        now_ns: u64,
    ) -> Self {
        let ms_since = |ns: u64| now_ns.saturating_sub(ns) / 1_000_000;
        let last = slot.tx_last_ns.max(slot.rx_last_ns).max(slot.created_ns);
        Self {
            id: FlowId::Translated(TranslatedId {
                instance,
                slot: index,
                generation: slot.generation,
            }),
            vm,
            labels: Arc::default(),
            proto: slot.protocol.name(),
            guest: SocketAddr::new(addresses.guest, slot.guest_port),
            remote: match slot.protocol {
                Protocol::Icmp | Protocol::Icmpv6 => Remote::Address(addresses.remote),
                Protocol::Tcp | Protocol::Udp => {
                    Remote::Port(SocketAddr::new(addresses.remote, slot.remote_port))
                }
            },
            nat: Some(SocketAddr::new(addresses.nat, slot.nat_port)),
            host: None,
            uplink: None,
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

    /// Makes the row of a relayed flow of this VM.
    fn relayed(flow: &LiveRelayed, vm: &OfVm) -> Self {
        Self {
            id: FlowId::Relayed(flow.id),
            vm: vm.name.clone(),
            labels: vm.labels.clone(),
            proto: Protocol::from_ip(flow.protocol).map_or("", Protocol::name),
            guest: flow.guest,
            remote: Remote::Port(flow.remote),
            nat: flow.nat,
            host: flow.host,
            uplink: None,
            verdict: "relay",
            path: "relay",
            direction: direction(flow.inbound),
            frozen: vm.is_frozen,
            state: flow.state.clone().into(),
            rule: flow.rule.as_str().into(),
            dns_name: None,
            tx_packets: flow.tx.0,
            tx_bytes: flow.tx.1,
            rx_packets: flow.rx.0,
            rx_bytes: flow.rx.1,
            age_ms: flow.age_ms,
            idle_ms: flow.idle_ms,
        }
    }

    /// Writes the flow's row, a cell for each title of [`HEAD`].
    /// `with_uplink`: one for [`UPLINK`] too.
    fn write_to(&self, table: &mut Columns<impl Write>, with_uplink: bool) -> io::Result<()> {
        table.cell(self.id);
        table.cell(&self.vm);
        table.cell(self.proto);
        table.cell(self.guest);
        table.cell(self.remote);
        match self.nat {
            Some(nat) => table.cell(nat),
            None => table.cell(""),
        }
        table.cell(if self.frozen { "frozen" } else { self.verdict });
        table.cell(&self.state);
        table.cell(Amount(self.tx_packets));
        table.cell(Amount(self.tx_bytes));
        table.cell(Amount(self.rx_packets));
        table.cell(Amount(self.rx_bytes));
        table.cell(Span(self.age_ms));
        table.cell(Span(self.idle_ms));
        if with_uplink {
            match self.uplink.as_deref() {
                Some(FlowUplink {
                    name: Some(name), ..
                }) => table.cell(name),
                Some(uplink) => table.cell(uplink.index.get()),
                None => table.cell(""),
            }
        }
        match &self.dns_name {
            Some(name) => table.cell(format_args!("{} ({name})", self.rule)),
            None => table.cell(&self.rule),
        }
        table.end_row()
    }
}

/// Titles of the columns of `slipgate flows`.
const HEAD: [&str; 15] = [
    "ID", "VM", "PROTO", "GUEST", "REMOTE", "NAT", "VERDICT", "STATE", "TX-PKT", "TX-BYTE",
    "RX-PKT", "RX-BYTE", "AGE", "IDLE", "RULE",
];
/// Title of the column before the rule's, which is there where flows may leave by several links.
const UPLINK: &str = "UPLINK";
/// The columns of numbers.
const NUMBERS: [usize; 6] = [8, 9, 10, 11, 12, 13];

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
    print_as_written(args.watch, |out| {
        let names = names::ask_all(&args.pin_dir);
        write(&maps, &names, args, out)
    })
}

/// Writes the flows that are wanted. In the order of their slots, they are written as they are read: a
/// million is never held at once.
fn write(
    maps: &ReadOnlyMaps,
    names: &names::Known,
    args: &FlowsArgs,
    out: &mut impl Write,
) -> io::Result<()> {
    let look = match args.json {
        true => Look::Json,
        false => Look::Table {
            with_uplink: names.links.len() > 1,
        },
    };
    let mut flows = live(maps, names, now_ns).filter(|flow| is_wanted(flow, args));
    match args.sort {
        None => write_each(&mut flows, look, out),
        Some(order) => {
            let mut flows: Vec<Flow> = flows.collect();
            sort(&mut flows, order);
            write_each(flows.into_iter(), look, out)
        }
    }
}

/// How flows are written.
#[derive(Clone, Copy, Debug)]
enum Look {
    Json,
    Table { with_uplink: bool },
}

fn write_each(
    flows: impl Iterator<Item = Flow>,
    look: Look,
    out: &mut impl Write,
) -> io::Result<()> {
    let Look::Table { with_uplink } = look else {
        serde_json::Serializer::pretty(&mut *out).collect_seq(flows)?;
        return out.write_all(b"\n");
    };
    let mut head = HEAD.to_vec();
    if with_uplink {
        head.insert(HEAD.len() - 1, UPLINK);
    }
    let mut table = Columns::new(out, &head, &NUMBERS);
    for flow in flows {
        flow.write_to(&mut table, with_uplink)?;
    }
    table.finish()
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
    args.vm.as_ref().is_none_or(|vm| **vm == *flow.vm)
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
            let by_name = a.dns_name.is_none().cmp(&b.dns_name.is_none());
            let by_name = by_name.then_with(|| a.dns_name.cmp(&b.dns_name));
            by_name.then_with(|| a.remote.cmp(&b.remote))
        }),
    }
}

/// Returns all live flows.
pub(crate) fn list(maps: &ReadOnlyMaps, names: &names::Known) -> Vec<Flow> {
    live(maps, names, now_ns).collect()
}

/// What all flows of a VM show of it.
#[derive(Clone, Debug)]
struct OfVm {
    name: Arc<str>,
    labels: Arc<Labels>,
    is_frozen: bool,
}

impl OfVm {
    fn new(name: &str, names: &names::Known, frozen: &BTreeSet<String>) -> Self {
        let labels = names.labels.get(name);
        Self {
            name: name.into(),
            labels: labels.cloned().unwrap_or_default().into(),
            is_frozen: frozen.contains(name),
        }
    }
}

/// Where flows are read: the tables, and what only the engines have.
#[derive(Clone, Copy)]
struct Sources<'a> {
    maps: &'a ReadOnlyMaps,
    names: &'a names::Known,
}

impl Sources<'_> {
    /// Makes the row of a translated flow. `dns_name`: the name that opened its address.
    fn translated(
        self,
        texts: &mut Texts,
        (index, slot): (SlotIndex, &Slot),
        dns_name: Option<String>,
        now_ns: u64,
    ) -> Flow {
        let maps = self.maps;
        let (vm, rule) = texts.of(self, slot, now_ns);
        let (vm, rule) = (vm.clone(), rule.clone());
        // Those of IPv6 are beside the slot, which is within its array.
        let six = match slot.flags & SlotFlags::IPV6 {
            0 => Addresses6::default(),
            _ => maps.addresses6(index).unwrap_or_default(),
        };
        let addresses = FlowAddresses::of(slot, &six);
        let instance = maps.instance();
        Flow {
            dns_name,
            labels: vm.labels,
            path: match (maps.are_of_userspace(), slot.verdict) {
                (false, _) | (_, Verdict::Engine) => path(slot),
                (true, _) => "sockets",
            },
            frozen: vm.is_frozen,
            // Of sockets the kernel chooses it.
            uplink: match maps.are_of_userspace() {
                true => None,
                false => texts.uplink_of(self, slot),
            },
            ..Flow::new(instance, (index, slot), addresses, vm.name, rule, now_ns)
        }
    }

    /// Makes the row of a relayed flow.
    fn relayed(self, texts: &mut Texts, flow: &LiveRelayed, now_ns: u64) -> Flow {
        texts.renew(self.maps, now_ns);
        Flow::relayed(flow, &OfVm::new(&flow.vm, self.names, &texts.frozen))
    }
}

/// What slots name by numbers, as texts. Each is read once for all slots that name it, and again after
/// [`TEXTS_KEPT_NS`]: numbers are used again, and whoever reads our output may pause for long.
struct Texts {
    frozen: BTreeSet<String>,
    vms: HashMap<(u16, u32), OfVm>,
    rules: HashMap<u32, Arc<str>>,
    /// By link and element of `NEXT_HOPS`.
    uplinks: HashMap<(u32, u32), Arc<FlowUplink<String>>>,
    /// When the oldest of them was read at the earliest, ns.
    read_ns: u64,
}

const TEXTS_KEPT_NS: u64 = 1_000_000_000;

impl Texts {
    fn new(maps: &ReadOnlyMaps, now_ns: u64) -> Self {
        Self {
            frozen: frozen(maps),
            vms: HashMap::new(),
            rules: HashMap::new(),
            uplinks: HashMap::new(),
            read_ns: now_ns,
        }
    }

    /// Forgets texts that were read long ago.
    fn renew(&mut self, maps: &ReadOnlyMaps, now_ns: u64) {
        if now_ns.saturating_sub(self.read_ns) > TEXTS_KEPT_NS {
            *self = Self::new(maps, now_ns);
        }
    }

    /// Returns by what a flow leaves, as [`Self::of`] does the other texts, after which it is called.
    fn uplink_of(&mut self, from: Sources<'_>, slot: &Slot) -> Option<Arc<FlowUplink<String>>> {
        let is_hairpin = slot.flags & SlotFlags::HAIRPIN != 0;
        let index = IfIndex::new(slot.uplink_ifindex);
        if is_hairpin || !index.is_some() {
            return None;
        }
        let known = self.uplinks.entry((slot.uplink_ifindex, slot.next_hop));
        let uplink = known.or_insert_with(|| {
            let name = from.names.links.get(&index).cloned();
            FlowUplink::new(name, index, neighbour(from.maps, slot)).into()
        });
        Some(uplink.clone())
    }

    /// Returns what a flow shows of its VM, and the text of its rule.
    fn of(&mut self, from: Sources<'_>, slot: &Slot, now_ns: u64) -> (&OfVm, &Arc<str>) {
        let Sources { maps, names } = from;
        self.renew(maps, now_ns);
        let frozen = &self.frozen;
        let vm = self.vms.entry((slot.vm_row, slot.vm));
        let vm = vm.or_insert_with(|| OfVm::new(&vm_name(maps, slot), names, frozen));
        let rule = self.rules.entry(slot.rule).or_insert_with(|| {
            let text = maps.rule(RuleIndex::new(slot.rule));
            text.unwrap_or_default().into()
        });
        (vm, rule)
    }
}

/// Returns the live flows one by one, those that are translated in the order of their slots, each read
/// when it is asked for. `clock`: the time at that moment, `CLOCK_MONOTONIC` ns.
fn live<'a>(
    maps: &'a ReadOnlyMaps,
    names: &'a names::Known,
    clock: impl Fn() -> u64 + 'a,
) -> impl Iterator<Item = Flow> + 'a {
    let from = Sources { maps, names };
    let mut texts = Texts::new(maps, clock());
    let begun_ns = texts.read_ns;
    let relayed = names.relayed_flows.iter();
    let relayed: Vec<_> = relayed
        .map(|flow| from.relayed(&mut texts, flow, begun_ns))
        .collect();
    let translated = maps.flows().map(move |(index, slot)| {
        let name = names.flows.get(&(index, slot.generation));
        from.translated(&mut texts, (index, &slot), name.cloned(), clock())
    });
    translated.chain(relayed)
}

/// The neighbour by which a flow leaves; unspecified if it has none, or another link's by now.
fn neighbour(maps: &ReadOnlyMaps, slot: &Slot) -> IpAddr {
    let element = Some(slot.next_hop).filter(|index| *index != 0);
    let hop = element.and_then(|index| maps.next_hop(index));
    match hop.filter(|hop| hop.ifindex == slot.uplink_ifindex) {
        Some(hop) if hop.flags & NextHopFlags::IPV6 != 0 => hop.neighbour6.into(),
        Some(hop) => hop.neighbour.into(),
        None => Ipv4Addr::UNSPECIFIED.into(),
    }
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
