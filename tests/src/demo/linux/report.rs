//! The report at the end, with the checks that decide over the exit status.

use std::time::Duration;

use serde_json::Value;
use slipgate_testbed::{
    Result,
    clients::tcp::{ConnectOutcome, Transfer},
    streams::{Receipt, hexadecimal},
    world::SERVER,
};

use super::{
    stage::{DENIED, NAME, Stage},
    workload::{Bulk, DOWN_SEED, Seen, UP_SEED, ms},
};
use crate::{
    flow_table,
    progress::{Progress, bytes, grouped},
};

pub(crate) fn print(stage: &Stage, seen: &Seen, progress: &mut Progress) -> Result<()> {
    let stats = stage.slipgate.stats()?;
    network(seen, progress);
    transfers(&seen.bulk, &seen.connects, progress);
    flow_table::print(&seen.bulk.flows, progress);
    one_slot(&seen.bulk.slot, progress);
    who_worked(&stats["total"], &seen.bulk, progress);
    refusals(&stats["total"], seen, progress);
    Ok(())
}

fn network(seen: &Seen, progress: &mut Progress) {
    let lease = &seen.lease;
    let listed = |addresses: &[std::net::Ipv4Addr]| {
        let shown: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        shown.join(", ")
    };
    progress.heading("Lease and names");
    let router = lease
        .router
        .map(|router| router.to_string())
        .unwrap_or_default();
    progress.line(&format!(
        "  {}/{}  gateway {router}  DNS {}  MTU {}  for {} s",
        lease.address,
        lease.prefix,
        listed(&lease.dns),
        lease.mtu.unwrap_or(0),
        lease.duration.as_secs()
    ));
    let (first, second) = (&seen.first_answer, &seen.second_answer);
    progress.line(&format!(
        "  {NAME} is {}: {:.2} ms asked, {:.2} ms from the cache, {:.2} ms by 192.0.2.53",
        listed(&first.addresses()),
        ms(first.took),
        ms(second.took),
        ms(seen.foreign_answer.took)
    ));
    let answers = [first, second, &seen.foreign_answer];
    progress.check(
        answers.iter().all(|answer| answer.addresses() == [SERVER]) && seen.questions_upstream == 1,
        "three questions to two resolvers, one went upstream, all answers right",
    );
    progress.check(
        seen.page.0 == 200 && seen.page.1.starts_with(b"Hello") && seen.pings == 3,
        "a page by HTTP, three echoes by ping",
    );
    let udp = &seen.datagrams;
    progress.check(
        udp.received == udp.sent && udp.corrupt == 0 && udp.duplicated == 0,
        &format!(
            "{} of {} datagrams came back, unchanged",
            udp.received, udp.sent
        ),
    );
}

fn transfers(bulk: &Bulk, connects: &[Duration], progress: &mut Progress) {
    progress.heading("Connections and bytes");
    let at = |share: f64| connects[((connects.len() - 1) as f64 * share) as usize];
    progress.line(&format!(
        "  {} connect-close   p50 {:.0} µs   p99 {:.0} µs",
        grouped(connects.len() as u64),
        ms(at(0.5)) * 1e3,
        ms(at(0.99)) * 1e3
    ));
    for (name, transfer, seed) in [("down", &bulk.down, DOWN_SEED), ("up", &bulk.up, UP_SEED)] {
        progress.line(&format!(
            "  {name:<5} {:>10}   {:6.2} Gb/s   sha256 {}",
            bytes(transfer.receipt.bytes),
            transfer.bits_per_second() / 1e9,
            hash(transfer)
        ));
        let expected = Receipt::expected(transfer.receipt.bytes, seed);
        progress.check(
            transfer.receipt == expected,
            "the receiver's hash is the sender's",
        );
    }
}

fn hash(transfer: &Transfer) -> String {
    hexadecimal(&transfer.receipt.sha256[..12]) + "…"
}

