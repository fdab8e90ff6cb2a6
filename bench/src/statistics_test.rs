use super::*;

#[test]
fn the_median_lies_in_the_middle_or_between_the_two() {
    assert_eq!(percentile(&[3.0, 1.0, 2.0], 50.0), 2.0);
    assert_eq!(percentile(&[4.0, 1.0, 3.0, 2.0], 50.0), 2.5);
    assert_eq!(percentile(&[7.0], 99.0), 7.0);
    assert!(percentile(&[], 50.0).is_nan());
}

#[test]
fn percentiles_reach_from_the_least_to_the_most() {
    let values: Vec<f64> = (0..=100).rev().map(f64::from).collect();
    for percent in [0.0, 1.0, 50.0, 99.0, 100.0] {
        assert_eq!(percentile(&values, percent), percent);
    }
}

#[test]
fn a_summary_has_the_spread() {
    let summary = Summary::of(&[2.0, 9.0, 4.0]).unwrap();
    assert_eq!((summary.min, summary.median, summary.max), (2.0, 4.0, 9.0));
    assert_eq!(summary.count, 3);
    assert_eq!(Summary::of(&[]), None);
}
