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

#[test]
fn kvm_is_looked_at_for_those_who_run_vms() {
    let gone = KvmUnavailable {
        why: std::io::ErrorKind::NotFound.into(),
        remedy: "load the module",
    };
    let missing = kvm_found(Err(gone));
    // NAT for others' VMs needs none.
    assert_eq!(missing.state, State::Note);
    assert!(missing.remedy.unwrap().ends_with("load the module"));
    let another = fs::File::open("/dev/null").unwrap();
    let another = kvm_found(Ok(another.into()));
    assert_eq!(another.state, State::Note);
    assert!(another.found.contains("is it /dev/kvm?"), "{another:?}");
    if let Ok(kvm) = kvm::open() {
        assert_eq!(kvm_found(Ok(kvm.into())).state, State::Ok);
    }
}
