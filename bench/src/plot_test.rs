use super::*;

#[test]
fn an_axis_has_a_few_ticks_whatever_the_values() {
    for medians in [
        &[1.0, 0.5][..],
        &[0.004, 0.001],
        &[61_454.0, 805.0],
        &[0.0],
        &[0.0, 7.0],
        &[],
    ] {
        let most = medians.iter().copied().fold(0.0, f64::max);
        let scale = Scale::new(most, medians.iter().copied());
        // Or the ticks have no end.
        assert!(scale.most > 0.0, "{medians:?}");
        let ticks = scale.ticks();
        assert!((3..=5).contains(&ticks.len()), "{medians:?}: {ticks:?}");
    }
}
