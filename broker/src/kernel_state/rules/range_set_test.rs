use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Insert(Range<u32>),
    Remove(Range<u32>),
    /// As an allocation does.
    TakeFirst(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..40u32, 0..12u32).prop_map(|(start, length)| start..start + length);
    prop_oneof![
        range().prop_map(Step::Insert),
        range().prop_map(Step::Remove),
        (1..6u32).prop_map(Step::TakeFirst),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn it_is_the_set_of_the_numbers(steps in proptest::collection::vec(step(), 0..40)) {
        let (mut set, mut model) = (RangeSet::default(), BTreeSet::new());
        for step in steps {
            match step {
                Step::Insert(range) => {
                    set.insert(range.clone());
                    model.extend(range);
                }
                Step::Remove(range) => {
                    set.remove(range.clone());
                    model.retain(|number| !range.contains(number));
                }
                Step::TakeFirst(numbers) => {
                    let fits = |start: &u32| (*start..start + numbers).all(|n| model.contains(&n));
                    let first = (0..60).find(fits);
                    prop_assert_eq!(set.first_fit(numbers), first);
                    if let Some(start) = first {
                        let range = start..start + numbers;
                        prop_assert!(set.has_all(&range));
                        set.remove(range.clone());
                        model.retain(|number| !range.contains(number));
                    }
                }
            }
            prop_assert_eq!(set.len() as usize, model.len());
            let numbers: Vec<u32> = set.iter().flatten().collect();
            prop_assert!(numbers.iter().eq(&model), "{:?}", set);
            prop_assert!((0..60).all(|number| set.contains(number) == model.contains(&number)));
            // No range touches the next.
            let all: Vec<Range<u32>> = set.iter().collect();
            prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start), "{:?}", set);
            for range in [0..3, 5..9, 7..8, 20..20] {
                let is_whole = range.clone().all(|number| model.contains(&number));
                prop_assert_eq!(set.has_all(&range), is_whole);
            }
        }
    }
}

impl RangeSet {
    /// Whether all numbers of a range are in the set.
    pub(crate) fn has_all(&self, range: &Range<u32>) -> bool {
        let before = self.ranges.range(..=range.start).next_back();
        range.is_empty() || before.is_some_and(|(_, end)| range.end <= *end)
    }
}
