//! Double-entry bookkeeping: what the guest's link and the uplink carried, against the flow log.

use std::{collections::HashMap, fmt::Write as _, net::SocketAddr, time::Duration};

use serde_json::Value;
use slipgate_testbed::{
    Capture, Captured, Direction, Uplink,
    accounting::{Counts, FlowCounts, FlowKey},
    world::UPLINK,
};

use super::scene::{Record, Scene};

/// The lowest translated port.
const NAT_PORTS: u16 = 61_000;
/// Frames the engine takes from its port at a time.
const BATCH_FRAMES: u64 = 64;
/// ICMPv6, by which neighbours and routers of a link are found, too.
const ICMPV6: u8 = 58;
/// The extension header before a report of multicast listeners (RFC 3810).
const HOP_BY_HOP: u8 = 0;
/// Nothing moved for this long: nothing is under way.
const QUIET: Duration = Duration::from_millis(500);

/// Independent counts, from before the first flow to after the last.
pub(crate) struct Books {
    uplink: Capture,
    tap: Capture,
    /// How often an engine was killed meanwhile.
    pub(crate) kills: u64,
}

/// Totals of the books, which agreed.
pub(crate) struct Closed {
    pub(crate) records: Vec<Record>,
    /// `slipgate stats`, the total, from just before the detachment.
    pub(crate) stats: Value,
}

/// Both directions of the flows with one tuple.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
struct Both {
    tx: Counts,
    rx: Counts,
}

impl Books {
    pub(crate) fn open(scene: &Scene) -> Books {
        let start = |device| Capture::start(&scene.world.host, device).unwrap();
        Books {
            uplink: start(UPLINK),
            tap: start(scene.guest.tap()),
            kills: 0,
        }
    }

    /// Waits until nothing moves, detaches, and compares. All traffic must have ended.
    ///
    /// | counted by | must be |
    /// | --- | --- |
    /// | the uplink, sent, per translated tuple | what the records say was sent |
    /// | the uplink, received | what the records say was received, or counted as dropped or lost |
    /// | the TAP, from the guest | what the records say was sent, or counted as dropped or lost |
    /// | the same, about the link (neighbours, routers, groups) | answered, or counted as lost |
    /// | the guest's link, in | what the records say was received, and the engine's answers |
    ///
    /// On a link that duplicates, a copy may come when its flow has ended. It is the host's then,
    /// which answers with RST: a packet received and one of 40 bytes sent (60 by IPv6), of no flow. A copy that
    /// is a RST itself, from a server that is done with the connection too, is not answered.
    pub(crate) fn close(self, scene: &mut Scene) -> Closed {
        let mut before = moved(scene);
        loop {
            std::thread::sleep(QUIET);
            let now = moved(scene);
            if now == before {
                break;
            }
            before = now;
        }
        let stats = scene.slipgate.stats().unwrap()["total"].clone();
        let into_guest = scene.guest.flows(Direction::In);
        scene.detach();
        let uplink = self.uplink.finish().unwrap();
        let from_guest = self.tap.finish().unwrap().received;
        let late_copies = matches!(scene.world.config().uplink, Uplink::Impaired(_));
        let records = scene.records();
        let books = FlowBooks {
            records: &records,
            uplink: &uplink,
            from_guest: &from_guest,
            into_guest: &into_guest,
            stats: &stats,
            late_copies,
            kills: self.kills,
        };
        let wrong = books.disagreements();
        assert!(
            wrong.is_empty(),
            "the books do not agree:\n{wrong}\nstats: {stats:#}\nslipgate said:\n{}",
            scene.slipgate.stderr()
        );
        Closed { records, stats }
    }
}

/// Records of some VMs' flows, and independent counts of the same flows.
pub(crate) struct FlowBooks<'a> {
    pub(crate) records: &'a [Record],
    pub(crate) uplink: &'a Captured,
    pub(crate) from_guest: &'a FlowCounts,
    pub(crate) into_guest: &'a FlowCounts,
    /// `slipgate stats`, the sum over these VMs.
    pub(crate) stats: &'a Value,
    /// Whether the uplink duplicates.
    pub(crate) late_copies: bool,
    /// How often an engine was killed meanwhile.
    pub(crate) kills: u64,
}

