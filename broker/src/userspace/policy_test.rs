use super::*;

#[test]
fn flows_are_judged_again_only_after_a_change_and_what_was_not_told_is_told_with_the_next() {
    let mut changes = PolicyChanges::default();
    assert_eq!(changes.note_changed(vec![], false), (vec![], false));
    assert_eq!(changes.note_changed(vec![], true), (vec![], true), "quotas");
    assert_eq!(changes.note_changed(vec![1], false), (vec![1], true));
    // There was no memory for the message, and the same files are read again; then others.
    assert_eq!(changes.note_changed(vec![], false), (vec![1], true));
    assert_eq!(changes.note_changed(vec![1, 0], false), (vec![0, 1], true));
    changes.untold.clear();
    assert_eq!(changes.note_changed(vec![], false), (vec![], false));
}
