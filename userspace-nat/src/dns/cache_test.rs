use proptest::prelude::*;
use slipgate_abi::VmId;

use super::*;

const SECOND: u64 = SECOND_NS;

fn answer(len: usize, lifetime_s: u32) -> Answer {
    Answer {
        message: vec![7; len].into(),
        ttls: Box::default(),
        extended_rcode: 0,
        lifetime_s: Some(lifetime_s),
    }
}

fn key(i: u32) -> [u8; 4] {
    i.to_be_bytes()
}

#[test]
fn an_answer_ages_and_ends() {
    let mut cache = Cache::new(10, 10_000);
    cache.insert(VmId::new(1), b"k", answer(20, 60), 5 * SECOND);
    assert_eq!(cache.get(b"k", 5 * SECOND).unwrap().1, 0);
    assert_eq!(cache.get(b"k", 6 * SECOND - 1).unwrap().1, 0);
    assert_eq!(cache.get(b"k", 64 * SECOND).unwrap().1, 59);
    assert!(cache.get(b"k", 65 * SECOND).is_none());
    assert!(
        cache.is_empty() && cache.bytes() == 0,
        "it went when it was met"
    );
    assert!(cache.get(b"other", 0).is_none());
}

#[test]
fn what_has_no_lifetime_is_not_kept() {
    let mut cache = Cache::new(10, 10_000);
    cache.insert(
        VmId::new(1),
        b"k",
        Answer {
            lifetime_s: None,
            ..answer(20, 1)
        },
        0,
    );
    assert!(cache.is_empty());
}

#[test]
fn the_oldest_by_use_goes_first() {
    let mut cache = Cache::new(3, 10_000);
    for i in 0..3 {
        cache.insert(VmId::new(1), &key(i), answer(20, 60), 0);
    }
    assert!(cache.get(&key(0), 0).is_some());
    cache.insert(VmId::new(1), &key(3), answer(20, 60), 0);
    let left: Vec<u32> = (0..4)
        .filter(|&i| cache.get(&key(i), 0).is_some())
        .collect();
    assert_eq!(left, [0, 2, 3]);
}

#[test]
fn bytes_are_bounded_too() {
    let mut cache = Cache::new(1000, 20_000);
    for i in 0..100 {
        cache.insert(VmId::new(1), &key(i), answer(1000, 60), 0);
        assert!(cache.bytes() <= 20_000);
    }
    assert!(cache.len() > 10);
    cache.insert(VmId::new(1), b"huge", answer(6000, 60), 0);
    assert!(
        cache.get(b"huge", 0).is_none(),
        "one answer takes no more than a quarter"
    );
}

#[test]
fn a_vm_that_asks_for_much_throws_out_its_own() {
    let mut cache = Cache::new(100, 1 << 20);
    for i in 0..10 {
        cache.insert(VmId::new(1), &key(i), answer(20, 60), 0);
    }
    for i in 1000..2000 {
        cache.insert(VmId::new(2), &key(i), answer(20, 60), 0);
    }
    assert_eq!(cache.len(), 100);
    assert!(
        (0..10).all(|i| cache.get(&key(i), 0).is_some()),
        "the small one kept all"
    );
}

proptest! {
    /// Against a plain list: what is found is what was put in last, in time; nothing leaks.
    #[test]
    fn behaves_as_a_list(ops in prop::collection::vec((0u32..12, 0u32..4, 1u32..20, any::<bool>()), 1..300)) {
        let mut cache = Cache::new(8, 1 << 20);
        let mut list: Vec<(u32, u64, u32, usize)> = Vec::new();
        for (t, (k, vm, lifetime, insert)) in ops.into_iter().enumerate() {
            let now = t as u64 * SECOND;
            if insert {
                let len = 20 + t;
                cache.insert(VmId::new(vm), &key(k), answer(len, lifetime), now);
                list.retain(|e| e.0 != k);
                list.push((k, now, lifetime, len));
            } else if let Some((found, age)) = cache.get(&key(k), now) {
                let expected = list.iter().find(|e| e.0 == k).expect("it was put in");
                prop_assert_eq!(found.message.len(), expected.3);
                prop_assert_eq!(u64::from(age), (now - expected.1) / SECOND);
                prop_assert!(age < expected.2);
            }
            prop_assert!(cache.len() <= 8);
            prop_assert_eq!(cache.table.len(), cache.len());
            prop_assert_eq!(cache.owners.values().map(|o| o.len).sum::<usize>(), cache.len());
            prop_assert_eq!(cache.owners.values().map(|o| o.bytes).sum::<usize>(), cache.bytes());
            prop_assert_eq!(cache.entries.len() - cache.free.len(), cache.len());
        }
    }
}
