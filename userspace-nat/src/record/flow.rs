//! Records of the starts and ends of flows, and the ids of the flows that a log already has.
use std::{
    io::{self, Read, Seek, SeekFrom},
    net::{IpAddr, SocketAddr},
    rc::Rc,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, SystemTime},
};

use hashbrown::HashSet;
use serde::{Deserialize, Serialize};
use slipgate_abi::{
    Protocol, RuleIndex, SlotIndex, SlotRef, Verdict, VmId, slot::SlotFlags, tcp::TcpBits,
};
use slipgate_model::{FlowAddresses, FlowId, FlowUplink, Labels, RelayedId, TranslatedId};

use super::{Event, FlowLog, Rfc3339};
use crate::flow::Ended;

/// Part of a log's end that is searched for ids at adoption, bytes: far more than one turn writes.
const TAIL: u64 = 4 << 20;

/// Description of a VM in records.
#[derive(Clone, Copy, Debug, Default)]
pub struct VmText<'a> {
    /// Name of the VM; empty when it is not known.
    pub name: &'a str,
    /// Its labels, if it has some.
    pub labels: Option<&'a Labels>,
}

/// Names that a record shows and the slot does not hold.
#[derive(Clone, Copy, Debug, Default)]
pub struct Names<'a> {
    /// Name and labels of the VM.
    pub vm: VmText<'a>,
    /// Text of the rule, where it is known.
    pub rule: Option<&'a str>,
    /// Name by which DNS opened the address, if one did.
    pub dns: Option<&'a str>,
    /// Link and neighbour by which the flow leaves.
    pub uplink: Option<FlowUplink<&'a str>>,
    /// Where its route leads, if it ended because of that.
    pub moved_to: Option<FlowUplink<&'a str>>,
}

/// A flow that is not translated: the engine terminates it on both sides.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RelayedFlow {
    /// Number of the flow among this engine's relayed flows.
    pub number: u64,
    /// Id of the VM.
    pub vm: VmId,
    /// Protocol: TCP or UDP.
    pub protocol: Protocol,
    /// Address and port of the guest.
    pub guest: SocketAddr,
    /// Address and port of the peer: a client of the host, or the destination of the guest's
    /// connection.
    pub remote: SocketAddr,
    /// Whether the world opened the flow, through a forward.
    pub inbound: bool,
    /// Address and port of the host to which the client connected, or the engine's end toward the
    /// host's loopback.
    pub nat: Option<SocketAddr>,
    /// The forward's element of `RULES`; `None` when the guest opened the flow.
    pub rule: Option<RuleIndex>,
    /// Service on the host's loopback to which the guest was led.
    pub host: Option<SocketAddr>,
    /// Text of the rule that led the guest there.
    pub rule_text: Option<Rc<str>>,
    /// Time at which the connection was accepted, ns.
    pub opened_ns: u64,
    /// Time that the other side took to accept the connection, µs; 0: it has not, or was not asked.
    pub connect_us: u32,
    /// Packets and L3 bytes from the guest, as the relay saw them.
    pub tx: (u64, u64),
    /// Packets and L3 bytes to the guest.
    pub rx: (u64, u64),
    /// Time of the last packet from or to the guest, ns.
    pub last_ns: u64,
}

/// End of a relayed flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RelayedEnd {
    /// Reason, as named in records.
    pub reason: &'static str,
    /// Time of the end, ns.
    pub at_ns: u64,
}

/// A line about a flow, in the order of its fields.
#[derive(Serialize)]
struct Line<'a> {
    event: Event,
    id: FlowId,
    vm: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    labels: Option<&'a Labels>,
    proto: &'static str,
    guest: Address,
    remote: Address,
    #[serde(skip_serializing_if = "Option::is_none")]
    nat: Option<Address>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<Address>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uplink: Option<FlowUplink<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<RuleIndex>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule_text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dns_name: Option<&'a str>,
    verdict: &'static str,
    started: Rfc3339,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    connect_us: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tx_packets: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tx_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rx_packets: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rx_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    end: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    moved_to: Option<FlowUplink<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tcp: Option<&'static str>,
    direction: &'static str,
    path: &'static str,
}

impl Line<'_> {
    fn ends(&mut self, duration: Duration, tx: (u64, u64), rx: (u64, u64), reason: &'static str) {
        self.event = Event::FlowEnd;
        self.duration_ms = Some(duration.as_millis() as u64);
        (self.tx_packets, self.tx_bytes) = (Some(tx.0), Some(tx.1));
        (self.rx_packets, self.rx_bytes) = (Some(rx.0), Some(rx.1));
        self.end = Some(reason);
    }
}

