use slipgate_testbed::rig::DiskFigures;

use super::*;

fn measured(case: usize) -> DiskMeasured {
    DiskMeasured {
        figures: DiskFigures {
            case,
            what: CASES[case].0,
            requests: 4000,
            flushes: 0,
            took_us: 200_000.0,
            p50_us: 33.0,
            p99_us: 78.0,
        },
        device_cpu_us: 64_000.0,
        vmm_cpu_us: 100_000.0,
        clock: "kvm-clock".to_owned(),
        rings: 1,
    }
}

#[test]
fn each_case_gives_rate_percentiles_and_cpu_time_of_a_request() {
    let all: Vec<_> = (0..CASES.len()).map(measured).collect();
    let sample = sample(&all).unwrap();
    assert_eq!(sample.values.len(), METRICS);
    for (_, names) in CASES {
        let values = names.map(|name| sample.values[name]);
        assert_eq!(values, [20.0, 33.0, 78.0, 16.0, 25.0]);
    }
}

#[test]
fn a_case_that_is_missing_or_empty_is_no_sample() {
    let mut all: Vec<_> = (0..CASES.len()).map(measured).collect();
    all[1].figures.requests = 0;
    let why = sample(&all).unwrap_err().to_string();
    assert!(why.contains("nothing was done"), "{why}");
    all.remove(1);
    let why = sample(&all).unwrap_err().to_string();
    assert!(why.contains("was not measured"), "{why}");
    let mut unseen = measured(0);
    unseen.device_cpu_us = 0.0;
    assert!(figures(&unseen).is_err());
}

#[test]
fn each_metric_has_its_own_name_and_unit() {
    let (_, metrics) = MEASURED;
    let mut names: Vec<_> = metrics.iter().map(|metric| metric.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), METRICS);
    for metric in metrics {
        let is_a_rate = !metric.name.contains(" p") && !metric.name.contains("CPU");
        let unit = match is_a_rate {
            true => Unit::ThousandPerSecond,
            false => Unit::Microseconds,
        };
        assert_eq!(metric.unit, unit, "{}", metric.name);
    }
}
