use std::{path::Path, sync::atomic::Ordering::Release};

use proptest::prelude::*;
use slipgate_control::{InMemory, Owner, Sizes};
use tempfile::TempDir;

use super::*;

const RULES: u32 = 64;

/// Maps in files of memory, with the process of a row.
struct Rig {
    memory: InMemory,
    owner: Owner,
    room: RuleRoom,
}

impl Rig {
    fn of(dir: &Path) -> Self {
        let sizes = Sizes {
            slots: SLOTS_PER_CHUNK,
            vms: 4,
            rules: RULES,
        };
        let paths = Paths {
            pin_dir: dir.join("maps"),
            run_dir: dir.join("maps"),
        };
        let (memory, owner) = InMemory::open(paths, sizes).unwrap();
        Self {
            memory,
            owner,
            room: RuleRoom::default(),
        }
    }

    fn new() -> (TempDir, Self) {
        let dir = tempfile::tempdir().unwrap();
        let rig = Self::of(dir.path());
        (dir, rig)
    }

    fn with<T>(&mut self, work: impl FnOnce(&mut RuleRoom, Writer<'_>) -> T) -> T {
        let rows = [self.owner.row()];
        let writer = Writer {
            maps: &self.memory.maps,
            paths: self.memory.paths(),
            rows: &rows,
        };
        work(&mut self.room, writer)
    }

    fn begin(&mut self, lists: &[Vec<Described>]) -> Vec<Range<u32>> {
        self.with(|room, writer| room.begin(writer, lists)).unwrap()
    }

    fn add(&mut self, rules: &[Described]) -> anyhow::Result<Range<u32>> {
        self.with(|room, writer| room.add(writer, rules))
    }

    fn texts(&self, run: &Range<u32>) -> Vec<String> {
        let maps = &self.memory.maps;
        let text = |index| {
            let element = maps.rule_element(RuleIndex::new(index)).unwrap();
            slipgate_control::maps::text_of(&element.text)
        };
        run.clone().map(text).collect()
    }

    /// A flow that names a rule, in a slot.
    fn name(&self, slot: u32, rule: Option<u32>) {
        let maps = &self.memory.maps;
        let slot = maps.slot(SlotIndex::new(slot)).unwrap();
        // SAFETY: a word of a slot that no other process has.
        unsafe { (&raw mut (*slot.as_ptr()).rule).write(rule.unwrap_or_default()) };
        let verdict = rule.map_or(Verdict::Free, |_| Verdict::Fast);
        slot.verdict().store(verdict as u32, Release);
    }

    fn claim_slots(&self) {
        let claimed = self.memory.maps.claim_chunk(self.owner.row(), u64::MAX / 2);
        assert!(claimed.is_some());
    }
}

fn rules(name: &str, number: usize) -> Vec<Described> {
    let rule = |at| Described::forward(format!("{name} {at}"));
    (0..number).map(rule).collect()
}

#[test]
fn each_list_has_a_run_and_a_successor_finds_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let lists = [rules("a", 3), rules("b", 5)];
    let mut first = Rig::of(dir.path());
    let runs = first.begin(&lists);
    assert_eq!(first.texts(&runs[1])[4], "b 4");
    assert_eq!((runs[0].len(), runs[1].len()), (3, 5));
    let third = first.add(&rules("c", 2)).unwrap();
    // Another process beside it takes others, and finds what is the same.
    let mut second = Rig::of(dir.path());
    let found = second.begin(&[rules("b", 5), rules("d", 3)]);
    assert_eq!(found[0], runs[1]);
    for other in [&runs[0], &runs[1], &third] {
        assert!(found[1].clone().all(|rule| !other.contains(&rule)));
    }
    assert_eq!(first.texts(&third), ["c 0", "c 1"]);
}

#[test]
fn no_rules_need_no_place() {
    let (_dir, mut rig) = Rig::new();
    let runs = rig.begin(&[rules("a", 3), Vec::new()]);
    assert_eq!(runs, [0..3, 0..0]);
    assert_eq!(rig.add(&[]).unwrap(), 0..0);
    rig.add(&rules("b", RULES as usize - 3)).unwrap();
    assert_eq!(rig.add(&[]).unwrap(), 0..0, "where there is no room");
    assert_eq!(rig.room.in_force(), RULES);
}

