use super::*;
use crate::{
    results::Cell,
    results::tables,
    workload::{self, ADMISSION as WORKLOADS, ESTABLISHED, Measured, Sample},
};

const UDP: &str = WORKLOADS[0];

/// Parts that measure the VMM's clones and devices.
const VMM_PARTS: [Measured; 4] = [
    clones::MEASURED,
    disk::MEASURED,
    disk_debian::MEASURED,
    vsock::MEASURED,
];

fn cells(
    workload: &'static str,
    metric: &'static str,
    of: &[(&'static str, [f64; 3])],
) -> Vec<Cell> {
    let cell = |contender, round, value| Cell {
        round,
        contender,
        workload,
        outcome: Ok(Sample::of(&[(metric, value)])),
    };
    of.iter()
        .flat_map(|(contender, values)| {
            let values = values.iter().zip(1..);
            values.map(|(value, round)| cell(*contender, round, *value))
        })
        .collect()
}

fn judged(cells: &[Cell]) -> Vec<Goal> {
    let all = workload::all();
    let measured: Vec<_> = all.iter().map(|workload| workload.measured()).collect();
    let contenders = [OURS, "slipgate-policy", "slipgate-log", REFERENCE, "pasta"];
    judge(&tables(&measured, &contenders, REFERENCE, cells))
}

fn met(goals: &[Goal], what: &str) -> Option<bool> {
    let goal = goals.iter().find(|goal| goal.what == what);
    goal.unwrap_or_else(|| panic!("no goal {what} in {goals:?}"))
        .met
}

#[test]
fn a_ratio_and_an_own_value_are_held_against_the_goal() {
    let goals = judged(&cells(
        UDP,
        UDP,
        &[
            (OURS, [200.0; 3]),
            ("slipgate-policy", [159.0, 161.0, 300.0]),
        ],
    ));
    assert_eq!(met(&goals, UDP), Some(true));
    assert_eq!(
        met(&goals, "new-flows-udp, slipgate-policy to slipgate"),
        Some(true)
    );
    let goals = judged(&cells(
        UDP,
        UDP,
        &[(OURS, [119.0; 3]), ("slipgate-policy", [0.79 * 119.0; 3])],
    ));
    assert_eq!(met(&goals, UDP), Some(false));
    assert_eq!(
        met(&goals, "new-flows-udp, slipgate-policy to slipgate"),
        Some(false)
    );
    let goals = judged(&cells(
        "bulk-up",
        "bulk-up",
        &[(OURS, [1.0; 3]), ("pasta", [0.3; 3])],
    ));
    assert_eq!(met(&goals, "bulk-up to pasta"), Some(true));
}

#[test]
fn a_metric_is_held_against_another_of_the_same_round() {
    let (six, four) = (HIT_METRICS6[0], HIT_METRICS[0]);
    let judged = |of_six: [f64; 3]| {
        let mut all = cells("established-ipv6", six, &[(OURS, of_six)]);
        // The rounds differ by far more than the families in each of them.
        all.extend(cells(ESTABLISHED, four, &[(OURS, [100.0, 200.0, 400.0])]));
        met(&judged(&all), &format!("{six} to {four}"))
    };
    assert_eq!(judged([120.0, 240.0, 480.0]), Some(true));
    assert_eq!(judged([126.0, 252.0, 504.0]), Some(false));
}

#[test]
fn clones_disks_and_vsock_are_held_against_their_goals() {
    let judged = |part, metric, of: &[(&'static str, [f64; 3])]| {
        let names: Vec<_> = of.iter().map(|(name, _)| *name).collect();
        let cells = cells(part, metric, of);
        judge(&tables(&VMM_PARTS, &names, REFERENCE, &cells))
    };
    let first = |ms| {
        let what = clones::FIRST_P50;
        met(&judged(clones::CLONE, what, &[(OURS, [ms; 3])]), what)
    };
    assert_eq!(first(9.9), Some(true));
    assert_eq!(first(10.1), Some(false));
    for (part, rate, cost, ours, other) in [
        (
            disk::DISK,
            disk::RATES[1],
            disk::COSTS[1],
            disk::SLIPGATE,
            disk::REFERENCE,
        ),
        (
            disk_debian::DISK_DEBIAN,
            disk_debian::RATES[2],
            disk_debian::COSTS[2],
            disk_debian::SLIPGATE,
            disk_debian::REFERENCE,
        ),
        (
            vsock::VSOCK,
            vsock::STREAMS[0],
            vsock::COSTS[0],
            vsock::SLIPGATE,
            vsock::REFERENCE,
        ),
    ] {
        let is_met = |metric, value| {
            let goals = judged(part, metric, &[(ours, [value; 3]), (other, [100.0; 3])]);
            met(&goals, &format!("{metric}, {ours} to {other}"))
        };
        assert_eq!(
            [98.0, 102.0].map(|it| is_met(rate, it)),
            [false, true].map(Some)
        );
        assert_eq!(
            [98.0, 102.0].map(|it| is_met(cost, it)),
            [true, false].map(Some)
        );
    }
}

#[test]
fn what_was_not_measured_is_no_goal() {
    assert!(judged(&[]).is_empty());
    let goals = judged(&cells(UDP, UDP, &[("slipgate-policy", [1.0; 3])]));
    assert!(goals.is_empty(), "{goals:?}");
}

#[test]
fn what_is_told_is_not_judged() {
    let goals = judged(&cells(
        UDP,
        UDP,
        &[(OURS, [200.0; 3]), ("slipgate-log", [20.0; 3])],
    ));
    let told = "new-flows-udp, slipgate-log to slipgate";
    assert_eq!(met(&goals, told), None);
    let goal = goals.iter().find(|goal| goal.what == told).unwrap();
    assert_eq!(goal.measured.median, 0.1);
}

#[test]
fn the_same_is_what_differs_no_more_than_its_rounds() {
    let same = |ours, theirs| {
        let what = HIT_METRICS[0];
        let goals = judged(&cells(
            ESTABLISHED,
            what,
            &[("slipgate-policy", ours), (OURS, theirs)],
        ));
        met(&goals, &format!("{what}, slipgate-policy to slipgate"))
    };
    assert_eq!(same([82.0; 3], [83.9; 3]), Some(true), "the clock's step");
    assert_eq!(same([85.0; 3], [82.0; 3]), Some(false));
    assert_eq!(same([82.0; 3], [85.0; 3]), Some(false), "nor less");
    assert_eq!(
        same([82.0, 85.0, 86.0], [82.0; 3]),
        Some(true),
        "its rounds"
    );
    assert_eq!(same([90.0, 91.0, 92.0], [82.0, 83.0, 84.0]), Some(false));
}

#[test]
fn every_goal_is_about_something_that_is_measured() {
    let all = [
        workload::all(),
        crate::rates::workload::all(crate::family::Families::Both),
        crate::rootless::workloads(),
        crate::rootless::forward_workloads(),
    ];
    let measured = all.iter().flatten().flat_map(|workload| workload.metrics());
    let mut known: Vec<_> = measured.map(|metric| metric.name).collect();
    known.extend(DNS);
    let of_scale = [scale::IPV4, scale::IPV6].concat();
    known.extend(of_scale.iter().map(|metric| metric.name));
    let of_fleets = fleet::MEASURED.iter().flat_map(|(_, metrics)| *metrics);
    known.extend(of_fleets.map(|metric| metric.name));
    let of_parts = VMM_PARTS.iter().flat_map(|(_, metrics)| *metrics);
    known.extend(of_parts.map(|metric| metric.name));
    let of_the_nat = GOALS.iter().map(|(metric, ..)| *metric);
    let others = OTHER_GOALS
        .iter()
        .flat_map(|(metrics, ..)| metrics.iter().copied());
    let rootless = ROOTLESS_GOALS
        .iter()
        .flat_map(|(metrics, ..)| metrics.iter().copied());
    // Of whole microVMs, which are measured by themselves.
    let nat = |metric: &&str| !metric.starts_with("vm ") && !metric.starts_with("ring ");
    for metric in of_the_nat.chain(others).chain(rootless).filter(nat) {
        assert!(known.contains(&metric), "{metric}: {known:?}");
    }
}

#[test]
fn admission_and_its_tail_are_held_against_the_kernels_nat() {
    let udp = |ours| {
        judged(&cells(
            UDP,
            UDP,
            &[(OURS, [ours; 3]), (REFERENCE, [100.0; 3])],
        ))
    };
    let what = format!("new-flows-udp to {REFERENCE}");
    assert_eq!(met(&udp(130.0), &what), Some(true));
    assert_eq!(met(&udp(129.0), &what), Some(false));
    let (name, metric) = ("connect-close-ipv6", "connect-close-ipv6 p99");
    let tail = |ours| {
        judged(&cells(
            name,
            metric,
            &[(OURS, [ours; 3]), (REFERENCE, [100.0; 3])],
        ))
    };
    let what = format!("{metric} to {REFERENCE}");
    assert_eq!(met(&tail(110.0), &what), Some(true));
    assert_eq!(met(&tail(111.0), &what), Some(false));
}
