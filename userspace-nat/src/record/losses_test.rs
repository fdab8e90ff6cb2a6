use super::*;

#[test]
fn the_first_loss_is_told_at_once_and_the_others_in_sum_later() {
    let mut losses = Losses::default();
    assert_eq!(losses.due(5), None);
    losses.add(3);
    assert_eq!(losses.due(5), Some(3));
    losses.add(1);
    losses.add(1);
    assert_eq!(losses.due(QUIET_NS + 4), None);
    assert_eq!(
        losses.due(QUIET_NS + 5),
        Some(2),
        "though nothing is lost just now"
    );
    assert_eq!(losses.due(u64::MAX / 2), None);
    losses.add(7);
    assert_eq!((losses.rest(), losses.rest()), (Some(7), None));
}
