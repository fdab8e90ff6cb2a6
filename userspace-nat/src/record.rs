//! The flow log: one JSON line per flow, at its end.
//!
//! ```json
//! {"id":"5f3a91c2-17-3","vm":"a","proto":"tcp","guest":"10.0.2.15:40000","remote":"198.51.100.1:443",
//!  "nat":"192.0.2.1:61234","rule":2,"rule_text":"allow 198.51.100.0/24","verdict":"fast",
//!  "started":"2026-01-31T12:00:00.000Z","duration_ms":1500,"tx_packets":10,"tx_bytes":1200,
//!  "rx_packets":9,"rx_bytes":40000,"end":"closed","tcp":"closed","direction":"outbound",
//!  "path":"kernel"}
//! ```
//! `id` is what the maps were numbered when they were made, slot and generation: unique, so that a
//! log may outlive the maps, and an adopter knows what of these was recorded. Packets and bytes are
//! L3, as if segmented. `tcp` is absent for other protocols.
//! `dns_name` is there when a rule by name let the flow in: the name that opened its address.
//!
//! Lines are buffered and written once per turn of the loop, always whole lines in one write, so a
//! file opened for appending can be rotated at any time and be given anew
//! ([`FlowLog::set_writer`]). What can't be written is counted and lost: memory stays bounded.
use std::{
    fmt::Write as _,
    io::{self, Read, Seek, SeekFrom, Write},
    net::SocketAddrV4,
    time::{Duration, SystemTime},
};

use hashbrown::HashSet;
use serde::{Deserialize, Serialize};
use slipgate_abi::{Ip4, Protocol, slot::SlotFlags, tcp::TcpBits};

use crate::flow::Ended;

/// How much of a log's end is searched for ids at adoption, bytes: far more than one turn writes.
const TAIL: u64 = 4 << 20;

/// The log.
pub struct FlowLog {
    writer: Option<Box<dyn Write + Send>>,
    buffer: Vec<u8>,
    lines: u64,
    /// A write failed midway: the next one begins on a line of its own.
    torn: bool,
    written: u64,
    failed: u64,
    instance: u32,
}

impl std::fmt::Debug for FlowLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlowLog")
            .field("open", &self.writer.is_some())
            .field("written", &self.written)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

/// A line, as written.
#[derive(Serialize)]
struct Line<'a> {
    id: Id,
    vm: &'a str,
    proto: &'static str,
    guest: SocketAddrV4,
    remote: SocketAddrV4,
    nat: SocketAddrV4,
    rule: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule_text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dns_name: Option<&'a str>,
    verdict: &'static str,
    started: Rfc3339,
    duration_ms: u64,
    tx_packets: u64,
    tx_bytes: u64,
    rx_packets: u64,
    rx_bytes: u64,
    end: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tcp: Option<&'static str>,
    direction: &'static str,
    path: &'static str,
}

/// The names that a record shows and the slot does not have.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    /// The VM's.
    pub vm: &'a str,
    /// The rule as typed, where it is known.
    pub rule: Option<&'a str>,
    /// The name that DNS opened the address by, if one did.
    pub dns: Option<&'a str>,
}

impl FlowLog {
    /// A log to this writer; without one, records are dropped uncounted.
    pub fn new(writer: Option<Box<dyn Write + Send>>) -> Self {
        Self {
            writer,
            buffer: Vec::new(),
            lines: 0,
            torn: false,
            written: 0,
            failed: 0,
            instance: 0,
        }
    }

    /// Says what the slots to be recorded are unique within.
    pub fn set_instance(&mut self, instance: u32) {
        self.instance = instance;
    }

    /// Goes on with another writer (rotation). What is buffered goes to the old one.
    pub fn set_writer(&mut self, writer: Option<Box<dyn Write + Send>>) {
        self.flush();
        self.writer = writer;
        self.torn = false;
    }

