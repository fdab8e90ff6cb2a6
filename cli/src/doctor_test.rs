use super::*;

#[test]
fn a_report_says_what_is_missing_and_what_to_do() {
    let findings = [
        Finding::ok("kernel", "6.18"),
        Finding::ok("uplink", "none").with(State::Missing, "add a default route"),
        Finding::ok("firewall", "inet filter forward").with(State::Note, "use --deny"),
    ];
    let text = report(&findings);
    assert!(text.contains("ok       kernel    6.18\n"), "{text}");
    assert!(text.contains("MISSING  uplink    none\n"), "{text}");
    assert!(text.contains("-> add a default route\n"), "{text}");
    assert!(text.contains("can't run here yet"), "{text}");
    assert!(report(&findings[..1]).contains("can run here."));
}

#[test]
fn an_uplink_that_is_not_there_is_named() {
    let finding = &uplink_found(Some("nosuchdev0"))[0];
    assert_eq!(finding.state, State::Missing);
    assert!(finding.found.contains("nosuchdev0"));
    assert_ne!(uplink_found(Some("lo"))[0].state, State::Missing);
}

#[test]
fn an_uplink_s_offloads_are_told() {
    let findings = uplink_found(Some("lo"));
    assert_eq!(findings[1].what, "offloads");
    // Loopback always has it.
    assert_eq!(findings[1].state, State::Ok, "{:?}", findings[1]);
}
