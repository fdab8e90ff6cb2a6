use super::*;
use crate::{
    host::HostFacts,
    testing::{in_netns, run},
};

fn found(table: &str, chain: &str) -> SourceNat {
    SourceNat {
        table: table.into(),
        chain: chain.into(),
    }
}

#[test]
fn rules_that_translate_sources_are_found_and_others_are_not() {
    in_netns("rules_that_translate_sources_are_found", || {
        assert_eq!(find().unwrap(), []);
        run("nft add table ip own");
        run("nft add chain ip own in { type nat hook prerouting priority -100 ; }");
        run("nft add chain ip own out { type nat hook postrouting priority 100 ; }");
        run("nft add chain ip own more");
        run("nft add rule ip own in tcp dport 80 dnat to 10.0.0.1");
        run("nft add rule ip own more counter accept");
        assert_eq!(find().unwrap(), []);
        assert_eq!(HostFacts::read().warnings(), Vec::<String>::new());

        run("nft add rule ip own out oifname eth0 masquerade");
        run("nft add rule ip own out oifname eth1 masquerade");
        run("nft add rule ip own more snat to 192.0.2.1");
        assert_eq!(find().unwrap(), [found("own", "more"), found("own", "out")]);
        let warnings = HostFacts::read().warnings();
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings[0].contains("own more") && warnings[1].contains("own out"));
        assert!(warnings[1].contains("--nat-ports"), "{warnings:?}");
    });
}

#[test]
fn only_ipv4s_are_ours() {
    in_netns("only_ipv4s_are_ours", || {
        run("nft add table ip6 own");
        run("nft add chain ip6 own out { type nat hook postrouting priority 100 ; }");
        run("nft add rule ip6 own out masquerade");
        assert_eq!(find().unwrap(), []);
    });
}

#[test]
fn legacy_tables_and_targets_of_iptables_are_known_by_name() {
    let legacy = |tables, targets| of_legacy(tables, targets).is_some();
    assert!(legacy("filter\nnat\n", "ERROR\nMASQUERADE\n"));
    assert!(!legacy("filter\n", "MASQUERADE\n"));
    assert!(!legacy("nat\n", "ERROR\nDNAT\n"));
    // As iptables-nft writes it: an expression `target` whose data name it.
    let attribute = |kind: u16, value: &[u8]| {
        let mut bytes = Vec::new();
        bytes.extend((4 + value.len() as u16).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    };
    let target = |name: &[u8]| {
        let data = attribute(1, name);
        [attribute(1, b"target\0"), attribute(2, &data)].concat()
    };
    assert!(is_source_nat(&target(b"MASQUERADE\0")));
    assert!(!is_source_nat(&target(b"DNAT\0")));
    let whole = target(b"SNAT\0");
    for length in 0..whole.len() - 4 {
        assert!(!is_source_nat(&whole[..length]), "{length}");
    }
}