    /// Buffers a record. `now`: the wall clock at `ended.ended_ns`.
    pub fn record(&mut self, ended: &Ended, names: Names<'_>, now: SystemTime) {
        if self.writer.is_none() {
            return;
        }
        let slot = &ended.content;
        let duration = Duration::from_nanos(ended.ended_ns.saturating_sub(slot.created_ns));
        let is_tcp = slot.protocol == Protocol::Tcp;
        let at = |addr: Ip4, port| SocketAddrV4::new(addr.into(), port);
        let line = Line {
            id: Id {
                instance: self.instance,
                slot: ended.slot,
                generation: slot.generation,
            },
            vm: names.vm,
            proto: slot.protocol.name(),
            guest: at(slot.guest, slot.guest_port),
            remote: at(slot.remote, slot.remote_port),
            nat: at(slot.nat, slot.nat_port),
            rule: slot.rule,
            rule_text: names.rule,
            dns_name: names.dns,
            // What it was before it began to close.
            verdict: "fast",
            started: Rfc3339(now.checked_sub(duration).unwrap_or(SystemTime::UNIX_EPOCH)),
            duration_ms: duration.as_millis() as u64,
            tx_packets: slot.tx_packets,
            tx_bytes: slot.tx_bytes,
            rx_packets: slot.rx_packets,
            rx_bytes: slot.rx_bytes,
            end: ended.reason.name(),
            tcp: is_tcp.then(|| TcpBits(slot.tcp).phase().name()),
            direction: if slot.flags & SlotFlags::INBOUND != 0 {
                "inbound"
            } else {
                "outbound"
            },
            path: "kernel",
        };
        let begin = self.buffer.len();
        if serde_json::to_writer(&mut self.buffer, &line).is_err() {
            self.buffer.truncate(begin);
            self.failed += 1;
            return;
        }
        self.buffer.push(b'\n');
        self.lines += 1;
    }

    /// Writes what is buffered.
    pub fn flush(&mut self) {
        let Some(writer) = &mut self.writer else {
            return;
        };
        if self.buffer.is_empty() {
            return;
        }
        if std::mem::take(&mut self.torn) {
            self.buffer.insert(0, b'\n');
        }
        match writer.write_all(&self.buffer).and_then(|()| writer.flush()) {
            Ok(()) => self.written += self.lines,
            Err(_) => {
                self.failed += self.lines;
                self.torn = true;
            }
        }
        self.lines = 0;
        self.buffer.clear();
    }

    /// Records written, and records lost because writing failed.
    pub fn counts(&self) -> (u64, u64) {
        (self.written, self.failed)
    }
}

/// A record's id.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Id {
    /// What the maps were numbered when they were made.
    pub instance: u32,
    /// The slot's index.
    pub slot: u32,
    /// Its generation.
    pub generation: u32,
}

impl Serialize for Id {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (instance, slot) = (self.instance, self.slot);
        write!(f, "{instance:08x}-{slot}-{}", self.generation)
    }
}

impl Id {
    /// From its text, as in records.
    pub fn parse(text: &str) -> Option<Self> {
        let (instance, rest) = text.split_once('-')?;
        let (slot, generation) = rest.split_once('-')?;
        Some(Self {
            instance: u32::from_str_radix(instance, 16).ok()?,
            slot: slot.parse().ok()?,
            generation: generation.parse().ok()?,
        })
    }
}

/// The ids of the records in a log's last 4 MiB. A torn first or last line is passed over.
pub fn recorded_ids(log: &mut (impl Read + Seek)) -> io::Result<HashSet<Id>> {
    #[derive(Deserialize)]
    struct OnlyId {
        id: String,
    }
    let len = log.seek(SeekFrom::End(0))?;
    log.seek(SeekFrom::Start(len.saturating_sub(TAIL)))?;
    let mut tail = Vec::new();
    log.take(TAIL).read_to_end(&mut tail)?;
    let lines = tail.split(|b| *b == b'\n');
    Ok(lines
        .filter_map(|line| serde_json::from_slice::<OnlyId>(line).ok())
        .filter_map(|line| Id::parse(&line.id))
        .collect())
}

/// A time as RFC 3339 has it, UTC, to the millisecond.
#[derive(Clone, Copy, Debug)]
pub struct Rfc3339(pub SystemTime);

impl std::fmt::Display for Rfc3339 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let since = self
            .0
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
        let (year, month, day) = civil_from_days(days);
        write!(f, "{year:04}-{month:02}-{day:02}T")?;
        let (hour, minute) = (second / 3_600, second / 60 % 60);
        write!(f, "{hour:02}:{minute:02}:{:02}.", second % 60)?;
        write!(f, "{:03}Z", since.subsec_millis())
    }
}

impl Serialize for Rfc3339 {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(24);
        let _ = write!(text, "{self}");
        serializer.serialize_str(&text)
    }
}

/// Year, month and day of a day since 1970-01-01 (Howard Hinnant, "chrono-compatible low-level
/// date algorithms").
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let mp = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
#[path = "record_test.rs"]
mod tests;
