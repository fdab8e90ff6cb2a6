use super::*;

#[test]
fn a_stream_s_figures_are_of_bits() {
    let of = Stream::of(
        250_000_000,
        Duration::from_millis(500),
        Duration::from_millis(100),
    );
    assert_eq!(of.gigabits_per_second, 4.0);
    assert_eq!(of.cpu_ms_per_gigabit, 50.0);
}

#[test]
fn each_metric_is_of_a_name_of_its_own() {
    let names: std::collections::BTreeSet<_> = MEASURED.1.iter().map(|one| one.name).collect();
    assert_eq!(names.len(), MEASURED.1.len());
    let contenders: Vec<_> = contender::ALL.iter().map(|one| one.name()).collect();
    assert!(contenders.contains(&REFERENCE));
}
