use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::*;

fn v4(bits: u32, len: u8) -> IpNet {
    IpNet::new_assert(Ipv4Addr::from_bits(bits).into(), len).trunc()
}

fn v6(bits: u128, len: u8) -> IpNet {
    IpNet::new_assert(Ipv6Addr::from_bits(bits).into(), len).trunc()
}

/// The prefix for documentation, 2001:db8::/32 (RFC 3849).
const DOCUMENTATION: u128 = 0x2001_0db8 << 96;

/// Prefixes crowded into few addresses, so that they nest and touch, of both families.
fn prefixes(count: usize) -> impl Strategy<Value = Vec<IpNet>> {
    let prefix = prop_oneof![
        6 => (0_u32..64, 26_u8..=32).prop_map(|(low, len)| v4(0x0a00_0000 | low, len)),
        2 => (any::<u32>(), 0_u8..=32).prop_map(|(bits, len)| v4(bits, len)),
        1 => (0_u8..=32).prop_map(|len| v4(u32::MAX, len)),
        6 => (0_u128..64, 122_u8..=128).prop_map(|(low, len)| v6(DOCUMENTATION | low, len)),
        2 => (any::<u128>(), 0_u8..=128).prop_map(|(bits, len)| v6(bits, len)),
        1 => (0_u8..=128).prop_map(|len| v6(u128::MAX, len)),
    ];
    prop::collection::vec(prefix, 0..count)
}

fn addr() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        (0_u32..64).prop_map(|low| Ipv4Addr::from_bits(0x0a00_0000 | low).into()),
        any::<Ipv4Addr>().prop_map(IpAddr::V4),
        Just(Ipv4Addr::BROADCAST.into()),
        Just(Ipv4Addr::UNSPECIFIED.into()),
        (0_u128..64).prop_map(|low| Ipv6Addr::from_bits(DOCUMENTATION | low).into()),
        any::<Ipv6Addr>().prop_map(IpAddr::V6),
        Just(Ipv6Addr::from_bits(u128::MAX).into()),
        Just(Ipv6Addr::UNSPECIFIED.into()),
    ]
}

fn naive(prefixes: &[IpNet], addr: IpAddr) -> Vec<(IpNet, usize)> {
    let mut found: Vec<(IpNet, usize)> = Vec::new();
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
    fn covering_prefixes_are_those_of_a_linear_scan(list in prefixes(60), addrs in prop::collection::vec(addr(), 1..40)) {
        let map = PrefixMap::new(list.iter().copied().zip(0_usize..));
        for addr in addrs {
            let found: Vec<_> = map.covering(addr).map(|(p, v)| (p, *v)).collect();
            prop_assert_eq!(found, naive(&list, addr));
        }
    }

    #[test]
    fn overlaps_is_what_comparing_with_each_says(list in prefixes(8), other in prefixes(3)) {
        let map = PrefixMap::new(list.iter().map(|p| (*p, ())));
        for prefix in other {
            let expected = list.iter().any(|p| p.contains(&prefix) || prefix.contains(p));
            prop_assert_eq!(map.overlaps(prefix), expected);
        }
    }

    #[test]
    fn every_prefix_is_listed_once_in_order(list in prefixes(40)) {
        let map = PrefixMap::new(list.iter().map(|p| (*p, ())));
        let mut expected = list;
        expected.sort_by_key(|p| (p.network(), p.prefix_len()));
        expected.dedup();
        prop_assert_eq!(map.len(), expected.len());
        prop_assert_eq!(map.iter().map(|(p, ())| p).collect::<Vec<_>>(), expected);
    }
}