fn one_slot(slot: &str, progress: &mut Progress) {
    progress.heading("The upload's flow meanwhile (bpftool map lookup pinned …/SLOTS)");
    let wanted = [
        "verdict",
        "protocol",
        "guest_port",
        "nat_port",
        "remote_port",
        "tx_packets",
        "tx_bytes",
        "rx_packets",
        "rx_bytes",
    ];
    let named: Vec<String> = slot
        .lines()
        .map(|line| line.trim().trim_end_matches(',').replace('"', ""))
        .filter(|line| {
            wanted
                .iter()
                .any(|name| line.starts_with(&format!("{name}:")))
        })
        .collect();
    for row in named.chunks(3) {
        let cells: Vec<String> = row.iter().map(|cell| format!("{cell:<28}")).collect();
        progress.line(&format!("  {}", cells.concat().trim_end()));
    }
    progress.check(
        named.len() == wanted.len() && named.iter().any(|line| line.contains("Fast")),
        "a live flow prints by name, its verdict Fast",
    );
}

/// Kernel and engine shares, and the law that no data frame goes to the engine.
fn who_worked(total: &Value, bulk: &Bulk, progress: &mut Progress) {
    progress.heading("Packets, as if segmented (slipgate stats)");
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let kernel = &total["kernel"];
    let engine = &total["engine"];
    let of_kernel = number(&kernel["tx_packets"]) + number(&kernel["rx_packets"]);
    let ways = ["from_guest", "to_guest", "from_world", "to_world"];
    let of_engine: u64 = ways.iter().map(|way| number(&engine[way]["packets"])).sum();
    let all = (of_kernel + of_engine).max(1) as f64;
    for (name, packets) in [("kernel", of_kernel), ("engine", of_engine)] {
        let share = packets as f64 * 100.0 / all;
        progress.line(&format!(
            "  {name}  {:>12}   {share:8.4} %",
            grouped(packets)
        ));
    }
    let sent = bulk.sent;
    let due = sent.for_the_engine();
    progress.line(&format!(
        "  during the bulk transfers the guest sent {} data frames, {} SYN, {} DNS, {} DHCP, {} ARP",
        grouped(sent.data),
        sent.syn,
        sent.dns,
        sent.dhcp,
        sent.arp + sent.arp_gateway
    ));
    progress.check(
        bulk.handed_over == due && due > 0 && sent.data > 0,
        &format!(
            "the kernel handed {} to the engine: SYN + DNS + DHCP (+ ARP), not one data frame",
            bulk.handed_over
        ),
    );
    let drops = total["drops"].as_object();
    let drops: Vec<String> = drops
        .into_iter()
        .flatten()
        .map(|(reason, count)| format!("{reason} {}", number(&count["packets"])))
        .collect();
    let lost = number(&total["lost_after_redirect"]);
    progress.line(&format!(
        "  drops: {}; lost after redirect: {lost}",
        if drops.is_empty() {
            "none".to_owned()
        } else {
            drops.join(", ")
        }
    ));
    progress.check(lost == 0, "nothing was lost on the way to the engine");
}

fn refusals(total: &Value, seen: &Seen, progress: &mut Progress) {
    progress.heading(&format!("Denied by rule (--deny {DENIED})"));
    for line in seen.why_denied.1.lines() {
        progress.line(&format!("  why: {}", line.trim_start()));
    }
    let at_once = Duration::from_millis(500);
    progress.check(
        matches!(seen.refused, ConnectOutcome::Refused(took) if took < at_once),
        "the connection was refused at once, by RST",
    );
    progress.check(
        !seen.why_denied.0 && seen.why_denied.1.contains(DENIED) && seen.why_allowed.0,
        "`slipgate why` names the rule; the other server it would let through",
    );
    progress.check(
        total["refused"]["rule"].as_u64() == Some(1),
        "`slipgate stats` counts one flow refused by rule",
    );
}
