use super::*;
use crate::{contender, workload};

#[test]
fn each_workload_has_a_twin_in_ipv6_that_follows_it() {
    let all = workload::all();
    for pair in all.chunks(2) {
        let [ipv4, ipv6] = pair else {
            panic!("{} has no twin", pair[0].name());
        };
        assert!(!is_ipv6(ipv4.name()) && is_ipv6(ipv6.name()));
        assert_eq!(without_family(ipv6.name()), ipv4.name());
        assert_eq!(ipv4.metrics().len(), ipv6.metrics().len());
    }
}

#[test]
fn only_who_has_ipv6_is_measured_in_it() {
    let of = |workload: &str| -> Vec<_> {
        let all = contender::all();
        let taking_part = all.iter().filter(|one| one.takes_part(workload));
        taking_part.map(|one| one.name()).collect()
    };
    assert_eq!(
        of("bulk-up-ipv6"),
        ["slipgate", "nftables", "forwarding", "pasta"]
    );
    assert_eq!(of("established-ipv6"), ["slipgate"]);
    assert!(of("bulk-up").contains(&"slirp4netns"));
}
