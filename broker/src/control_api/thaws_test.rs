use super::*;

const ROW: VmRow = VmRow::new(5);
const OTHER: VmRow = VmRow::new(6);

#[test]
fn a_freeze_undoes_the_thaws_before_it_and_none_after_it() {
    let mut thaws = Thaws::default();
    thaws.begin(1, ROW);
    thaws.begin(2, ROW);
    thaws.begin(3, OTHER);
    thaws.undo(ROW);
    thaws.begin(4, ROW);
    assert_eq!(thaws.take(1), Some(Thaw::Undone), "frozen again meanwhile");
    assert_eq!(thaws.take(2), Some(Thaw::Undone));
    assert_eq!(thaws.take(3), Some(Thaw::Of(OTHER)), "another VM's");
    assert_eq!(thaws.take(4), Some(Thaw::Of(ROW)));
    assert_eq!(thaws.take(4), None, "once");
}
