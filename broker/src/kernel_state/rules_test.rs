use std::path::Path;

use super::*;

/// Forwards of these texts; an empty one stands for a free element.
fn rules(list: &[&str]) -> Vec<Whole> {
    let whole = |text: &&str| match *text {
        "" => FREE,
        text => Described::forward(text.to_owned()).identity.whole(),
    };
    list.iter().map(whole).collect()
}

#[test]
fn the_same_rules_are_found_again_and_others_go_where_it_is_free() {
    let present = rules(&["a", "b", "", "", ""]);
    let place = |wanted: &[&str]| place(&present, &rules(wanted));
    assert_eq!(place(&["a", "b"]), Some(0..2));
    assert_eq!(place(&["c", "a"]), Some(2..4));
    assert_eq!(place(&["x", "y", "z"]), Some(2..5));
    assert_eq!(place(&["w", "x", "y", "z"]), None);
}

#[test]
fn rules_whose_texts_are_equal_as_far_as_they_are_kept_are_others() {
    let long = "--forward ".to_owned() + &"x".repeat(128);
    let (one, other) = (format!("{long}1"), format!("{long}2"));
    let present = rules(&[&one, "", ""]);
    assert_eq!(place(&present, &rules(&[&one])), Some(0..1));
    assert_eq!(place(&present, &rules(&[&other])), Some(1..2));
}

fn paths(dir: &Path) -> Paths {
    Paths {
        pin_dir: dir.join("pins"),
        run_dir: dir.to_owned(),
    }
}

/// The process of row 3, which judges by nothing yet.
fn third(paths: &Paths) -> Writer<'_> {
    Writer {
        paths,
        rows: &[3],
        own: &[],
        kept: &[],
    }
}

#[test]
fn claims_are_read_as_they_are_written_and_nonsense_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths(dir.path());
    let writer = third(&paths);
    writer.claim(&[4..9, 20..22]).unwrap();
    let text = fs::read_to_string(dir.path().join("3.rules")).unwrap();
    assert_eq!(ranges(&text).collect::<Vec<_>>(), [4..9, 20..22]);
    let bad = "x\n1\n1 x\n5 4294967295\n7 8\n1 4\n";
    assert_eq!(ranges(bad).collect::<Vec<_>>(), [7..8, 1..4]);
    // A dead process's hold nothing.
    let other = Writer {
        rows: &[4],
        ..writer
    };
    assert!(other.of_others().unwrap().is_empty());
}

#[test]
fn a_living_process_keeps_what_it_judges_by() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths(dir.path());
    let writer = third(&paths);
    writer.claim(&[4..6, 9..10]).unwrap();
    let lock = File::create(dir.path().join("owner-3.lock")).unwrap();
    lock.lock().unwrap();
    let other = Writer {
        rows: &[4],
        ..writer
    };
    assert_eq!(other.of_others().unwrap(), HashSet::from([4, 5, 9]));
    assert!(writer.of_others().unwrap().is_empty(), "its own");
    drop(lock);
    assert!(other.of_others().unwrap().is_empty(), "it is dead");
}

#[test]
fn what_is_in_use_stays_and_two_runs_alternate() {
    let present = rules(&["old", "forward", "new", "named", "x"]);
    let in_force = 2..3;
    let stays = |index| in_force.contains(&index) || index == 1 || index == 3;
    let left = leaving(&present, stays);
    assert_eq!(left, rules(&["", "forward", "new", "named", ""]));
    assert_eq!(place(&left, &rules(&["next"])), Some(0..1));
    assert_eq!(place(&left, &rules(&["next", "other"])), None);
}

/// As after many changes of one policy out of several.
#[test]
fn what_flows_name_is_part_of_a_run_that_has_the_same_rule_there() {
    let left = rules(&["", "a", "", "named", "", "a", "b", ""]);
    let wanted = rules(&["x", "a", "y"]);
    assert_eq!(place(&left, &wanted), Some(0..3));
    assert_eq!(free_in(&left, 0..3), [0..1, 2..3]);
    assert_eq!(place(&left[1..], &wanted), None);
    assert_eq!(place(&left[1..], &rules(&["x", "a", "b", "z"])), Some(3..7));
    assert_eq!(free_in(&left, 4..8), [4..5, 7..8]);
}
