use super::*;

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
    let another = std::fs::File::open("/dev/null").unwrap();
    let another = kvm_found(Ok(another.into()));
    assert_eq!(another.state, State::Note);
    assert!(another.found.contains("is it /dev/kvm?"), "{another:?}");
    if let Ok(kvm) = kvm::open() {
        assert_eq!(kvm_found(Ok(kvm.into())).state, State::Ok);
    }
}

#[test]
fn a_kvm_without_a_filter_for_registers_is_told() {
    assert_eq!(usable(true).state, State::Ok);
    let finding = usable(false);
    assert_eq!(finding.state, State::Note);
    assert!(finding.remedy.unwrap().contains("Linux 5.10"));
}
