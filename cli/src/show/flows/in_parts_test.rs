use std::collections::BTreeMap;

use serde_json::Value;
use slipgate_control::{InMemory, Paths, Sizes};

use super::*;
use crate::show::flows::{
    list,
    tests::{relayed, with_flows},
};

/// Writes a list to its end with these pages, and returns what each step has written.
fn parts(list: &mut InParts, pages: &[EngineInventory]) -> Vec<Vec<u8>> {
    let mut pages = pages.iter().cloned();
    let mut parts = Vec::new();
    loop {
        let mut text = Vec::new();
        let written = list.write(&mut text);
        parts.push(text);
        match written {
            Written::InPart => {}
            Written::ToPage => list.add(pages.next()),
            Written::Whole => return parts,
        }
    }
}

/// The list as a client reads it, by the flows' ids, without times.
fn by_id(json: &[u8]) -> BTreeMap<String, Value> {
    let flows: Vec<Value> = serde_json::from_slice(json).unwrap();
    let count = flows.len();
    let flows = flows.into_iter().map(|mut flow| {
        let fields = flow.as_object_mut().unwrap();
        let times = ["age_ms", "idle_ms"];
        assert!(times.iter().all(|time| fields.remove(*time).is_some()));
        (fields["id"].as_str().unwrap().to_owned(), flow)
    });
    let flows: BTreeMap<_, _> = flows.collect();
    assert_eq!(flows.len(), count, "each flow once");
    flows
}

/// Pages as engines make them: labels, names of flows, relayed flows.
fn pages() -> Vec<EngineInventory> {
    let label = |vm: &str| {
        let labels = BTreeMap::from([("tenant".to_owned(), format!("of {vm}"))]);
        (vm.to_owned(), labels)
    };
    let named = (0..3_000).step_by(7);
    let named = named.map(|slot| (SlotIndex::new(slot), 1, format!("{slot}.test")));
    // One that has ended, and one beyond the table.
    let gone = [(1, 9), (u32::MAX, 1)];
    let gone = gone.map(|(slot, generation)| (SlotIndex::new(slot), generation, "x".to_owned()));
    let first = EngineInventory {
        labels: vec![label("#1"), label("a")],
        flows: named.chain(gone).collect(),
        ..EngineInventory::default()
    };
    let second = EngineInventory {
        flows: vec![(SlotIndex::new(4_999), 1, "last.test".into())],
        relayed_flows: (0..300).map(relayed).collect(),
        ..EngineInventory::default()
    };
    vec![first, EngineInventory::default(), second]
}

#[test]
fn a_list_in_parts_has_all_flows_as_one_made_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (_memory, read) = with_flows(dir.path(), 5_000);
    let read = Rc::new(read);
    let pages = pages();
    let mut known = Known::default();
    pages.iter().cloned().for_each(|page| known.add(page));
    let expected = by_id(&serde_json::to_vec(&list(&read, &known)).unwrap());
    assert_eq!(expected.len(), 5_300);
    let parts_of = |vm: Option<&str>| {
        let mut list = InParts::new(read.clone(), vm.map(str::to_owned));
        parts(&mut list, &pages)
    };
    let all = parts_of(None);
    assert!(all.len() > 10, "{}", all.len());
    let longest = all.iter().map(Vec::len).max().unwrap();
    assert!(longest < PART_BYTES + 1_000, "{longest}");
    let all = by_id(&all.concat());
    let last = format!("{:08x}-4999-1", read.instance());
    assert_eq!(all[&last]["dns_name"], "last.test");
    assert!(all == expected, "they differ");
    let of_a = by_id(&parts_of(Some("a")).concat());
    assert_eq!(of_a.len(), 300);
    assert!(of_a.values().all(|flow| flow["labels"]["tenant"] == "of a"));
    assert_eq!(parts_of(Some("none")).concat(), b"[]");
}

#[test]
fn a_step_looks_at_some_slots_only_whatever_is_in_them() {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths {
        pin_dir: dir.path().to_owned(),
        run_dir: dir.path().to_owned(),
    };
    let sizes = Sizes::of_slots(4 * SLOTS_AT_ONCE);
    let (_memory, _owner) = InMemory::open(paths, sizes).unwrap();
    let read = ReadOnlyMaps::open_pinned(dir.path()).unwrap();
    let mut list = InParts::new(read.into(), None);
    let parts = parts(&mut list, &[]);
    assert_eq!(parts.concat(), b"[]");
    // One up to the page that is not there, and four.
    assert_eq!(parts.len(), 5);
}

#[test]
fn labels_of_an_engine_that_sends_too_many_are_not_held() {
    let dir = tempfile::tempdir().unwrap();
    let (_memory, read) = with_flows(dir.path(), 1);
    let mut list = InParts::new(read.into(), None);
    let long = |vm: &str, octets: usize| {
        let labels = BTreeMap::from([("tenant".to_owned(), "x".repeat(octets))]);
        EngineInventory {
            labels: vec![(vm.to_owned(), labels)],
            ..EngineInventory::default()
        }
    };
    list.add(Some(long("a", MOST_LABELS_BYTES / 2)));
    list.add(Some(long("b", MOST_LABELS_BYTES / 2)));
    list.add(Some(long("c", 5)));
    let held: Vec<&String> = list.known.labels.keys().collect();
    assert_eq!(held, ["a", "c"]);
}
