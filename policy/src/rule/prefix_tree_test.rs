use super::*;

/// A prefix, without its host bits.
fn entry<A: AddressBits + std::ops::BitAnd<Output = A> + std::ops::Not<Output = A>>(
    bits: A,
    len: u8,
) -> (A, u8) {
    (bits & !A::FIRST.last(len), len)
}

fn tree<A: AddressBits>(prefixes: impl Iterator<Item = (A, u8)>) -> PrefixTree<A, usize> {
    let numbered = prefixes.zip(0..).map(|((first, len), n)| (first, len, n));
    PrefixTree::new(numbered.collect())
}

/// Numbers of the prefixes that contain an address, the innermost first.
fn covering<A: AddressBits>(map: &PrefixTree<A, usize>, addr: A) -> Vec<usize> {
    let mut at = map.innermost(addr);
    std::iter::from_fn(|| map.outwards(&mut at).map(|(_, n)| *n)).collect()
}

/// Spreads numbers over all addresses.
fn spread_v4(n: u32) -> u32 {
    n.wrapping_mul(2_654_435_761)
}

/// Spreads numbers over 2000::/3.
fn spread_v6(n: u32) -> u128 {
    let bits = u128::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    bits >> 3 | 0x2 << 124
}

fn the_upper_index_changes_no_answer<A: AddressBits>(
    prefixes: impl Iterator<Item = (A, u8)>,
    addrs: impl Iterator<Item = A>,
) {
    let map = tree(prefixes);
    assert!(map.top.is_some(), "too few segments for the index");
    let plain = PrefixTree {
        top: None,
        nodes: map.nodes.clone(),
        starts: map.starts.clone(),
        innermost: map.innermost.clone(),
    };
    for (at, addr) in addrs.enumerate() {
        assert_eq!(covering(&map, addr), covering(&plain, addr), "address {at}");
    }
}

#[test]
fn the_upper_index_changes_no_answer_with_ipv4() {
    the_upper_index_changes_no_answer(
        (0..20_000).map(|i| entry(spread_v4(i), 12 + (i % 21) as u8)),
        (0..200_000_u32).map(|i| i.wrapping_mul(40_503_317)),
    );
}

#[test]
fn the_upper_index_changes_no_answer_with_ipv6() {
    the_upper_index_changes_no_answer(
        (0..20_000).map(|i| entry(spread_v6(i), 16 + (i % 113) as u8)),
        (0..200_000).map(|i| match i % 2 {
            0 => spread_v6(i % 20_000),
            _ => u128::from(spread_v4(i)) << 96,
        }),
    );
}

/// The most steps of a look-up: of the binary search, and outwards.
fn most_steps(map: &PrefixTree<u32, usize>) -> u32 {
    let halvings = |addr: u32| map.segments_to_search(addr).count().ilog2() + 1;
    let steps = |addr: u32| halvings(addr) + covering(map, addr).len() as u32;
    let listed = map.nodes.iter().map(|node| node.first);
    let addrs = (0..400_000_u32).map(spread_v4).chain(listed);
    addrs.map(steps).max().unwrap_or(0)
}

#[test]
fn a_hundred_thousand_prefixes_take_as_few_steps_as_ten() {
    let spread =
        |lines: u32| tree((0..lines).map(|i| entry(spread_v4(i), [24, 32][i as usize % 2])));
    let (few, many) = (most_steps(&spread(10)), most_steps(&spread(100_000)));
    println!("10 prefixes: {few} steps at most, 100,000: {many}");
    assert!(many <= few, "{many} steps for 100,000, {few} for 10");
}

#[test]
fn no_list_takes_more_than_17_steps_of_search() {
    // Each second address of one /16: as many segments as there can be under one table entry.
    let crowded = || (0..1 << 15).map(|i| entry(0x0a00_0000 | i << 1, 32));
    // All of it nested, too.
    let around = (8..=31).map(|len| entry(0x0a00_0000, len));
    let (crowded, nested) = (tree(crowded()), tree(crowded().chain(around)));
    assert_eq!(most_steps(&crowded), 17 + 1);
    assert!(most_steps(&nested) <= 17 + 25, "{}", most_steps(&nested));
}
