use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;

/// Patterns crowded into few addresses and ports, so that they overlap.
pub(crate) fn pattern() -> impl Strategy<Value = Pattern> {
    let prefix = prop_oneof![
        4 => (0_u32..16, 28_u8..=32).prop_map(|(low, len)| (0xc633_6400 | low, len)),
        2 => (0_u32..16, 28_u8..=32).prop_map(|(low, len)| (0x0a00_0000 | low, len)),
        1 => (Just(0x0a00_0000), 6_u8..=10),
        1 => (Just(0), Just(0)),
    ];
    let ports = prop::option::of((1_u16..12, 0_u16..4));
    (prefix, ports, 0_usize..6).prop_map(|((bits, len), ports, protocol)| {
        let addr = Ipv4Addr::from_bits(bits);
        let prefix = Ipv4Net::new(addr, len).unwrap().trunc();
        let protocol = match (protocol, ports) {
            (0, _) => "/tcp",
            (1, _) => "/udp",
            (2, None) => "/icmp",
            _ => "",
        };
        let ports = ports.map_or(String::new(), |(first, more)| {
            format!(":{first}-{}", if more == 3 { 65535 } else { first + more })
        });
        format!("{prefix}{ports}{protocol}").parse().unwrap()
    })
}

pub(crate) fn destination() -> impl Strategy<Value = Destination> {
    let addr = prop_oneof![
        (0_u32..16).prop_map(|low| 0xc633_6400 | low),
        (0_u32..16).prop_map(|low| 0x0a00_0000 | low),
        any::<u32>(),
    ];
    let port = prop_oneof![4 => 1_u16..16, 1 => Just(65535), 1 => any::<u16>()];
    (addr, port, 0_usize..3).prop_map(|(bits, port, protocol)| {
        let protocol = PROTOCOLS[protocol];
        Destination {
            addr: Ipv4Addr::from_bits(bits),
            port: if protocol == Protocol::Icmp { 0 } else { port },
            protocol,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn the_first_match_is_that_of_trying_each_in_turn(
        patterns in prop::collection::vec(pattern(), 0..40),
        destinations in prop::collection::vec(destination(), 1..60),
        shortest in prop_oneof![Just(0_u8), 0_u8..=32],
    ) {
        let matcher = Matcher::new(patterns.iter().zip(0..).map(|(pattern, order)| Entry { pattern: *pattern, order }));
        for to in destinations {
            let naive = patterns
                .iter()
                .position(|p| p.matches(to) && p.prefix().prefix_len() >= shortest)
                .map(|order| order as u32);
            prop_assert_eq!(matcher.first(to, shortest), naive, "{:?}", to);
        }
    }
}

#[test]
fn memory_grows_with_the_patterns_not_with_their_overlaps() {
    // Every range covers every later one's start: a list per segment would be quadratic.
    let entries = (1..=20_000_u32).map(|port| Entry {
        pattern: format!("0.0.0.0/0:{port}-40000").parse().unwrap(),
        order: 20_000 - port,
    });
    let matcher = Matcher::new(entries);
    assert!(matcher.steps.len() <= 2 * 20_001, "{}", matcher.steps.len());
    let to = Destination {
        addr: Ipv4Addr::new(1, 1, 1, 1),
        port: 30_000,
        protocol: Protocol::Tcp,
    };
    assert_eq!(matcher.first(to, 0), Some(0));
    assert_eq!(
        matcher.first(Destination { port: 5, ..to }, 0),
        Some(19_995)
    );
    assert_eq!(matcher.first(Destination { port: 40_001, ..to }, 0), None);
}
