use super::*;

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((4 + value.len() as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// `first`: the kind of the first address, which the family gives.
fn direction(kind: u16, first: u16, ends: [(&[u8], u16); 2], protocol: u8) -> Vec<u8> {
    const NESTED: u16 = 1 << 15;
    let ip = [attribute(first, ends[0].0), attribute(first + 1, ends[1].0)];
    let mut proto = attribute(1, &[protocol]);
    if protocol != 1 {
        proto.extend(attribute(2, &ends[0].1.to_be_bytes()));
        proto.extend(attribute(3, &ends[1].1.to_be_bytes()));
    }
    let both = [
        attribute(1 | NESTED, &ip.concat()),
        attribute(2 | NESTED, &proto),
    ];
    attribute(kind | NESTED, &both.concat())
}

#[test]
fn connections_with_another_source_are_translated_and_others_are_not() {
    let (client, host, server) = (&[10, 0, 0, 2], &[192, 0, 2, 1], &[203, 0, 113, 1]);
    let connection = |source: (&[u8], u16), protocol| {
        let original = [(&client[..], 61_000), (&server[..], 80)];
        let reply = [(&server[..], 80), source];
        [
            direction(1, 1, original, protocol),
            direction(2, 1, reply, protocol),
        ]
        .concat()
    };
    let of = |source: (&[u8], u16), protocol| translated(&connection(source, protocol));
    assert_eq!(of((host, 61_000), 6), Some((6, 61_000)), "its port is kept");
    assert_eq!(of((host, 62_000), 17), Some((17, 62_000)));
    assert_eq!(of((client, 62_000), 17), Some((17, 62_000)));
    assert_eq!(of((client, 61_000), 6), None, "it is only forwarded");
    assert_eq!(of((host, 61_000), 1), None, "an echo has no port");
    let ends = [([1; 16], 5), ([2; 16], 80)];
    let [original, reply] = [[ends[0], ends[1]], [ends[1], ([3; 16], 6)]];
    let ipv6 = |ends: [([u8; 16], u16); 2], kind| {
        direction(
            kind,
            3,
            [(&ends[0].0, ends[0].1), (&ends[1].0, ends[1].1)],
            6,
        )
    };
    let whole = [ipv6(original, 1), ipv6(reply, 2)].concat();
    assert_eq!(translated(&whole), Some((6, 6)));
    // Cut short it is none.
    for length in 0..whole.len() - 8 {
        assert_eq!(translated(&whole[..length]), None, "{length}");
    }
}

#[test]
fn a_namespace_without_connections_has_no_ports() {
    crate::testing::in_netns("a_namespace_without_connections", || {
        assert_eq!(translated_ports(|_| true).unwrap(), BTreeSet::new());
    });
}
