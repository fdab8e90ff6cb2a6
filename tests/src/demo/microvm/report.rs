//! The report at the end, with the checks that decide over the exit status.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{By, CONNECTIONS, Carried, DENIED, NAME, STREAM_BYTES, Seen, ms, number};
use crate::{
    flow_table,
    progress::{Progress, bytes, grouped},
};

/// Two connections each way.
const STREAMS: u64 = 4;

pub(super) fn print(seen: &Seen, by: &By, questions_upstream: u64, progress: &mut Progress) {
    boot(seen, by, progress);
    network(seen, questions_upstream, progress);
    connections(seen, progress);
    streams(seen, progress);
    flow_table::print(&seen.flows, progress);
    pairs(seen, by.pairs(), progress);
    who_worked(seen, by, progress);
    end(seen, progress);
}

fn boot(seen: &Seen, by: &By, progress: &mut Progress) {
    progress.heading("Boot");
    let report = &seen.end.report;
    let of = |key: &str| report[key].as_f64().unwrap_or(0.0) / 1e3;
    let (prepared, first_line) = (of("prepared_us"), of("first_line_us"));
    let all = ms(seen.lines.boot.after);
    let made = match by {
        By::Root(_) => "BPF programs, engine and VMM",
        By::User(_) => "engine and VMM",
    };
    progress.line(&format!(
        "  {all:.0} ms from the command until the guest's stack is up: {prepared:.0} for {made}, \
         {first_line:.1} from its first instruction to its first line, {:.0} for its \
         CPUs, PCI bus and network card",
        all - prepared - first_line
    ));
    let machine = seen.end.said("machine");
    let guest = machine.first().map_or(&Value::Null, |line| line);
    progress.line(&format!(
        "  {} vCPUs, {} MiB, {}; network card with {} queue pairs, MSI-X",
        guest["cpus"],
        guest["memory_mib"],
        guest["clock"].as_str().unwrap_or("?"),
        by.pairs()
    ));
}

fn network(seen: &Seen, questions_upstream: u64, progress: &mut Progress) {
    progress.heading("Lease and names");
    let lease = &seen.lines.lease;
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    progress.line(&format!(
        "  {}  gateway {}  DNS {}  MTU {}  in {:.2} ms",
        text(&lease["address"]),
        text(&lease["router"]),
        text(&lease["dns"][0]),
        lease["mtu"],
        lease["took_us"].as_f64().unwrap_or(0.0) / 1e3
    ));
    let questions = &seen.lines.dns;
    let took = |answer: &Value| answer["ttfb_us"].as_f64().unwrap_or(0.0) / 1e3;
    // One look-up alone may have waited for a CPU of the host's.
    let mut cached: Vec<f64> = questions.iter().skip(1).map(took).collect();
    cached.sort_by(f64::total_cmp);
    progress.line(&format!(
        "  {NAME} is {}: {:.2} ms asked, {:.2} ms from the cache (median of {}); ping p50 {:.0} µs",
        text(&questions[0]["addresses"][0]),
        took(&questions[0]),
        cached[cached.len() / 2],
        cached.len(),
        seen.lines.ping["p50_us"].as_f64().unwrap_or(0.0)
    ));
    let answered = questions
        .iter()
        .all(|answer| answer["addresses"][0] == super::SERVER.to_string());
    progress.check(
        answered && questions_upstream == 1 && seen.lines.ping["lost"] == 0,
        &format!(
            "{} questions, one went upstream, all answers right; three echoes",
            questions.len()
        ),
    );
    for line in seen.why_denied.lines() {
        progress.line(&format!("  why {DENIED}:443: {}", line.trim_start()));
    }
    progress.check(
        seen.why_denied.starts_with("no") && seen.why_denied.contains(DENIED),
        "`slipgate why` names the rule while the guest runs",
    );
}

fn connections(seen: &Seen, progress: &mut Progress) {
    progress.heading("Connections (connect, wait for the server's end, close; two at once)");
    let crr = &seen.lines.connections;
    let done = number(&crr["done"]);
    progress.line(&format!(
        "  {}   p50 {:.0} µs   p99 {:.0} µs   {:.0} a second",
        grouped(done),
        crr["p50_us"].as_f64().unwrap_or(0.0),
        crr["p99_us"].as_f64().unwrap_or(0.0),
        crr["per_second"].as_f64().unwrap_or(0.0)
    ));
    let before = Machine::of(&seen.before_connections);
    let after = Machine::of(&seen.after_connections);
    let each = |after: u64, before: u64| (after - before) as f64 / done.max(1) as f64;
    progress.line(&format!(
        "  per connection: {:.2} interrupts, {:.2} exits to the VMM (but for the console's)",
        each(after.interrupts, before.interrupts),
        each(after.exits, before.exits),
    ));
    progress.check(
        done == CONNECTIONS && number(&crr["failed"]) == 0,
        "every connection was made and ended in order",
    );
}