impl FlowBooks<'_> {
    /// Compares: see [`Books::close`]. Returns a line for each thing that does not agree.
    pub(crate) fn disagreements(&self) -> String {
        let Self { records, stats, .. } = self;
        let mut wrong = String::new();
        each_flow_once(records, &mut wrong);
        kernel_total(records, stats, &mut wrong);
        let from_world = at_the_uplink(records, self.uplink, self.late_copies, &mut wrong);
        let guest = from_the_guest(records, self.from_guest, &mut wrong);
        let not_taken = from_world.packets + guest.packets;
        let lost = stats["lost_after_redirect"].as_u64().unwrap_or(0);
        let lost = lost + dropped_in_all(stats);
        // What a killed engine had in hand, one batch, is in no count.
        let in_hand = BATCH_FRAMES * self.kills;
        // A solicitation or a report that no engine took is lost too, and of no flow.
        let accounted = lost.saturating_sub(guest.of_link)..=lost + in_hand + from_world.resets;
        let told = format!(
            "{not_taken} packets in no record; {lost} counted as dropped or lost, up to {in_hand} in \
             the hands of an engine that was killed, up to {} late RSTs of the world's, up to {} \
             packets about the guest's link",
            from_world.resets, guest.of_link
        );
        if !accounted.contains(&not_taken) {
            let _ = writeln!(wrong, "{told}");
        }
        println!("{told}");
        into_the_guest(records, self.into_guest, stats, &mut wrong);
        wrong
    }
}

fn moved(scene: &Scene) -> [u64; 2] {
    [Direction::Out, Direction::In].map(|way| scene.guest.moved(way).frames)
}

fn each_flow_once(records: &[Record], wrong: &mut String) {
    let mut times: HashMap<&str, u32> = HashMap::new();
    for record in records {
        *times.entry(&record.id).or_default() += 1;
    }
    for (id, times) in times.iter().filter(|(_, times)| **times != 1) {
        let _ = writeln!(wrong, "the flow {id} was recorded {times} times");
    }
}

fn kernel_total(records: &[Record], stats: &Value, wrong: &mut String) {
    let sum = |of: fn(&Record) -> u64| records.iter().map(of).sum::<u64>();
    for (name, recorded) in [
        ("tx_packets", sum(|r| r.tx_packets)),
        ("tx_bytes", sum(|r| r.tx_bytes)),
        ("rx_packets", sum(|r| r.rx_packets)),
        ("rx_bytes", sum(|r| r.rx_bytes)),
    ] {
        if stats["kernel"][name].as_u64() != Some(recorded) {
            let shown = &stats["kernel"][name];
            let _ = writeln!(wrong, "{name}: records have {recorded}, stats {shown}");
        }
    }
}

/// L3 bytes of a RST without options.
fn reset_bytes(key: &FlowKey) -> u64 {
    if key.source.is_ipv4() { 40 } else { 60 }
}

/// Packets in no record.
#[derive(Clone, Copy, Default)]
struct NotTaken {
    packets: u64,
    /// How many of them may be RSTs that came late, which the host takes without an answer.
    resets: u64,
}

/// Compares; the packets from the world that are in no record, but for late copies that the host
/// answered.
fn at_the_uplink(
    records: &[Record],
    uplink: &Captured,
    late_copies: bool,
    wrong: &mut String,
) -> NotTaken {
    let by_tuple = sums(records, |record| &record.nat);
    let mut not_taken = NotTaken::default();
    for (key, said) in &by_tuple {
        let (sent, received) = (uplink.sent.of(*key), uplink.received.of(key.reversed()));
        let late = received.packets.saturating_sub(said.rx.packets);
        let resets = sent.packets.saturating_sub(said.tx.packets);
        let are_resets = sent.bytes == said.tx.bytes + reset_bytes(key) * resets;
        let answered = late_copies && resets <= late && are_resets;
        if sent != said.tx && !answered {
            let _ = writeln!(wrong, "{key:?}: the uplink sent {sent:?}, records {said:?}");
        }
        match received.packets.checked_sub(said.rx.packets) {
            Some(0) if received == said.rx => {}
            Some(more @ 1..) if answered => {
                let resets_received = uplink.received.resets.get(&key.reversed());
                not_taken.packets += more - resets;
                not_taken.resets += (more - resets).min(*resets_received.unwrap_or(&0));
            }
            Some(more @ 1..) => {
                println!("{key:?}: {more} more at the uplink than in records");
                not_taken.packets += more;
            }
            _ => {
                let _ = writeln!(wrong, "{key:?}: it received {received:?}, records {said:?}");
            }
        }
    }
    let ours =
        |key: &&FlowKey| ![1, ICMPV6].contains(&key.protocol) && key.source.port() >= NAT_PORTS;
    for key in uplink.sent.flows.keys().filter(ours) {
        if !by_tuple.contains_key(key) {
            let _ = writeln!(wrong, "{key:?}: sent by the uplink, and no record");
        }
    }
    not_taken
}

