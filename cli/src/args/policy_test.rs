use super::*;

#[test]
fn a_duration_has_a_unit_or_is_seconds() {
    for (text, seconds) in [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7_200)] {
        assert_eq!(duration(text), Ok(Duration::from_secs(seconds)));
    }
    for bad in [
        "",
        "s",
        "0",
        "1d",
        "-1s",
        "1.5h",
        "25h",
        "99999999999999999999h",
    ] {
        assert!(duration(bad).is_err(), "{bad}");
    }
}
