use super::*;
use crate::testing::{in_netns, run, skipped};

#[test]
fn a_bare_namespace_has_nothing_to_warn_of() {
    in_netns("a_bare_namespace_has_nothing_to_warn_of", || {
        let facts = HostFacts::read();
        assert_eq!(facts.ip_forward, Some(false));
        assert_eq!(facts.forward_chains.as_deref(), Some(&[][..]));
        assert_eq!(facts.local_ports, Some((32_768, 60_999)));
        assert_eq!(facts.bypassed(), Vec::<String>::new());
        assert_eq!(facts.source_nat, Some(Vec::new()));
    });
}

#[test]
fn forward_rules_are_found() {
    in_netns("forward_rules_are_found", || {
        run("sysctl -qw net.ipv4.ip_forward=1");
        fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 50000").unwrap();
        run("nft add table inet fw");
        run(
            "nft add chain inet fw through { type filter hook forward priority 0 ; policy drop ; }",
        );
        run("nft add chain inet fw into { type filter hook input priority 0 ; }");
        run("nft add rule inet fw through accept");
        run("nft add rule inet fw into accept");
        let facts = HostFacts::read();
        assert_eq!(facts.ip_forward, Some(true));
        assert_eq!(facts.local_ports, Some((40_000, 50_000)));
        let expected = ForwardChain {
            table: "fw".into(),
            chain: "through".into(),
            drops: true,
            rules: 1,
        };
        assert_eq!(facts.forward_chains, Some(vec![expected]));
        let warnings = facts.bypassed();
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("fw through (1 rules)"), "{warnings:?}");
    });
}

#[test]
fn ipsec_policies_are_counted() {
    in_netns("ipsec_policies_are_counted", || {
        if !std::path::Path::new("/proc/net/xfrm_stat").exists() {
            skipped("ipsec_policies_are_counted", "this kernel has no xfrm");
            return;
        }
        assert_eq!(HostFacts::read().xfrm_policies, Some(0));
        run(
            "ip xfrm policy add src 10.0.0.0/8 dst 10.1.0.0/16 dir out tmpl src 1.1.1.1 dst 2.2.2.2 proto esp mode tunnel",
        );
        let facts = HostFacts::read();
        assert_eq!(facts.xfrm_policies, Some(1));
        assert!(facts.bypassed()[0].contains("IPsec"));
    });
}

/// Attributes of a chain whose lengths lie.
#[test]
fn cut_answers_are_no_chains() {
    let hook = [12u8, 0, 4, 0x80, 8, 0, 1, 0, 0, 0, 0, 2];
    let table = [7u8, 0, 1, 0, b'a', b'b', 0, 0];
    let name = [6u8, 0, 3, 0, b'c', 0, 0, 0];
    let whole = [hook.as_slice(), &table, &name].concat();
    let chain = forward_chain(2, &whole).unwrap();
    assert_eq!((chain.table.as_str(), chain.chain.as_str()), ("ab", "c"));
    assert_eq!(forward_chain(10, &whole), None, "IPv6 is not ours");
    for length in 0..whole.len() - 2 {
        assert_eq!(forward_chain(2, &whole[..length]), None, "{length}");
    }
}

#[test]
fn what_may_have_the_tuples_of_guests_is_said_and_what_may_not_is_not() {
    let guests = |ports| GuestsTuples {
        uplink: "eth0".into(),
        by_routes: None,
        ports,
        ipv4: Some(Sources::default()),
        ipv6: None,
    };
    let masquerade = |ports| SourceNat {
        table: "nat".into(),
        chain: "out".into(),
        sees: [true, false],
        device: None,
        addresses: Addresses::OfDevice,
        ports,
    };
    let mut facts = HostFacts {
        local_ports: Some((32_768, 60_999)),
        source_nat: Some(vec![masquerade(Some(1_024..=60_999))]),
        ..HostFacts::default()
    };
    assert_eq!(facts.meets(&guests(61_000..=65_535)), Vec::<String>::new());
    // Twice the same is said once.
    facts.source_nat = Some(vec![masquerade(None), masquerade(Some(1..=61_000))]);
    let met = facts.meets(&guests(61_000..=65_535));
    assert_eq!(met.len(), 1, "{met:?}");
    assert!(
        met[0].contains("nat out") && met[0].contains("eth0"),
        "{met:?}"
    );
    // The host's own sockets.
    facts.source_nat = None;
    let met = facts.meets(&guests(60_000..=65_535));
    assert!(met[0].contains("(port 60000)"), "{met:?}");
    facts.reserved_ports = port_list("60000-60997,60998,60999\n");
    assert_eq!(facts.meets(&guests(60_000..=65_535)), Vec::<String>::new());
    facts.reserved_ports = port_list("60000-60997,60999\n");
    let met = facts.meets(&guests(60_000..=65_535));
    assert!(met[0].contains("(port 60998)"), "{met:?}");
}

/// Of legacy iptables and of sockets' ports the kernel gives no notice.
#[test]
fn what_has_no_notice_is_read_without_asking_for_the_rules() {
    crate::testing::in_netns("what_has_no_notice_is_read", || {
        crate::testing::run("nft add table ip own");
        crate::testing::run(
            "nft add chain ip own out { type nat hook postrouting priority 100 ; }",
        );
        crate::testing::run("nft add rule ip own out masquerade");
        let before = HostFacts::read_about_tuples();
        let rules = before.source_nat.as_ref().unwrap();
        assert!(rules.iter().any(|rule| rule.table == "own"), "{rules:?}");
        // A rule of nftables is taken over as it was, a legacy one is not there any more.
        let mut stale = before.clone();
        let legacy = SourceNat {
            chain: "of legacy ip6tables".into(),
            ..rules[0].clone()
        };
        stale.source_nat.as_mut().unwrap().push(legacy);
        std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "20000 30000").unwrap();
        let after = stale.with_unnoticed_read();
        assert_eq!(after.source_nat, before.source_nat);
        assert_eq!(after.local_ports, Some((20_000, 30_000)));
        assert_eq!(HostFacts::default().with_unnoticed_read().source_nat, None);
    });
}