impl FlowLog {
    /// Buffers the start of a translated flow. `now`: the wall-clock time at `now_ns`.
    pub fn flow_start(
        &mut self,
        (slot, live): (SlotIndex, SlotRef),
        addresses: FlowAddresses,
        names: Names<'_>,
        now_ns: u64,
        now: SystemTime,
    ) {
        let Some(protocol) = Protocol::from_number(live.protocol()) else {
            return;
        };
        if !self.wants(Event::FlowStart) {
            return;
        }
        let id = TranslatedId {
            instance: self.instance,
            slot,
            generation: live.generation().load(Relaxed),
        };
        let age = Duration::from_nanos(now_ns.saturating_sub(live.created_ns()));
        let by_engine = live.verdict().load(Relaxed) == Verdict::Engine as u32;
        let (verdict, path) = self.carried(live.flags(), by_engine);
        let line = Line {
            rule: Some(live.rule_index()),
            nat: Some(Address(addresses.nat, live.nat_port())),
            direction: direction(live.flags()),
            verdict,
            path,
            ..line(
                FlowId::Translated(id),
                names,
                protocol,
                (addresses.guest, live.guest_port()),
                (addresses.remote, live.remote_port()),
                earlier(now, age),
            )
        };
        self.push(Event::FlowStart, live.id(), &line);
    }

    /// Returns verdict and path of a flow with these flags. `by_engine`: packet by packet, in either
    /// mode.
    fn carried(&self, flags: u8, by_engine: bool) -> (&'static str, &'static str) {
        match by_engine {
            _ if flags & SlotFlags::HAIRPIN != 0 => (Verdict::Engine.name(), "hairpin"),
            true => (Verdict::Engine.name(), "engine"),
            false if self.by_sockets => (Verdict::Fast.name(), "sockets"),
            false => (Verdict::Fast.name(), "kernel"),
        }
    }

    /// Buffers the end of a translated flow. `now`: the wall-clock time at `ended.ended_ns`.
    pub fn flow_end(&mut self, ended: &Ended, names: Names<'_>, now: SystemTime) {
        if !self.wants(Event::FlowEnd) {
            return;
        }
        let (slot, addresses) = (&ended.content, ended.addresses);
        let duration = Duration::from_nanos(ended.ended_ns.saturating_sub(slot.created_ns));
        let id = TranslatedId {
            instance: self.instance,
            slot: ended.slot,
            generation: slot.generation,
        };
        let (verdict, path) = self.carried(slot.flags, ended.held);
        let is_tcp = slot.protocol == Protocol::Tcp;
        let mut line = Line {
            rule: Some(RuleIndex::new(slot.rule)),
            nat: Some(Address(addresses.nat, slot.nat_port)),
            direction: direction(slot.flags),
            tcp: is_tcp.then(|| TcpBits(slot.tcp).phase().name()),
            connect_us: (slot.connect_us > 0).then_some(slot.connect_us),
            verdict,
            path,
            ..line(
                FlowId::Translated(id),
                names,
                slot.protocol,
                (addresses.guest, slot.guest_port),
                (addresses.remote, slot.remote_port),
                earlier(now, duration),
            )
        };
        let tx = (slot.tx_packets, slot.tx_bytes);
        let rx = (slot.rx_packets, slot.rx_bytes);
        line.ends(duration, tx, rx, ended.reason.name());
        self.push(Event::FlowEnd, VmId::new(slot.vm), &line);
    }

    /// Returns the id of a relayed flow of this engine.
    pub fn relayed_id(&self, flow: &RelayedFlow) -> RelayedId {
        RelayedId {
            run: self.run,
            number: flow.number,
        }
    }

    /// Returns the number of the relayed flow of this id; `None` when it is another engine's.
    pub fn relayed_number(&self, id: RelayedId) -> Option<u64> {
        (id.run == self.run).then_some(id.number)
    }

