use slipgate_control::attach::chain::Foreign;

use super::*;

#[test]
fn each_device_at_which_another_program_is_first_is_a_note() {
    assert_eq!(report(&[]), []);
    let first = ("eth0".into(), Program::UplinkIngress, Standing::First);
    let all_first = report(std::slice::from_ref(&first));
    assert_eq!(all_first.len(), 1);
    assert_eq!(all_first[0].state, State::Ok);
    let theirs = Foreign::Filter {
        kind: "bpf".into(),
        priority: 1,
    };
    let behind = Standing::Behind(vec![theirs]);
    let places = [
        first,
        ("tap0".into(), Program::GuestEgress, behind),
        ("tap1".into(), Program::GuestEgress, Standing::Missing),
    ];
    let findings = report(&places);
    let found: Vec<_> = findings.iter().map(|f| (f.state, &*f.found)).collect();
    assert_eq!(
        found,
        [
            (
                State::Note,
                "tap0: guest_egress runs behind the tc filter bpf with pref 1"
            ),
            (State::Note, "tap1: guest_egress was detached by somebody"),
        ]
    );
}
