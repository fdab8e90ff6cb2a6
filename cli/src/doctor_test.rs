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
    assert!(!text.contains("User mode can"), "{text}");
    let user_mode = Finding::ok(user_mode::WHAT, "it can serve VMs");
    let text = report(&[&findings[..], &[user_mode]].concat());
    assert!(text.contains("User mode can"), "{text}");
}

#[test]
fn what_the_binary_was_built_without_is_told() {
    let real: Option<String> = None;
    assert_eq!(stub_found("BPF programs", State::Missing, real), None);
    let stub = Some("built without".to_owned());
    let finding = stub_found("BPF programs", State::Missing, stub).unwrap();
    assert_eq!(finding.state, State::Missing);
    assert_eq!(finding.found, "built without");
}