    /// Buffers the start of a relayed flow, or its end if `end` is given. `now`: the wall-clock
    /// time at `now_ns`.
    pub fn relayed(
        &mut self,
        flow: &RelayedFlow,
        end: Option<RelayedEnd>,
        names: Names<'_>,
        now_ns: u64,
        now: SystemTime,
    ) {
        let event = match end {
            Some(_) => Event::FlowEnd,
            None => Event::FlowStart,
        };
        if !self.wants(event) {
            return;
        }
        let id = FlowId::Relayed(self.relayed_id(flow));
        let address = |at: SocketAddr| (at.ip(), at.port());
        let shown = |at: SocketAddr| Address(at.ip(), at.port());
        let age = Duration::from_nanos(now_ns.saturating_sub(flow.opened_ns));
        let mut line = Line {
            rule: flow.rule,
            rule_text: flow.rule_text.as_deref().or(names.rule),
            nat: flow.nat.map(shown),
            host: flow.host.map(shown),
            verdict: "relay",
            path: "relay",
            direction: if flow.inbound { "inbound" } else { "outbound" },
            ..line(
                id,
                names,
                flow.protocol,
                address(flow.guest),
                address(flow.remote),
                earlier(now, age),
            )
        };
        if let Some(end) = end {
            let duration = Duration::from_nanos(end.at_ns.saturating_sub(flow.opened_ns));
            line.ends(duration, flow.tx, flow.rx, end.reason);
            line.connect_us = (flow.connect_us > 0).then_some(flow.connect_us);
        }
        self.push(event, flow.vm, &line);
    }
}

fn line<'a>(
    id: FlowId,
    names: Names<'a>,
    protocol: Protocol,
    guest: (IpAddr, u16),
    remote: (IpAddr, u16),
    started: SystemTime,
) -> Line<'a> {
    Line {
        event: Event::FlowStart,
        id,
        vm: names.vm.name,
        labels: names.vm.labels,
        proto: protocol.name(),
        guest: Address(guest.0, guest.1),
        remote: Address(remote.0, remote.1),
        nat: None,
        host: None,
        uplink: names.uplink,
        rule: None,
        rule_text: names.rule,
        dns_name: names.dns,
        verdict: "fast",
        started: Rfc3339(started),
        duration_ms: None,
        connect_us: None,
        tx_packets: None,
        tx_bytes: None,
        rx_packets: None,
        rx_bytes: None,
        end: None,
        moved_to: names.moved_to,
        tcp: None,
        direction: "outbound",
        path: "kernel",
    }
}

fn direction(flags: u8) -> &'static str {
    match flags & SlotFlags::INBOUND != 0 {
        true => "inbound",
        false => "outbound",
    }
}

fn earlier(now: SystemTime, by: Duration) -> SystemTime {
    now.checked_sub(by).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// An address and port, such as `192.0.2.1:443` or `[2001:db8::1]:443`.
#[derive(Clone, Copy)]
pub(super) struct Address(pub(super) IpAddr, pub(super) u16);

impl Serialize for Address {
    /// Formats IPv4 without `fmt`, which is slow: each line has three addresses.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(addr, port) = *self;
        let IpAddr::V4(addr) = addr else {
            return serializer.collect_str(&SocketAddr::new(addr, port));
        };
        let [a, b, c, d] = addr.octets();
        let mut text = Digits::default();
        for (octet, after) in [(a, b'.'), (b, b'.'), (c, b'.'), (d, b':')] {
            text.number(u16::from(octet));
            text.byte(after);
        }
        text.number(port);
        serializer.serialize_str(text.as_str())
    }
}

/// Text buffer with room for the longest address and port, `255.255.255.255:65535`.
#[derive(Default)]
struct Digits {
    bytes: [u8; 21],
    len: usize,
}

impl Digits {
    fn byte(&mut self, byte: u8) {
        self.bytes[self.len] = byte;
        self.len += 1;
    }

    fn number(&mut self, number: u16) {
        let mut power = 10_000;
        while power > 1 && power > number {
            power /= 10;
        }
        while power > 0 {
            self.byte(b'0' + (number / power % 10) as u8);
            power /= 10;
        }
    }

    fn as_str(&self) -> &str {
        str::from_utf8(&self.bytes[..self.len]).unwrap_or_default()
    }
}

/// Returns the ids of the flows that ended in a log's last 4 MiB. A torn first or last line is
/// skipped, and so are records of other events. Lines without an event are flow ends: earlier logs
/// had no others.
///
/// # Errors
/// When the log can't be read.
pub fn recorded_ids(log: &mut (impl Read + Seek)) -> io::Result<HashSet<TranslatedId>> {
    #[derive(Deserialize)]
    struct End {
        event: Option<String>,
        id: String,
    }
    let len = log.seek(SeekFrom::End(0))?;
    log.seek(SeekFrom::Start(len.saturating_sub(TAIL)))?;
    let mut tail = Vec::new();
    log.take(TAIL).read_to_end(&mut tail)?;
    let lines = tail.split(|b| *b == b'\n');
    Ok(lines
        .filter_map(|line| serde_json::from_slice::<End>(line).ok())
        .filter(|end| end.event.as_deref().is_none_or(|event| event == "flow_end"))
        .filter_map(|end| TranslatedId::parse(&end.id))
        .collect())
}
