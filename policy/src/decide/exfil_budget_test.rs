use super::*;

#[test]
fn new_names_are_bounded_by_octets_and_known_ones_cost_nothing() {
    let (hasher, mut asker) = (RandomState::new(), Asker::new(NewNames::default(), 0));
    let name = |i: u32| [&i.to_be_bytes()[..], &[b'x'; 56]].concat();
    let ask = |asker: &mut Asker, i: u32, at_ns| asker.asks(&hasher, &name(i), 62, at_ns);
    // 64 octets each.
    let first = (0..2_000).filter(|i| ask(&mut asker, *i, 0)).count();
    assert_eq!(first, 512, "the burst");
    assert!((0..512).all(|i| ask(&mut asker, i, 1)), "asked before");
    assert!(
        !asker.asks(&hasher, &[&name(0)[..], b"TXT"].concat(), 62, 1),
        "another type is another question"
    );
    let minute = 60 * SECOND_NS;
    let second = (3_000..6_000)
        .filter(|i| ask(&mut asker, *i, minute))
        .count();
    assert!((125..=128).contains(&second), "{second} in a minute");
    assert!(!ask(&mut asker, 9_999, minute));
    assert!(ask(&mut asker, 7, minute + 599 * SECOND_NS), "still known");
}

#[test]
fn what_is_remembered_is_bounded() {
    let (hasher, mut asker) = (RandomState::new(), Asker::new(NewNames::default(), 0));
    for i in 0..100_000_u32 {
        let now_ns = u64::from(i) * SECOND_NS;
        asker.asks(&hasher, &i.to_be_bytes(), 4, now_ns);
        assert!(asker.current.len() <= MOST_NAMES && asker.previous.len() <= MOST_NAMES);
    }
    assert!(asker.current.len() <= 601, "a time ends");
}

#[test]
fn a_policy_bounds_them_and_another_one_otherwise() {
    let may = NewNames {
        octets_per_minute: 30,
        burst_octets: 60,
    };
    let (hasher, mut asker) = (RandomState::new(), Asker::new(may, 0));
    let mut next = 0_u32;
    let mut ask = |asker: &mut Asker, at_ns| {
        next += 1;
        asker.asks(&hasher, &next.to_be_bytes(), 13, at_ns)
    };
    let count = |asker: &mut Asker, ask: &mut dyn FnMut(&mut Asker, u64) -> bool, at_ns| {
        (0..100).filter(|_| ask(asker, at_ns)).count()
    };
    // 15 octets each.
    assert_eq!(count(&mut asker, &mut ask, 0), 4);
    assert_eq!(count(&mut asker, &mut ask, 60 * SECOND_NS), 2);
    asker.set(may);
    assert_eq!(count(&mut asker, &mut ask, 60 * SECOND_NS), 0);
    asker.set(NewNames {
        octets_per_minute: 30,
        burst_octets: 90,
    });
    assert_eq!(count(&mut asker, &mut ask, 60 * SECOND_NS), 6);
    assert!(asker.asks(&hasher, &1_u32.to_be_bytes(), 13, 61 * SECOND_NS));
}