fn streams(seen: &Seen, progress: &mut Progress) {
    progress.heading("Bytes (two connections each way, each byte checked by its receiver)");
    for (name, stream) in [("up", &seen.lines.up), ("down", &seen.lines.down)] {
        progress.line(&format!(
            "  {name:<5} {:>10}   {:6.2} Gb/s",
            bytes(number(&stream["bytes"])),
            stream["gbit_per_s"].as_f64().unwrap_or(0.0)
        ));
        progress.check(
            number(&stream["done"]) == 2
                && number(&stream["failed"]) == 0
                && number(&stream["bytes"]) == 2 * STREAM_BYTES,
            &format!("both streams {name} came whole"),
        );
    }
}

/// The queue pairs, as the VMM counted them. `wanted`: how many there are.
fn pairs(seen: &Seen, wanted: usize, progress: &mut Progress) {
    progress.heading("Queue pairs (the VMM's counters at the end)");
    let columns = [
        ("tx frames", "tx_frames"),
        ("rx frames", "rx_frames"),
        ("kicks", "kicks"),
        ("interrupts", "interrupts"),
        ("suppressed", "interrupts_suppressed"),
        ("system calls", "syscalls"),
    ];
    let head = columns.map(|(name, _)| format!("{name:>14}")).concat();
    progress.line(&format!("  pair{head}{:>14}", "drops"));
    let pairs = seen.end.report["vmm"]["net"]["pairs"].as_array();
    let pairs = pairs.map_or(&[][..], Vec::as_slice);
    for (index, pair) in pairs.iter().enumerate() {
        let cells = columns.map(|(_, key)| format!("{:>14}", grouped(number(&pair[key]))));
        let drops = sum(&pair["drops"]);
        progress.line(&format!("  {index:<4}{}{drops:>14}", cells.concat()));
    }
    let carried =
        |pair: &Value| number(&pair["tx_frames"]) > 100 && number(&pair["rx_frames"]) > 100;
    progress.check(
        pairs.len() == wanted && pairs.iter().all(carried),
        "every queue pair carried traffic, both ways",
    );
    progress.check(
        pairs.iter().all(|pair| sum(&pair["drops"]) == 0),
        "the network card dropped nothing",
    );
}

/// Who handled the packets: in hybrid mode the kernel or the engine.
fn who_worked(seen: &Seen, by: &By, progress: &mut Progress) {
    progress.heading("Packets, as if segmented (slipgate stats)");
    let (start, bulk) = (
        Nat::of(&seen.after_connections),
        Nat::of(&seen.after_streams),
    );
    let all = Nat::of_vm(&seen.end.report["nat"]);
    let share = |nat: &Nat| nat.kernel as f64 * 100.0 / (nat.kernel + nat.engine).max(1) as f64;
    let bulk = Nat {
        kernel: bulk.kernel - start.kernel,
        engine: bulk.engine - start.engine,
    };
    let (moved, decided, share_of) = match by {
        By::Root(_) => ("kernel", "engine", "by the kernel"),
        By::User(_) => ("of flows", "decided on", "of flows"),
    };
    for (what, nat) in [("bulk", &bulk), ("in all", &all)] {
        progress.line(&format!(
            "  {what:<7} {moved} {:>10}   {decided} {:>8}   {:.3} % {share_of}",
            grouped(nat.kernel),
            grouped(nat.engine),
            share(nat)
        ));
    }
    match &seen.port {
        Some((before, after)) => engine_port(*before, after, progress),
        None => frames_and_segments(seen, &all, progress),
    }
    let nat = &seen.end.report["nat"];
    let drops = nat["drops"].as_object().into_iter().flatten();
    let drops: Vec<String> = drops
        .map(|(reason, count)| format!("{reason} {}", number(&count["packets"])))
        .collect();
    let lost = number(&nat["lost_after_redirect"]);
    progress.line(&format!(
        "  drops: {}; lost after redirect: {lost}",
        match drops.is_empty() {
            true => "none".to_owned(),
            false => drops.join(", "),
        }
    ));
    progress.check(lost == 0, "nothing was lost on the way to the engine");
}

