use proptest::prelude::*;

use super::*;

fn net(bits: u32, len: u8) -> Ipv4Net {
    Ipv4Net::new(Ipv4Addr::from_bits(bits), len)
        .unwrap()
        .trunc()
}

/// Prefixes crowded into few addresses, so that they nest and touch.
fn prefixes(count: usize) -> impl Strategy<Value = Vec<Ipv4Net>> {
    let crowded = (0_u32..64, 26_u8..=32).prop_map(|(low, len)| net(0x0a00_0000 | low, len));
    let edges = (any::<u32>(), 0_u8..=32).prop_map(|(bits, len)| net(bits, len));
    let ends = (0_u8..=32).prop_map(|len| net(u32::MAX, len));
    prop::collection::vec(prop_oneof![6 => crowded, 2 => edges, 1 => ends], 0..count)
}

fn addr() -> impl Strategy<Value = Ipv4Addr> {
    prop_oneof![
        (0_u32..64).prop_map(|low| Ipv4Addr::from_bits(0x0a00_0000 | low)),
        any::<u32>().prop_map(Ipv4Addr::from_bits),
        Just(Ipv4Addr::BROADCAST),
        Just(Ipv4Addr::UNSPECIFIED),
    ]
}

fn naive(prefixes: &[Ipv4Net], addr: Ipv4Addr) -> Vec<(Ipv4Net, usize)> {
    let mut found: Vec<(Ipv4Net, usize)> = Vec::new();
    for (index, prefix) in prefixes.iter().enumerate() {
        if prefix.contains(&addr) {
            found.retain(|(other, _)| other != prefix);
            found.push((*prefix, index));
        }
    }
    found.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.prefix_len()));
    found
}

proptest! {
    #[test]
    fn covering_prefixes_are_those_of_a_linear_scan(list in prefixes(40), addrs in prop::collection::vec(addr(), 1..40)) {
        let map = PrefixMap::new(list.iter().copied().zip(0_usize..));
        for addr in addrs {
            let found: Vec<_> = map.covering(addr).map(|(p, v)| (p, *v)).collect();
            prop_assert_eq!(found, naive(&list, addr));
        }
    }

    #[test]
    fn overlaps_is_what_comparing_with_each_says(list in prefixes(6), other in prefixes(2)) {
        let map = PrefixMap::new(list.iter().map(|p| (*p, ())));
        for prefix in other {
            let expected = list.iter().any(|p| p.contains(&prefix) || prefix.contains(p));
            prop_assert_eq!(map.overlaps(prefix), expected);
        }
    }
}

#[test]
fn the_upper_index_changes_no_answer() {
    let list: Vec<Ipv4Net> = (0..20_000_u32)
        .map(|i| net(i.wrapping_mul(2_654_435_761), 12 + (i % 21) as u8))
        .collect();
    let map = PrefixMap::new(list.iter().copied().zip(0_usize..));
    assert!(map.top.is_some(), "too few segments for the index");
    let mut plain = map.clone();
    plain.top = None;
    for i in 0..200_000_u32 {
        let addr = Ipv4Addr::from_bits(i.wrapping_mul(40_503_317));
        assert_eq!(
            map.longest(addr).map(|(p, v)| (p, *v)),
            plain.longest(addr).map(|(p, v)| (p, *v)),
            "{addr}"
        );
    }
}

/// The most steps of a look-up: of the binary search, and outwards.
fn most_steps(map: &PrefixMap<()>) -> u32 {
    let halvings = |addr: u32| map.segments_to_search(addr).count().ilog2() + 1;
    let steps = |addr: Ipv4Addr| halvings(addr.to_bits()) + map.covering(addr).count() as u32;
    let addrs = (0..400_000_u32).map(|i| Ipv4Addr::from_bits(i.wrapping_mul(2_654_435_761)));
    let listed = map.iter().map(|(prefix, _)| prefix.network());
    addrs.chain(listed).map(steps).max().unwrap_or(0)
}

#[test]
fn a_hundred_thousand_prefixes_take_as_few_steps_as_ten() {
    let spread = |lines: u32| {
        let line = |i: u32| net(i.wrapping_mul(2_654_435_761), [24, 32][i as usize % 2]);
        PrefixMap::new((0..lines).map(|i| (line(i), ())))
    };
    let (few, many) = (most_steps(&spread(10)), most_steps(&spread(100_000)));
    println!("10 prefixes: {few} steps at most, 100,000: {many}");
    assert!(many <= few, "{many} steps for 100,000, {few} for 10");
}

#[test]
fn no_list_takes_more_than_17_steps_of_search() {
    // Each second address of one /16: as many segments as there can be under one table entry.
    let crowded = PrefixMap::new((0..1 << 15).map(|i| (net(0x0a00_0000 | i << 1, 32), ())));
    // All of it nested, too.
    let around = (8..=31).map(|len| (net(0x0a00_0000, len), ()));
    let nested = PrefixMap::new(crowded.iter().map(|(p, value)| (p, *value)).chain(around));
    assert_eq!(most_steps(&crowded), 17 + 1);
    assert!(most_steps(&nested) <= 17 + 25, "{}", most_steps(&nested));
}
