//! The JSON objects that the guest prints.

use alloc::format;
use core::net::IpAddr;

use crate::{
    command::Workload,
    histogram::Histogram,
    json::Object,
    net::{InboxCounters, Ipv6Lease, Lease},
    platform::NicCounters,
    workload::{Answer, DnsError, Failure, Outcome, Pinged, Plan, Served},
};

/// Line that announces the guest after boot.
pub(crate) fn boot(cpus: usize, pairs: u16, mac: [u8; 6], uptime_ns: u64) -> Object {
    let [a, b, c, d, e, f] = mac;
    let mac = format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
    Object::default()
        .truth("boot", true)
        .number("cpus", cpus as u64)
        .number("pairs", pairs.into())
        .text("mac", &mac)
        .microseconds("uptime_us", uptime_ns)
}

/// Line for the lease or the static address.
pub(crate) fn lease(lease: &Lease, mtu: usize, took_ns: u64) -> Object {
    let mut line = Object::about("workload", "lease").shown(
        "address",
        format_args!("{}/{}", lease.address, lease.prefix),
    );
    if let Some(router) = lease.router {
        line = line.shown("router", router);
    }
    if let Some(server) = lease.server {
        line = line.shown("server", server);
    }
    line.shown_list("dns", &lease.dns)
        .number("mtu", mtu as u64)
        .truth("mtu_by_dhcp", lease.mtu.is_some())
        .microseconds("took_us", took_ns)
}

/// Line for the IPv6 address.
pub(crate) fn ipv6(lease: &Ipv6Lease, mtu: usize, took_ns: u64) -> Object {
    Object::about("workload", "ipv6")
        .shown(
            "address",
            format_args!("{}/{}", lease.address, lease.prefix),
        )
        .shown("router", lease.router)
        .number("mtu", mtu as u64)
        .microseconds("took_us", took_ns)
}

/// Line for a DNS lookup.
pub(crate) fn dns(workload: &Workload, name: &str, answer: &Result<Answer, DnsError>) -> Object {
    let line = Object::about("workload", workload.name()).text("name", name);
    match answer {
        Ok(answer) => line
            .shown_list("addresses", &answer.addresses)
            .number("questions", answer.questions)
            .microseconds("ttfb_us", answer.ttfb_ns),
        Err(error) => line.shown("error", error),
    }
}

/// Line for a series of echo requests.
pub(crate) fn ping(to: IpAddr, count: u32, pinged: &Pinged) -> Object {
    let line = Object::about("workload", "ping")
        .shown("to", to)
        .number("n", count.into())
        .number("lost", pinged.lost);
    latency(line, &pinged.latency)
}

/// Line at the start of `serve`: from now on, the ports echo.
pub(crate) fn serving(ports: &[u16], ms: u32) -> Object {
    let line = Object::default().shown_list("serving", ports);
    line.number("ms", ms.into())
}

/// Line at the end of `serve`, with its totals.
pub(crate) fn served(ports: &[u16], ms: u32, served: &Served) -> Object {
    Object::about("workload", "serve")
        .shown_list("ports", ports)
        .number("ms", ms.into())
        .number("connections", served.connections)
        .number("datagrams", served.datagrams)
        .number("bytes", served.bytes)
}

/// Line for a workload that all CPUs shared.
pub(crate) fn shared_out(plan: &Plan, outcome: &Outcome) -> Object {
    let line = Object::about("workload", plan.workload.name()).shown("server", plan.server);
    let took_ns = outcome.ended_ns.saturating_sub(plan.started_ns);
    let line = match &plan.workload {
        Workload::Connections { exchange, .. } => line.text("exchange", exchange.name()),
        Workload::Stream {
            bytes,
            direction,
            raw,
            ..
        } => line
            .text("direction", direction.name())
            .truth("raw", *raw)
            .number("bytes_each", *bytes),
        Workload::Flood { .. } => line.number("frame_bytes", plan.frame_bytes().into()),
        _ => line,
    };
    let (count, at_once) = plan.workload.shared().unwrap_or_default();
    let line = line.number("n", count).number("at_once", at_once.into());
    let mut failures = Object::default();
    for ((_, name), count) in Failure::ALL.iter().zip(outcome.failures) {
        if count > 0 {
            failures = failures.number(name, count);
        }
    }
    let mut line = line
        .number("done", outcome.done)
        .number("failed", outcome.failed())
        .object("failures", failures)
        .number("bytes", outcome.bytes)
        .microseconds("took_us", took_ns);
    if let Some(note) = &outcome.note {
        line = line.text("note", note);
    }
    line = match &plan.workload {
        Workload::Stream { .. } => line.ratio("gbit_per_s", outcome.bytes * 8, took_ns),
        _ => line.ratio("per_second", outcome.done * 1_000_000_000, took_ns),
    };
    if outcome.latency.count() > 0 {
        line = latency(line, &outcome.latency);
    }
    if outcome.connect.count() > 0 {
        line = line.microseconds("connect_p50_us", outcome.connect.quantile_ns(500));
    }
    let resets = &outcome.reset_after_restore;
    if resets.count() > 0 {
        let times = Object::default()
            .number("n", resets.count())
            .microseconds("p50_us", resets.quantile_ns(500))
            .microseconds("p99_us", resets.quantile_ns(990))
            .microseconds("max_us", resets.max_ns());
        line = line.object("reset_after_restore", times);
    }
    if outcome.port_waits > 0 {
        line = line.number("port_waits", outcome.port_waits);
    }
    frames(line, outcome.nic)
}

/// Line for a queue pair at the end, with the inbox of its CPU.
pub(crate) fn pair(pair: usize, counters: NicCounters, inbox: InboxCounters) -> Object {
    frames(Object::default().number("pair", pair as u64), counters)
        .number("rx_bytes", counters.rx_bytes)
        .number("tx_bytes", counters.tx_bytes)
        .number("rx_merged", counters.rx_merged)
        .number("rx_checksum_offloaded", counters.rx_checksum_offloaded)
        .number("rx_dropped", counters.rx_dropped)
        .number("passed_in", inbox.passed)
        .number("passed_in_dropped", inbox.dropped)
}

fn latency(line: Object, latency: &Histogram) -> Object {
    line.microseconds("p50_us", latency.quantile_ns(500))
        .microseconds("p99_us", latency.quantile_ns(990))
        .microseconds("min_us", latency.min_ns())
        .microseconds("max_us", latency.max_ns())
        .microseconds("mean_us", latency.mean_ns())
}

fn frames(line: Object, nic: NicCounters) -> Object {
    line.number("rx_frames", nic.rx_frames)
        .number("tx_frames", nic.tx_frames)
        .number("tx_segmented", nic.tx_segmented)
        .number("tx_full", nic.tx_full)
        .number("interrupts", nic.interrupts)
        .number("kicks", nic.kicks)
}
