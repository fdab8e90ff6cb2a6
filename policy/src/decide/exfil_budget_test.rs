use super::*;

#[test]
fn new_names_are_bounded_by_octets_and_known_ones_take_none_of_these() {
    let (hasher, mut asker) = (RandomState::new(), Asker::new(NewNames::default(), 0));
    let name = |i: u32| [&i.to_be_bytes()[..], &[b'x'; 56]].concat();
    let ask = |asker: &mut Asker, i: u32, at_ns| {
        asker
            .asks(&hasher, &name(i), Chosen::Beneath(62), at_ns)
            .is_ok()
    };
    // 64 octets each.
    let first = (0..2_000).filter(|i| ask(&mut asker, *i, 0)).count();
    assert_eq!(first, 512, "the burst");
    assert!((0..512).all(|i| ask(&mut asker, i, 1)), "asked before");
    let other_type = [&name(0)[..], b"TXT"].concat();
    assert_eq!(
        asker.asks(&hasher, &other_type, Chosen::Beneath(62), 1),
        Err(Exceeded::NewNames),
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

/// Asks until it may not, at one time. Returns how often it could.
fn times(asker: &mut Asker, hasher: &RandomState, names: u32, chosen: Chosen, at_ns: u64) -> u32 {
    let ask = |i: u32| asker.asks(hasher, &(i % names).to_be_bytes(), chosen, at_ns);
    (0..1_000_000).map(ask).take_while(Result::is_ok).count() as u32
}

#[test]
fn the_choice_among_questions_asked_before_is_bounded_by_what_it_can_say() {
    let (hasher, beneath) = (RandomState::new(), Chosen::Beneath(8));
    let NewNames {
        octets_per_minute,
        burst_octets,
    } = NewNames::default();
    // Bits that number one of so many.
    for (names, bits) in [(2, 1), (3, 2), (4, 2), (256, 8), (1_000, 10)] {
        let mut asker = Asker::new(NewNames::default(), 0);
        for i in 0..names {
            asker
                .asks(&hasher, &u32::to_be_bytes(i), beneath, 0)
                .unwrap();
        }
        let first = times(&mut asker, &hasher, names, beneath, 0);
        assert_eq!(first, burst_octets * 8 / bits, "{names}");
        let refused = asker.asks(&hasher, &1_u32.to_be_bytes(), beneath, 0);
        assert_eq!(refused, Err(Exceeded::Repeated));
        // What is new costs the other bucket.
        assert_eq!(asker.asks(&hasher, b"new", beneath, 0), Ok(()));
    }
    let mut asker = Asker::new(NewNames::default(), 0);
    for i in 0..256_u32 {
        asker.asks(&hasher, &i.to_be_bytes(), beneath, 0).unwrap();
    }
    times(&mut asker, &hasher, 256, beneath, 0);
    let minute = times(&mut asker, &hasher, 256, beneath, 60 * SECOND_NS);
    assert_eq!(minute, octets_per_minute, "an octet each");
}

#[test]
fn a_guest_that_asks_for_the_same_few_names_often_is_not_held_up() {
    let hasher = RandomState::new();
    for chosen in [Chosen::Beneath(20), Chosen::Listed] {
        let mut asker = Asker::new(NewNames::default(), 0);
        // Ten names with two types, a hundred questions a second, for an hour.
        for i in 0..360_000_u32 {
            let now_ns = u64::from(i) * SECOND_NS / 100;
            let asked = asker.asks(&hasher, &(i % 20).to_be_bytes(), chosen, now_ns);
            assert_eq!(asked, Ok(()), "question {i}");
        }
    }
}

#[test]
fn names_that_rules_give_cost_their_type_and_then_the_choice() {
    let hasher = RandomState::new();
    let mut asker = Asker::new(NewNames::default(), 0);
    let burst = NewNames::default().burst_octets;
    let new = times(&mut asker, &hasher, u32::MAX, Chosen::Listed, 0);
    assert_eq!(new, burst / TYPE_OCTETS);
    assert_eq!(asker.asks(&hasher, b"new", Chosen::Beneath(8), 0), Ok(()));
}

#[test]
fn a_policy_without_invented_names_still_sends_those_that_rules_give() {
    let least = NewNames {
        octets_per_minute: 1,
        burst_octets: 1,
    };
    let (hasher, mut asker) = (RandomState::new(), Asker::new(least, 0));
    assert_eq!(
        asker.asks(&hasher, b"invented", Chosen::Beneath(1), 0),
        Err(Exceeded::NewNames)
    );
    for second in 0..1_000_u64 {
        let name = (second % 20).to_be_bytes();
        let asked = asker.asks(&hasher, &name, Chosen::Listed, second * SECOND_NS);
        assert_eq!(asked, Ok(()), "after {second} s");
    }
}

#[test]
fn a_question_of_two_periods_is_counted_once() {
    let (hasher, mut asker) = (RandomState::new(), Asker::new(NewNames::default(), 0));
    for at_ns in [0, PERIOD_NS] {
        for i in 0..16_u32 {
            let _ = asker.asks(&hasher, &i.to_be_bytes(), Chosen::Listed, at_ns);
        }
        assert_eq!(asker.bits(), 4);
    }
}

#[test]
fn what_is_remembered_is_bounded() {
    let (hasher, mut asker) = (RandomState::new(), Asker::new(NewNames::default(), 0));
    for i in 0..100_000_u32 {
        let now_ns = u64::from(i) * SECOND_NS;
        let _ = asker.asks(&hasher, &i.to_be_bytes(), Chosen::Beneath(4), now_ns);
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
        asker
            .asks(&hasher, &next.to_be_bytes(), Chosen::Beneath(13), at_ns)
            .is_ok()
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
    let again = asker.asks(
        &hasher,
        &1_u32.to_be_bytes(),
        Chosen::Beneath(13),
        61 * SECOND_NS,
    );
    assert_eq!(again, Ok(()));
}