/// The guest's packets in no record.
#[derive(Clone, Copy, Default)]
struct NotRecorded {
    /// Of flows, or of what should have been one.
    packets: u64,
    /// About the guest's link: the engine answers them, or they are counted as lost while none runs.
    of_link: u64,
}

/// Compares.
fn from_the_guest(records: &[Record], out: &FlowCounts, wrong: &mut String) -> NotRecorded {
    let by_tuple = sums(records, |record| &record.guest);
    let mut not_recorded = NotRecorded::default();
    for (key, sent) in &out.flows {
        if is_of_link(key) {
            not_recorded.of_link += sent.packets;
            continue;
        }
        if key.destination.port() == 53 || key.destination.port() == 67 {
            continue;
        }
        let said = by_tuple.get(key).copied().unwrap_or_default();
        match sent.packets.checked_sub(said.tx.packets) {
            Some(0) if *sent == said.tx => {}
            Some(more @ 1..) => {
                println!("{key:?}: {more} more from the guest than in records");
                not_recorded.packets += more;
            }
            _ => {
                let _ = writeln!(wrong, "{key:?}: the guest sent {sent:?}, records {said:?}");
            }
        }
    }
    for key in by_tuple.keys().filter(|key| !out.flows.contains_key(key)) {
        let _ = writeln!(wrong, "{key:?}: recorded, and never sent by the guest");
    }
    not_recorded
}

/// Whether it is neighbour discovery or about the groups of the guest's link: no packet of a flow.
fn is_of_link(key: &FlowKey) -> bool {
    // Reports of groups have a hop-by-hop header, and a kernel repeats them at its own times.
    key.protocol == ICMPV6 || key.protocol == HOP_BY_HOP && key.destination.ip().is_multicast()
}

fn into_the_guest(records: &[Record], into: &FlowCounts, stats: &Value, wrong: &mut String) {
    let by_tuple = sums(records, |record| &record.guest);
    let answers = stats["engine"]["to_guest"]["packets"].as_u64().unwrap_or(0);
    let mut more_answers = 0;
    for (key, said) in &by_tuple {
        let got = into.of(key.reversed());
        match got.packets.checked_sub(said.rx.packets) {
            Some(0) if got == said.rx => {}
            Some(more @ 1..) => more_answers += more,
            _ => {
                let _ = writeln!(wrong, "{key:?}: the guest got {got:?}, records {said:?}");
            }
        }
    }
    if more_answers > answers {
        let _ = writeln!(
            wrong,
            "the guest got {more_answers} packets that no record has; the engine sent {answers}"
        );
    }
}

/// Flows with the same tuple, one after another, are one to a capture.
fn sums(records: &[Record], local: impl Fn(&Record) -> &str) -> HashMap<FlowKey, Both> {
    let mut sums: HashMap<FlowKey, Both> = HashMap::new();
    for record in records {
        let address = |text: &str| -> SocketAddr {
            text.parse()
                .unwrap_or_else(|error| panic!("{text:?}: {error}"))
        };
        let key = FlowKey {
            protocol: match record.proto.as_str() {
                "tcp" => 6,
                "udp" => 17,
                "icmp" => 1,
                other => panic!("protocol {other:?} in {record:?}"),
            },
            source: address(local(record)),
            destination: address(&record.remote),
        };
        let sum = sums.entry(key).or_default();
        sum.tx.packets += record.tx_packets;
        sum.tx.bytes += record.tx_bytes;
        sum.rx.packets += record.rx_packets;
        sum.rx.bytes += record.rx_bytes;
    }
    sums
}

/// Packets that `stats` says were dropped, all reasons.
pub(crate) fn dropped_in_all(stats: &Value) -> u64 {
    let drops = stats["drops"].as_object().into_iter().flatten();
    drops
        .filter_map(|(_, count)| count["packets"].as_u64())
        .sum()
}
