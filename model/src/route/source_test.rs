//! The examples of RFC 6724 section 10.1 that do not depend on mobility, and slipgate's choices.
use super::*;

const UPLINK: IfIndex = IfIndex::new(2);
const OTHER: IfIndex = IfIndex::new(3);

/// An address of the uplink; `~` before it: temporary, `-`: deprecated, `@`: of another link.
fn own(text: &str) -> HostAddress {
    let source = match text.as_bytes()[0] {
        b'~' => SourceUse::Temporary,
        b'-' => SourceUse::Deprecated,
        _ => SourceUse::Preferred,
    };
    HostAddress {
        ifindex: if text.starts_with('@') { OTHER } else { UPLINK },
        addr: text.trim_start_matches(['~', '-', '@']).parse().unwrap(),
        broadcast: None,
        source,
    }
}

fn selected(to: &str, candidates: &[&str]) -> Option<String> {
    let select_of = |order: &[&str]| {
        let all: Vec<HostAddress> = order.iter().map(|text| own(text)).collect();
        select(&all, UPLINK, to.parse().unwrap())
    };
    let found = select_of(candidates);
    // The order decides nothing unless all else is equal.
    let reversed: Vec<&str> = candidates.iter().rev().copied().collect();
    assert_eq!(found, select_of(&reversed), "{to} {candidates:?}");
    found.map(|addr| addr.to_string())
}

#[test]
fn rfc6724_selects_by_scope_label_lifetime_and_prefix() {
    let cases: [(&str, &[&str], &str); 11] = [
        // Prefer appropriate scope.
        (
            "2001:db8:1::1",
            &["2001:db8:3::1/64", "fe80::1/64"],
            "2001:db8:3::1",
        ),
        (
            "ff05::1",
            &["2001:db8:3::1/64", "fe80::1/64"],
            "2001:db8:3::1",
        ),
        ("fe80::1", &["-fe80::2/64", "2001:db8:1::1/64"], "fe80::2"),
        // Prefer matching label.
        (
            "2002:c633:6401::1",
            &["2002:c633:6401::d5e3:7953:13eb:22e8/64", "2001:db8:1::2/64"],
            "2002:c633:6401:0:d5e3:7953:13eb:22e8",
        ),
        (
            "2001:db8:1::d5e3:0:0:1",
            &["2001:db8:1::2/64", "2002:c633:6401::1/64"],
            "2001:db8:1::2",
        ),
        (
            "fd00:1::1",
            &["2001:db8::5/64", "fd00:2::5/64"],
            "fd00:2::5",
        ),
        (
            "2001:db8:1::1",
            &["fd00:2::5/64", "2001:db9::5/64"],
            "2001:db9::5",
        ),
        // Longest matching prefix.
        (
            "2001:db8:1::1",
            &["2001:db8:1:0:1::2/64", "2001:db8:3::2/64"],
            "2001:db8:1:0:1::2",
        ),
        // Avoid deprecated addresses, before labels and prefixes.
        (
            "2001:db8:1::1",
            &["-2001:db8:1::2/64", "2001:db8:3::2/64"],
            "2001:db8:3::2",
        ),
        (
            "2001:db8:1::1",
            &["-2001:db8:3::2/64", "@2001:db8:1::3/64"],
            "2001:db8:3::2",
        ),
        // A temporary one loses, after labels and before prefixes.
        (
            "2001:db8:1::1",
            &["~2001:db8:1::2/64", "2001:db8:3::2/64"],
            "2001:db8:3::2",
        ),
    ];
    for (to, candidates, expected) in cases {
        assert_eq!(selected(to, candidates).as_deref(), Some(expected), "{to}");
    }
}

#[test]
fn the_prefix_counts_as_far_as_the_sources_own() {
    let all = [own("2001:db8:1::2/32"), own("2001:db8:1::3/32")];
    // The second one has more bits in common, beyond its network.
    let to = "2001:db8:1::3:4".parse().unwrap();
    assert_eq!(
        select(&all, UPLINK, to),
        Some("2001:db8:1::2".parse().unwrap())
    );
}

#[test]
fn no_source_of_a_smaller_scope_nor_of_another_link() {
    assert_eq!(selected("2001:db8::1", &["fe80::1/64"]), None);
    assert_eq!(selected("2001:db8::1", &[]), None);
    let of_host = selected("2001:db8::1", &["fe80::1/64", "@2001:db8:9::1/64"]);
    assert_eq!(
        of_host.as_deref(),
        Some("2001:db8:9::1"),
        "an uplink without an address"
    );
    assert_eq!(selected("fe80::9", &["@fe80::1/64"]), None);
}