/// That streams passed whole between guest and engine: a frame has many segments.
fn frames_and_segments(seen: &Seen, all: &Nat, progress: &mut Progress) {
    let pair = &seen.end.report["vmm"]["net"]["pairs"][0];
    let frames = number(&pair["tx_frames"]) + number(&pair["rx_frames"]);
    progress.line(&format!(
        "  {} packets in {} frames between the guest's card and the engine",
        grouped(all.kernel + all.engine),
        grouped(frames)
    ));
    progress.check(
        frames > 0 && all.kernel > 4 * frames,
        "streams passed whole: the card carried a fourth of the packets at most",
    );
}

/// Which frames went to the engine by its port, and that none of the streams' did but their first.
/// An engine that is awake takes first packets from its ring: these do not pass the port.
fn engine_port(before: u64, all: &Carried, progress: &mut Progress) {
    let listed = |kinds: &BTreeMap<&str, u64>| {
        let each: Vec<String> = kinds
            .iter()
            .map(|(kind, frames)| format!("{} {kind}", grouped(*frames)))
            .collect();
        each.join(", ")
    };
    progress.line(&format!(
        "  the engine port carried {}",
        listed(&all.by_kind_since(0))
    ));
    progress.check(
        all.frames() == all.counted,
        &format!(
            "which is all of the {} frames that the device counted",
            all.counted
        ),
    );
    let of_streams = all.by_kind_since(before);
    let others = ["SYN", "ARP", "DNS", "DHCP"];
    progress.check(
        of_streams
            .get("SYN")
            .is_none_or(|&frames| frames <= STREAMS)
            && of_streams.keys().all(|kind| others.contains(kind)),
        &format!(
            "of the streams it carried {}, and not one frame of data",
            match of_streams.is_empty() {
                true => "none".into(),
                false => listed(&of_streams),
            }
        ),
    );
}

fn end(seen: &Seen, progress: &mut Progress) {
    progress.heading("End");
    let end = &seen.end;
    if end.status.code() != Some(0) {
        progress.line("  what the guest and slipgate said:");
        let console = end.lines.iter().map(|line| line.text.as_str());
        for line in console.chain(end.stderr.lines()) {
            progress.line(&format!("    {line}"));
        }
    }
    progress.check(
        end.status.code() == Some(0) && end.report["outcome"] == "exited",
        &format!("the guest ended with its own status, {}", end.status),
    );
    progress.check(
        seen.left.is_empty(),
        &match seen.left.is_empty() {
            true => "nothing is left: no pin, no device, no table".to_owned(),
            false => format!("left: {}", seen.left.join(", ")),
        },
    );
}

/// The machine's counters out of `slipgate stats`.
struct Machine {
    interrupts: u64,
    /// But for the console's bytes.
    exits: u64,
}

impl Machine {
    fn of(stats: &Value) -> Self {
        let vmm = &stats["vms"][0]["vmm"];
        let list = |list: &Value| list.as_array().cloned().unwrap_or_default();
        let exits = |vcpu: &Value| {
            let kinds = [
                "port_reads",
                "port_writes",
                "mmio_reads",
                "mmio_writes",
                "other",
            ];
            kinds.iter().map(|kind| number(&vcpu[*kind])).sum::<u64>()
        };
        let console = number(&vmm["serial"]["output_bytes"]);
        Self {
            interrupts: list(&vmm["net"]["pairs"])
                .iter()
                .map(|pair| number(&pair["interrupts"]))
                .sum(),
            exits: list(&vmm["vcpus"]).iter().map(exits).sum::<u64>() - console,
        }
    }
}

/// Packets by who handled them.
struct Nat {
    kernel: u64,
    engine: u64,
}

impl Nat {
    fn of(stats: &Value) -> Self {
        Self::of_vm(&stats["vms"][0])
    }

    fn of_vm(vm: &Value) -> Self {
        let (kernel, engine) = (&vm["kernel"], &vm["engine"]);
        let ways = ["from_guest", "to_guest", "from_world", "to_world"];
        Self {
            kernel: number(&kernel["tx_packets"]) + number(&kernel["rx_packets"]),
            engine: ways
                .iter()
                .map(|way| number(&engine[*way]["packets"]))
                .sum(),
        }
    }
}

fn sum(object: &Value) -> u64 {
    let values = object.as_object().into_iter().flatten();
    values.map(|(_, value)| number(value)).sum()
}
