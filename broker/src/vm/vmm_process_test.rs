use super::*;

/// As when a guest ends while `slipgate stats` asks: no reason to take the NAT down.
#[test]
fn a_vmm_that_has_ended_is_asked_in_vain() {
    // This binary, which does not know the role, so it ends at once.
    let mut vmm = VmmProcess {
        process: ChildProcess::start(Role::Vmm, &Users::claim()).unwrap(),
        in_namespaces: false,
    };
    let until = Instant::now() + Duration::from_secs(10);
    while vmm.end().is_none() {
        assert!(Instant::now() < until, "it runs on");
    }
    assert!(!vmm.ask_counters(1));
}
