//! Performance goals of slipgate. Goals are shown beside the measured values, and never asserted: a
//! loaded machine is not the program's fault.

use serde::Serialize;

use crate::{
    clones,
    contender::REFERENCE,
    disk, disk_debian, fleet,
    program_cost::{HIT_METRICS, HIT_METRICS6},
    results::Table,
    scale,
    statistics::Summary,
    vsock,
};

const OURS: &str = "slipgate";

/// Value that is compared with a goal.
#[derive(Clone, Copy)]
enum Measure {
    /// Ratio of slipgate to another contender.
    To(&'static str),
    /// Ratio of slipgate's value to its own of another metric.
    ToMetric(&'static str),
    /// The absolute value of slipgate.
    Own,
}

/// Direction of a goal.
#[derive(Clone, Copy)]
enum Side {
    AtLeast(f64),
    AtMost(f64),
    /// Equal to the compared value, within the differences between rounds.
    Same,
    /// Reported without a judgement.
    Told,
}

const GOALS: [(&str, Measure, Side); 50] = [
    ("bulk-up", Measure::To(REFERENCE), Side::AtLeast(1.0)),
    ("bulk-down", Measure::To(REFERENCE), Side::AtLeast(1.0)),
    ("bulk-up", Measure::To("pasta"), Side::AtLeast(3.0)),
    ("bulk-down", Measure::To("pasta"), Side::AtLeast(3.0)),
    ("bulk-up", Measure::To("slirp4netns"), Side::AtLeast(2.0)),
    ("bulk-down", Measure::To("slirp4netns"), Side::AtLeast(2.0)),
    // Theirs with frames of 64 KB between guest and NAT, ours with the uplink's.
    ("bulk-up", Measure::To("pasta-65520"), Side::AtLeast(1.0)),
    ("bulk-down", Measure::To("pasta-65520"), Side::AtLeast(1.0)),
    (
        "bulk-up",
        Measure::To("slirp4netns-65520"),
        Side::AtLeast(2.0),
    ),
    (
        "bulk-down",
        Measure::To("slirp4netns-65520"),
        Side::AtLeast(2.0),
    ),
    (
        "connect-close p50",
        Measure::To(REFERENCE),
        Side::AtMost(1.2),
    ),
    ("udp-64 rate", Measure::To(REFERENCE), Side::AtLeast(1.3)),
    ("udp-64 rate", Measure::To("forwarding"), Side::AtLeast(1.0)),
    ("bulk-up-ipv6", Measure::To(REFERENCE), Side::AtLeast(1.0)),
    ("bulk-down-ipv6", Measure::To(REFERENCE), Side::AtLeast(1.0)),
    (
        "connect-close-ipv6 p50",
        Measure::To(REFERENCE),
        Side::AtMost(1.2),
    ),
    (
        "udp-64-ipv6 rate",
        Measure::To(REFERENCE),
        Side::AtLeast(1.3),
    ),
    (
        "udp-64-ipv6 rate",
        Measure::To("forwarding"),
        Side::AtLeast(1.0),
    ),
    (
        HIT_METRICS6[0],
        Measure::ToMetric(HIT_METRICS[0]),
        Side::AtMost(1.25),
    ),
    (
        HIT_METRICS6[1],
        Measure::ToMetric(HIT_METRICS[1]),
        Side::AtMost(1.25),
    ),
    (
        HIT_METRICS6[2],
        Measure::ToMetric(HIT_METRICS[2]),
        Side::AtMost(1.25),
    ),
    (
        HIT_METRICS6[3],
        Measure::ToMetric(HIT_METRICS[3]),
        Side::AtMost(1.25),
    ),
    ("new-flows-udp", Measure::Own, Side::AtLeast(120.0)),
    (
        "new-flows-udp per CPU second",
        Measure::Own,
        Side::AtLeast(120.0),
    ),
    (
        "new-flows-tcp per CPU second",
        Measure::Own,
        Side::AtLeast(120.0),
    ),
    ("new-flows-tcp", Measure::Own, Side::AtLeast(120.0)),
    ("rates-up share", Measure::Own, Side::AtLeast(95.0)),
    ("rates-down share", Measure::Own, Side::AtLeast(95.0)),
    ("rates-up RTT p95", Measure::Own, Side::AtMost(20.5)),
    ("rates-down RTT p95", Measure::Own, Side::AtMost(20.5)),
    ("rates-up-ipv6 share", Measure::Own, Side::AtLeast(95.0)),
    ("rates-down-ipv6 share", Measure::Own, Side::AtLeast(95.0)),
    ("rates-up-ipv6 RTT p95", Measure::Own, Side::AtMost(20.5)),
    ("rates-down-ipv6 RTT p95", Measure::Own, Side::AtMost(20.5)),
    (fleet::ADD_P50, Measure::Own, Side::AtMost(2_000.0)),
    (fleet::ADD_P99, Measure::Own, Side::AtMost(10_000.0)),
    (fleet::ADD_ALL, Measure::Own, Side::AtMost(3_000.0)),
    (fleet::REMOVE_ALL, Measure::Own, Side::AtMost(2_000.0)),
    // 60 MiB, and 32 KiB for each of 1,000.
    (fleet::MEMORY, Measure::Own, Side::AtMost(91.25)),
    (fleet::IDLE, Measure::Own, Side::AtMost(0.5)),
    (fleet::LINK_EVENT, Measure::Own, Side::AtMost(300.0)),
    (fleet::RESTART, Measure::Own, Side::AtMost(1_000.0)),
    (fleet::WORST_AFTER_RESTART, Measure::Own, Side::AtMost(20.0)),
    (fleet::WORST_UNDER_EVENTS, Measure::Own, Side::AtMost(20.0)),
    (fleet::KILLED, Measure::Own, Side::AtMost(200.0)),
    (fleet::KILLED_FULL, Measure::Own, Side::AtMost(200.0)),
    (
        fleet::NEW_FLOW_P99,
        Measure::To(fleet::NO_FLOOD),
        Side::AtMost(2.0),
    ),
    (
        fleet::PER_ENGINE,
        Measure::To(fleet::ONE_ENGINE),
        Side::AtLeast(0.9),
    ),
    (clones::FIRST_P50, Measure::Own, Side::AtMost(10.0)),
    (clones::ANSWER_P50, Measure::Own, Side::AtMost(15.0)),
];

/// Metrics of a guest's connections, by how many are open at once.
const CONNECTIONS: &[&str] = &[
    "vm connect-close ×1 p50",
    "vm connect-close ×2 p50",
    "vm connect-close ×4 p50",
    "vm connect-close ×8 p50",
];
/// Frames through the network card.
const FRAMES: &[&str] = &[
    "ring 64 B ×1",
    "ring 64 B ×2",
    "ring 1500 B ×1",
    "ring 1500 B ×2",
    "ring 60 KB ×1",
    "ring 60 KB ×2",
];
/// Metrics of the CPU time per frame.
const FRAME_COSTS: &[&str] = &[
    "ring 64 B ×1 CPU",
    "ring 64 B ×2 CPU",
    "ring 1500 B ×1 CPU",
    "ring 1500 B ×2 CPU",
    "ring 60 KB ×1 CPU",
    "ring 60 KB ×2 CPU",
];

/// Metrics of admitting flows.
const ADMISSION: &[&str] = &[
    "new-flows-udp",
    "new-flows-udp per CPU second",
    "new-flows-tcp",
    "new-flows-tcp per CPU second",
];
/// The same in IPv6.
const ADMISSION6: &[&str] = &[
    "new-flows-udp-ipv6",
    "new-flows-udp-ipv6 per CPU second",
    "new-flows-tcp-ipv6",
    "new-flows-tcp-ipv6 per CPU second",
];
/// Metrics of the slowest connections.
const TAILS: &[&str] = &["connect-close p99", "connect-close-ipv6 p99"];
/// Metrics of the cost of an established flow's packet.
const HITS: &[&str] = &HIT_METRICS;
/// Metrics of answered DNS questions.
const DNS: &[&str] = &["dns-known", "dns-new"];

/// Metrics of guests without root, by what is asked of them beside pasta with the same MTU.
const ROOTLESS_STREAMS: &[&str] = &[
    "rootless up",
    "rootless down",
    "rootless up ×8",
    "rootless down ×8",
];
const ROOTLESS_TIMES: &[&str] = &[
    "rootless connect-close p50",
    "rootless connect-close p99",
    "rootless request-response p50",
];
const ROOTLESS_CPU: &[&str] = &[
    "rootless up CPU per Gb",
    "rootless down CPU per Gb",
    "rootless up ×8 CPU per Gb",
    "rootless down ×8 CPU per Gb",
    "rootless connect-close CPU",
    "rootless request-response CPU",
    "rootless UDP GSO up CPU per Gb",
    "rootless UDP GSO down CPU per Gb",
    "rootless UDP 64 B echo CPU",
];
const ROOTLESS_FORWARDED: &[&str] = &["rootless forward up", "rootless forward down"];
/// `slipgate exec`, with the MTU of all and with the largest.
const EXEC: &str = "slipgate-exec";
const EXEC_65520: &str = "slipgate-exec-65520";
/// A microVM without root.
const RUN_USERSPACE: &str = "slipgate-run-userspace";

/// Goals of guests without root: metrics, slipgate's contender, and what it is compared with.
const ROOTLESS_GOALS: [(&[&str], &str, Measure, Side); 18] = [
    (
        ROOTLESS_STREAMS,
        EXEC,
        Measure::To("pasta"),
        Side::AtLeast(8.0),
    ),
    (
        ROOTLESS_STREAMS,
        EXEC_65520,
        Measure::To("pasta-65520"),
        Side::AtLeast(1.2),
    ),
    (
        &["rootless UDP GSO up"],
        EXEC,
        Measure::To("pasta"),
        Side::AtLeast(8.0),
    ),
    (
        &["rootless UDP GSO down"],
        EXEC,
        Measure::To("pasta"),
        Side::AtLeast(4.0),
    ),
    (
        ROOTLESS_TIMES,
        EXEC,
        Measure::To("pasta"),
        Side::AtMost(0.8),
    ),
    (
        &["rootless UDP 64 B echo"],
        EXEC,
        Measure::To("pasta"),
        Side::AtLeast(1.3),
    ),
    (
        &["rootless UDP 64 B up"],
        EXEC,
        Measure::To("pasta"),
        Side::AtLeast(1.8),
    ),
    (ROOTLESS_CPU, EXEC, Measure::To("pasta"), Side::AtMost(1.0)),
    (
        ROOTLESS_CPU,
        EXEC_65520,
        Measure::To("pasta-65520"),
        Side::AtMost(1.0),
    ),
    (
        &["rootless forward CPU"],
        EXEC,
        Measure::To("pasta"),
        Side::AtMost(1.0),
    ),
    (
        &["rootless memory per connection"],
        EXEC,
        Measure::Own,
        Side::AtMost(2.0),
    ),
    // Nothing but the engine's own periodic work.
    (&["rootless idle"], EXEC, Measure::Own, Side::AtMost(0.5)),
    (
        &["rootless forward p50"],
        EXEC,
        Measure::Own,
        Side::AtMost(200.0),
    ),
    (
        &["rootless forward p99"],
        EXEC,
        Measure::Own,
        Side::AtMost(1_000.0),
    ),
    (
        ROOTLESS_FORWARDED,
        EXEC,
        Measure::To("splice-loop"),
        Side::AtLeast(0.9),
    ),
    (
        ROOTLESS_FORWARDED,
        EXEC,
        Measure::To("rinetd"),
        Side::AtLeast(1.0),
    ),
    (
        CONNECTIONS,
        RUN_USERSPACE,
        Measure::To("qemu-passt"),
        Side::AtMost(0.4),
    ),
    (
        &["vm stream up", "vm stream down"],
        RUN_USERSPACE,
        Measure::To("qemu-passt"),
        Side::AtLeast(2.0),
    ),
];

/// Goals for admission, whole microVMs and their devices, policy and DNS: metrics, slipgate's contender, the compared contender,
/// and the ratio.
const OTHER_GOALS: [(&[&str], &str, &str, Side); 22] = [
    (ADMISSION, OURS, REFERENCE, Side::AtLeast(1.3)),
    (ADMISSION6, OURS, REFERENCE, Side::AtLeast(1.3)),
    (TAILS, OURS, REFERENCE, Side::AtMost(1.1)),
    (CONNECTIONS, "slipgate-run", "qemu-passt", Side::AtMost(0.6)),
    (
        CONNECTIONS,
        "slipgate-run",
        "qemu-libslirp",
        Side::AtMost(0.5),
    ),
    (CONNECTIONS, "slipgate-run", "qemu-tap", Side::AtMost(1.0)),
    (FRAMES, "slipgate-vmm", "qemu", Side::AtLeast(1.0)),
    (FRAME_COSTS, "slipgate-vmm", "qemu", Side::AtMost(1.0)),
    (
        &disk::RATES,
        disk::SLIPGATE,
        disk::REFERENCE,
        Side::AtLeast(1.0),
    ),
    (
        &disk::COSTS,
        disk::SLIPGATE,
        disk::REFERENCE,
        Side::AtMost(1.0),
    ),
    (
        &disk_debian::RATES,
        disk_debian::SLIPGATE,
        disk_debian::REFERENCE,
        Side::AtLeast(1.0),
    ),
    (
        &disk_debian::COSTS,
        disk_debian::SLIPGATE,
        disk_debian::REFERENCE,
        Side::AtMost(1.0),
    ),
    (
        vsock::STREAMS,
        vsock::SLIPGATE,
        vsock::REFERENCE,
        Side::AtLeast(1.0),
    ),
    (
        vsock::COSTS,
        vsock::SLIPGATE,
        vsock::REFERENCE,
        Side::AtMost(1.0),
    ),
    (ADMISSION, "slipgate-policy", OURS, Side::AtLeast(0.8)),
    (
        ADMISSION,
        "slipgate-names",
        "slipgate-spread",
        Side::AtLeast(0.8),
    ),
    (ADMISSION, "slipgate-log", OURS, Side::Told),
    (HITS, "slipgate-policy", OURS, Side::Same),
    (HITS, "slipgate-names", OURS, Side::Same),
    (
        &scale::HITS,
        scale::MILLION,
        scale::HUNDRED_THOUSAND,
        Side::AtMost(1.5),
    ),
    (DNS, OURS, "dnsmasq", Side::AtLeast(1.0)),
    (DNS, OURS, "unbound", Side::AtLeast(1.0)),
];

/// A goal with its measured result.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) wanted: String,
    pub(crate) measured: Summary,
    /// Whether the median meets the goal; `None`: there is no median.
    pub(crate) met: Option<bool>,
}

/// Returns the goals for which values were measured.
pub(crate) fn judge(tables: &[Table]) -> Vec<Goal> {
    let of_the_nat = GOALS
        .iter()
        .filter_map(|(metric, measure, side)| judge_one(tables, OURS, metric, *measure, *side));
    let others = OTHER_GOALS.iter().flat_map(|(metrics, ours, to, side)| {
        let judge = |metric: &&str| judge_one(tables, ours, metric, Measure::To(to), *side);
        metrics.iter().filter_map(judge).collect::<Vec<_>>()
    });
    let rootless = ROOTLESS_GOALS.iter();
    let rootless = rootless.flat_map(|(metrics, ours, measure, side)| {
        let judge = |metric: &&str| judge_one(tables, ours, metric, *measure, *side);
        metrics.iter().filter_map(judge).collect::<Vec<_>>()
    });
    of_the_nat.chain(others).chain(rootless).collect()
}

fn judge_one(
    tables: &[Table],
    ours: &str,
    metric: &str,
    measure: Measure,
    side: Side,
) -> Option<Goal> {
    let table = tables.iter().find(|table| table.metric.name == metric)?;
    let (what, unit, measured) = match measure {
        Measure::To(other) => (
            match ours == OURS {
                true => format!("{metric} to {other}"),
                false => format!("{metric}, {ours} to {other}"),
            },
            "×",
            table.ratio(ours, other)?,
        ),
        Measure::ToMetric(other) => {
            let other_table = tables.iter().find(|table| table.metric.name == other)?;
            let ratio = table.ratio_to(ours, other_table)?;
            (format!("{metric} to {other}"), "×", ratio)
        }
        Measure::Own => (
            metric.to_owned(),
            table.metric.unit.symbol(),
            table.row(ours)?.summary?,
        ),
    };
    let (wanted, met) = match side {
        Side::AtLeast(least) => (format!("≥ {least} {unit}"), Some(measured.median >= least)),
        Side::AtMost(most) => (format!("≤ {most} {unit}"), Some(measured.median <= most)),
        Side::Same => {
            let other = match measure {
                Measure::To(other) => other,
                Measure::Own | Measure::ToMetric(_) => ours,
            };
            let (ours, other) = (table.row(ours)?.summary?, table.row(other)?.summary?);
            ("same".to_owned(), Some(are_the_same(ours, other)))
        }
        Side::Told => ("–".to_owned(), None),
    };
    Some(Goal {
        what,
        wanted,
        measured,
        met,
    })
}

/// Whether two values differ by no more than the rounds of one of them. Each value is the
/// difference of two readings in whole ns, so a difference below 2 ns is not significant.
fn are_the_same(a: Summary, b: Summary) -> bool {
    const STEP: f64 = 2.0;
    let spread = |summary: Summary| summary.max - summary.min;
    (a.median - b.median).abs() <= spread(a).max(spread(b)).max(STEP)
}

#[cfg(test)]
#[path = "goals_test.rs"]
mod tests;
