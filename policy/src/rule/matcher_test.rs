use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;
use crate::strategies::{destination, pattern};

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
        addr: Ipv4Addr::new(1, 1, 1, 1).into(),
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
