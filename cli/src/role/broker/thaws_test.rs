use super::*;

#[test]
fn a_freeze_undoes_the_thaws_before_it_and_none_after_it() {
    let mut thaws = Thaws::default();
    thaws.begin(1, 5);
    thaws.begin(2, 5);
    thaws.begin(3, 6);
    thaws.forget(5);
    thaws.begin(4, 5);
    assert_eq!(thaws.take(1), None, "frozen again meanwhile");
    assert_eq!(thaws.take(2), None);
    assert_eq!(thaws.take(3), Some(6), "another VM's");
    assert_eq!(thaws.take(4), Some(5));
    assert_eq!(thaws.take(4), None, "once");
}
