use super::*;

#[test]
fn capabilities_are_those_in_effect() {
    let all = "CapPrm:\t0000000000000000\nCapEff:\t000001ffffffffff\n";
    let (has, lacks) = of_status(all);
    assert_eq!(has, ["CAP_NET_ADMIN", "CAP_PERFMON", "CAP_BPF"]);
    assert!(lacks.is_empty());
    let (has, lacks) = of_status("CapEff:\t0000000000001000\n");
    assert_eq!(has, ["CAP_NET_ADMIN"]);
    assert_eq!(lacks, ["CAP_PERFMON", "CAP_BPF"]);
    assert_eq!(of_status("").1.len(), 3, "none is told");
}

#[test]
fn the_first_thing_that_nothing_stands_in_for_is_the_problem() {
    let check = |name, ok| probe::Check {
        name,
        ok,
        optional: false,
        found: "not there".into(),
        remedy: None,
    };
    assert_eq!(problem_of(&[check("BTF", true)]), None);
    let optional = probe::Check {
        optional: true,
        ..check("tcx", false)
    };
    let checks = [
        optional,
        check(probe::FILE_SYSTEM, false),
        check("BTF", false),
        check("TAPs", false),
    ];
    assert_eq!(problem_of(&checks[..2]), None);
    assert_eq!(problem_of(&checks).as_deref(), Some("BTF: not there"));
}