#[test]
fn rules_whose_texts_are_equal_as_far_as_they_are_kept_are_others() {
    let long = "--forward ".to_owned() + &"x".repeat(128);
    let of = |end| vec![Described::forward(format!("{long}{end}"))];
    let (_dir, mut rig) = Rig::new();
    let run = rig.begin(&[of(1)]).remove(0);
    let again = rig.with(|_, writer| Present::read(writer.maps).run_of(&wholes(&of(1))));
    assert_eq!(again, Some(run));
    let other = rig.with(|_, writer| Present::read(writer.maps).run_of(&wholes(&of(2))));
    assert_eq!(other, None);
}

#[test]
fn claims_are_read_as_they_are_written_and_nonsense_is_none() {
    let (_dir, mut rig) = Rig::new();
    let row = rig.owner.row();
    let of_others = rig.with(|_, writer| {
        writer.claim(&[4..9, 20..22].into_iter().collect()).unwrap();
        let text = fs::read_to_string(writer.claims_of(row)).unwrap();
        assert_eq!(ranges(&text).collect::<Vec<_>>(), [4..9, 20..22]);
        let other = Writer {
            rows: &[row + 1],
            ..writer
        };
        assert_eq!(writer.of_others().unwrap().len(), 0, "its own");
        other.of_others().unwrap()
    });
    assert_eq!(of_others.iter().collect::<Vec<_>>(), [4..9, 20..22]);
    let bad = "x\n1\n1 x\n5 4294967295\n7 8\n1 4\n";
    assert_eq!(ranges(bad).collect::<Vec<_>>(), [7..8, 1..4]);
}

/// Elements that no flow names are used again; named ones stay.
#[test]
fn room_that_is_exhausted_is_refused_and_comes_back_with_the_flows_end() {
    let (_dir, mut rig) = Rig::new();
    rig.claim_slots();
    let kept = rig.begin(&[rules("kept", 4)]).remove(0);
    let mut present = rig.add(&rules("0", 10)).unwrap();
    let mut all = vec![present.clone()];
    // A flow names a rule of each run, in another place of it each time.
    for change in 1..5u32 {
        rig.name(change, Some(present.start + change));
        let next = rig.add(&rules(&change.to_string(), 10)).unwrap();
        rig.room
            .retire(std::mem::replace(&mut present, next.clone()), None);
        assert!(
            all.iter()
                .all(|run| run.end <= next.start || next.end <= run.start)
        );
        all.push(next);
    }
    rig.name(5, Some(present.start + 5));
    // 54 elements are used, and of the former runs no ten in a row are free.
    let refused = rig.add(&rules("5", 12)).unwrap_err();
    let text = refused.to_string();
    assert!(refused.is::<NoRoom>(), "{text}");
    for part in [
        "no room for 12 rules",
        "share 64",
        "14 are in force",
        "--max-rules",
    ] {
        assert!(text.contains(part), "{text}");
    }
    for (run, change) in all.iter().zip(0..4) {
        let named = change as usize + 1;
        assert_eq!(rig.texts(run)[named], format!("{change} {named}"));
    }
    assert_eq!(rig.texts(&present)[9], "4 9", "in force");
    assert_eq!(rig.texts(&kept), ["kept 0", "kept 1", "kept 2", "kept 3"]);
    // One of the flows ends.
    rig.name(2, None);
    let run = rig.add(&rules("5", 12)).unwrap();
    assert_eq!(rig.texts(&run)[11], "5 11");
    assert!(
        run.clone()
            .all(|rule| !kept.contains(&rule) && !present.contains(&rule))
    );
    let named = [1, 3, 4].map(|flow| all[flow - 1].start + flow as u32);
    assert!(
        named.iter().all(|rule| !run.contains(rule)),
        "{run:?}, {named:?}"
    );
}

/// As after many changes of one rule out of many.
#[test]
fn what_flows_name_is_part_of_a_run_that_has_the_same_rule_there() {
    let (_dir, mut rig) = Rig::new();
    rig.claim_slots();
    let list = |last: u32| {
        let mut list = rules("same", 29);
        list.push(Described::forward(format!("last {last}")));
        list
    };
    let first = rig.begin(&[list(0)]).remove(0);
    let second = rig.add(&list(1)).unwrap();
    rig.room.retire(first.clone(), None);
    // A flow in the middle of each former run: there are no thirty free ones in a row.
    rig.name(0, Some(first.start + 14));
    let third = rig.add(&list(2)).unwrap();
    assert_eq!(third, first, "the same places, but for the last");
    assert_eq!(rig.texts(&third)[29], "last 2");
    assert_eq!(rig.texts(&second)[29], "last 1");
}

