use super::*;

#[test]
fn a_freeze_undoes_the_thaws_before_it_and_none_after_it() {
    let mut thaws = Thaws::default();
    thaws.begin(1, 5);
    thaws.begin(2, 5);
    thaws.begin(3, 6);
    thaws.undo(5);
    thaws.begin(4, 5);
    assert_eq!(thaws.take(1), Some(Thaw::Undone), "frozen again meanwhile");
    assert_eq!(thaws.take(2), Some(Thaw::Undone));
    assert_eq!(thaws.take(3), Some(Thaw::Of(6)), "another VM's");
    assert_eq!(thaws.take(4), Some(Thaw::Of(5)));
    assert_eq!(thaws.take(4), None, "once");
}
