use slipgate_control::{InMemory, Owner, Paths, Sizes};
use slipgate_policy::document::{CliOverrides, LoadedPolicies, PutPolicy};
use tempfile::TempDir;

use super::*;

struct Rig {
    _dir: TempDir,
    memory: InMemory,
    owner: Owner,
    catalogue: Catalogue,
}

fn none(_: &Path) -> io::Result<String> {
    Err(io::ErrorKind::NotFound.into())
}

fn put(name: &str, rules: usize) -> LoadedPolicy {
    let rules = (0..rules).map(|at| format!("{{ allow = \"10.0.{}.{}\" }}", at / 256, at % 256));
    let rules: Vec<String> = rules.collect();
    let text = format!("default = \"deny\"\nrules = [{}]\n", rules.join(", "));
    let policy = PutPolicy::parse(name, &text, None).unwrap();
    policy.load(&CliOverrides::default(), &none).unwrap()
}

impl Rig {
    fn new(rules: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths {
            pin_dir: dir.path().join("maps"),
            run_dir: dir.path().join("maps"),
        };
        let sizes = Sizes {
            slots: 1_024,
            vms: 4,
            rules,
        };
        let (memory, owner) = InMemory::open(paths, sizes).unwrap();
        let loaded = LoadedPolicies::of(&CliOverrides::default(), None, &none).unwrap();
        let policies = loaded.compile().unwrap();
        let writer = Writer {
            maps: &memory.maps,
            paths: memory.paths(),
            rows: &[owner.row()],
        };
        let forwards = vec![Described::forward("forward".into())];
        let catalogue = Catalogue::begin(writer, loaded, policies, forwards).unwrap();
        Self {
            _dir: dir,
            memory,
            owner,
            catalogue,
        }
    }

    fn change(&mut self, put: Vec<LoadedPolicy>, gone: &[&str]) -> anyhow::Result<TakenIn> {
        let gone = gone.iter().map(|name| Some((*name).to_owned())).collect();
        let compiled = self.catalogue.compile(put, gone)?;
        let writer = Writer {
            maps: &self.memory.maps,
            paths: self.memory.paths(),
            rows: &[self.owner.row()],
        };
        let local = LocalAddresses::default();
        self.catalogue.take_in(writer, compiled, &local)
    }

    /// Index and numbers of each policy, by name.
    fn numbers(&self) -> BTreeMap<Name, (u32, Range<u32>)> {
        let names = self.catalogue.names().cloned();
        let of = |name: Name| {
            let index = self.catalogue.index_of(&name);
            let numbers = self.catalogue.set().of(Some(index)).numbers();
            (name, (index, numbers))
        };
        names.map(of).collect()
    }
}

#[test]
fn a_change_of_one_of_many_leaves_the_others_indexes_and_numbers() {
    let mut rig = Rig::new(4_096);
    let names: Vec<String> = (0..200).map(|at| format!("p{at}")).collect();
    for name in &names {
        let taken = rig.change(vec![put(name, 2)], &[]).unwrap();
        assert_eq!(taken.indexes.len(), 1);
    }
    let before = rig.numbers();
    assert_eq!(before.len(), 201);
    let taken = rig.change(vec![put("p7", 3)], &[]).unwrap();
    let after = rig.numbers();
    for (name, (index, numbers)) in &before {
        let is_it = name.as_deref() == Some("p7");
        assert_eq!(after[name].0, *index);
        assert_eq!(after[name].1 != *numbers, is_it, "{name:?}");
    }
    let index = before[&Some("p7".to_owned())].0;
    assert_eq!(taken.indexes, [index]);
    // The same once more changes nothing, and neither does what differs in no rule its numbers.
    let taken = rig.change(vec![put("p7", 3)], &[]).unwrap();
    assert!(taken.indexes.is_empty());
    let mut other = put("p7", 3);
    other.settings.sleep.packets += 1;
    assert_eq!(rig.change(vec![other], &[]).unwrap().indexes, [index]);
    assert_eq!(rig.numbers(), after);
    // An index is used again.
    rig.change(Vec::new(), &["p3"]).unwrap();
    let gone = before[&Some("p3".to_owned())].0;
    assert_eq!(rig.catalogue.index_of(&Some("p3".into())), MOST_POLICIES);
    rig.change(vec![put("new", 1)], &[]).unwrap();
    assert_eq!(rig.catalogue.index_of(&Some("new".into())), gone);
}

#[test]
fn many_changes_find_room_and_what_finds_none_changes_nothing() {
    let mut rig = Rig::new(64);
    for change in 0..500 {
        let rules = 1 + change % 5;
        rig.change(vec![put("a", rules), put("b", rules)], &[])
            .unwrap();
    }
    let before = (rig.numbers(), rig.catalogue.rules_in_force());
    let refused = rig
        .change(vec![put("a", 9), put("b", 100)], &[])
        .unwrap_err();
    let text = format!("{refused:#}");
    assert!(text.contains("no room for 103 rules"), "{text}");
    assert_eq!((rig.numbers(), rig.catalogue.rules_in_force()), before);
    rig.change(vec![put("a", 9)], &["b"]).unwrap();
    assert_eq!(rig.catalogue.rules_in_force(), 3 + 1 + 3 + 9);
}

#[test]
fn a_policy_that_cannot_be_compiled_changes_nothing() {
    let mut rig = Rig::new(64);
    let mut bad = put("a", 1);
    let slipgate_policy::document::RuleText::Match(_, text) = &mut bad.rules[0].rule else {
        panic!("{bad:?}");
    };
    *text = "no/thing/at/all".into();
    assert!(rig.change(vec![put("b", 1), bad], &[]).is_err());
    assert_eq!(rig.numbers().len(), 1);
}

#[test]
fn the_guards_numbers_of_an_index_take_turns() {
    let mut rig = Rig::new(64);
    rig.change(vec![put("a", 1)], &[]).unwrap();
    let index = rig.catalogue.index_of(&Some("a".into()));
    let first = rig.catalogue.turn(index);
    assert!(rig.catalogue.list(index) && !rig.catalogue.list(index));
    let taken = rig.change(vec![put("a", 2)], &[]).unwrap();
    let (at, turn, before) = &taken.unlisted[0];
    assert_eq!((*at, *turn), (index, first));
    assert_eq!(before.numbers().len(), 4, "the policy before");
    assert_ne!(rig.catalogue.turn(index), first);
    // Not in the list: nothing is to be taken out of it.
    assert!(
        rig.change(vec![put("a", 3)], &[])
            .unwrap()
            .unlisted
            .is_empty()
    );
    assert!(rig.catalogue.list(index));
    let taken = rig.change(Vec::new(), &["a"]).unwrap();
    assert_eq!(taken.unlisted[0].1, rig.catalogue.turn(index));
}