/// A run that a process has claimed and not filled yet is not found by anybody.
#[test]
fn a_run_that_is_claimed_anew_is_not_found_by_its_former_rules() {
    let (_dir, mut rig) = Rig::new();
    rig.claim_slots();
    let former = rig.begin(&[rules("former", 30)]).remove(0);
    let present = rig.add(&rules("present", 34)).unwrap();
    rig.room.retire(former.clone(), None);
    let run_of = |rig: &mut Rig, rules: &[Described]| {
        rig.with(|_, writer| Present::read(writer.maps).run_of(&wholes(rules)))
    };
    let first = former.start..former.start + 1;
    assert_eq!(run_of(&mut rig, &rules("former", 1)), Some(first.clone()));
    // The first element is claimed with the room for two, which is behind the one that a flow names.
    rig.name(0, Some(first.end));
    let two = rig.add(&rules("two", 2)).unwrap();
    assert_eq!(two.start, first.end + 1);
    assert_eq!(rig.room.free.iter().collect::<Vec<_>>(), [first]);
    assert_eq!(run_of(&mut rig, &rules("former", 1)), None);
    assert_eq!(run_of(&mut rig, &rules("present", 34)), Some(present));
    assert_eq!(
        rig.texts(&(former.start + 1..former.start + 2)),
        ["former 1"]
    );
}

#[test]
fn thousands_of_changes_keep_little_claimed() {
    let (_dir, mut rig) = Rig::new();
    rig.begin(&[rules("forwards", 1)]);
    let mut present = rig.add(&rules("0", 3)).unwrap();
    // A word in a slot of no chunk's owner is no flow.
    rig.name(7, Some(present.start));
    for change in 1..1_000 {
        let next = rig.add(&rules(&change.to_string(), 3)).unwrap();
        rig.room.retire(std::mem::replace(&mut present, next), None);
        assert!(rig.room.in_force() == 4);
    }
    rig.with(|room, writer| room.record_if_stale(writer));
    // What is left of runs of four is claimed too; the rest is anybody's.
    let recorded = rig.room.recorded.len();
    assert!(recorded < RULES / 2, "{recorded}");
}

#[derive(Clone, Debug)]
enum Step {
    /// Another policy of so many rules, or a change of one.
    Put(usize, usize),
    Remove(usize),
    /// A flow by a rule of a policy.
    Open(u32, usize),
    End(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..5usize, 1..9usize).prop_map(|(policy, rules)| Step::Put(policy, rules)),
        1 => (0..5usize).prop_map(Step::Remove),
        3 => (0..20u32, 0..5usize).prop_map(|(slot, policy)| Step::Open(slot, policy)),
        2 => (0..20u32).prop_map(Step::End),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_change_touches_what_is_in_force_or_named(steps in proptest::collection::vec(step(), 1..120)) {
        let (_dir, mut rig) = Rig::new();
        rig.claim_slots();
        rig.begin(&[rules("forwards", 1)]);
        let mut policies: Vec<Option<(Range<u32>, Vec<String>)>> = vec![None; 5];
        // Text of the rule that each flow names.
        let mut flows: HashMap<u32, (u32, String)> = HashMap::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Put(policy, length) => {
                    let list = rules(&format!("{policy}.{number}"), length);
                    match rig.add(&list) {
                        Ok(run) => {
                            prop_assert_eq!(run.len(), length);
                            let texts = list.into_iter().map(|rule| rule.text).collect();
                            let before = policies[policy].replace((run.clone(), texts));
                            if let Some((before, _)) = before {
                                rig.room.retire(before, Some(run));
                            }
                        }
                        Err(e) => prop_assert!(e.is::<NoRoom>(), "{e:#}"),
                    }
                }
                Step::Remove(policy) => {
                    if let Some((run, _)) = policies[policy].take() {
                        rig.room.retire(run, None);
                    }
                }
                Step::Open(slot, policy) => {
                    if let Some((run, texts)) = &policies[policy] {
                        rig.name(slot, Some(run.start));
                        flows.insert(slot, (run.start, texts[0].clone()));
                    }
                }
                Step::End(slot) => {
                    rig.name(slot, None);
                    flows.remove(&slot);
                }
            }
            let mut taken = HashSet::new();
            for (run, texts) in policies.iter().flatten() {
                prop_assert!(run.clone().all(|rule| taken.insert(rule)), "two policies share a rule");
                prop_assert_eq!(&rig.texts(run), texts);
            }
            for (rule, text) in flows.values() {
                prop_assert_eq!(&rig.texts(&(*rule..rule + 1))[0], text);
            }
            prop_assert_eq!(rig.room.in_force() as usize, taken.len() + 1);
        }
    }
}
