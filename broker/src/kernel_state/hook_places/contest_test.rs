use super::*;

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_place_is_taken_back_at_once_then_later_and_later_and_given_up() {
    let start = Instant::now();
    let mut contest = Contest::default();
    // The other takes it within a second each time.
    let mut steps = Vec::new();
    for second in 0..3_600 {
        let now = start + SECOND * second;
        match contest.lost(now) {
            Step::Wait => {}
            Step::Move => {
                steps.push((second, Step::Move));
                contest.is_first(now);
            }
            Step::GiveUp => steps.push((second, Step::GiveUp)),
        }
    }
    let moved = [0, 15, 45, 105, 225, 465].map(|second| (second, Step::Move));
    assert_eq!(steps[..6], moved);
    assert_eq!(steps[6..], [(466, Step::GiveUp)]);
}

#[test]
fn peace_ends_a_contest_and_a_short_one_does_not() {
    let start = Instant::now();
    let mut contest = Contest::default();
    for move_at in [0, 15, 45, 105, 225, 465] {
        assert_eq!(contest.lost(start + SECOND * move_at), Step::Move);
        contest.is_first(start + SECOND * move_at);
    }
    assert!(!contest.is_over(start + SECOND * 1_064));
    assert_eq!(contest.lost(start + SECOND * 1_064), Step::GiveUp);
    // The other went by itself.
    contest.is_first(start + SECOND * 1_100);
    assert!(contest.is_over(start + SECOND * 1_700));
    assert_eq!(contest.lost(start + SECOND * 1_700), Step::Move);
}

#[test]
fn each_change_is_told_once() {
    let mut contest = Contest::default();
    let now = Instant::now();
    assert!(!contest.is_first(now), "it never was anything else");
    assert!(contest.is_news(&Standing::Missing));
    assert!(!contest.is_news(&Standing::Missing));
    assert!(contest.is_lost());
    let behind = Standing::Behind(Vec::new());
    assert!(contest.is_news(&behind));
    assert!(contest.is_first(now));
    assert!(!contest.is_first(now));
    assert!(!contest.is_lost());
    assert!(contest.is_news(&behind));
}

#[test]
fn a_move_that_was_not_tried_does_not_count() {
    let now = Instant::now();
    let mut contest = Contest::default();
    for _ in 0..100 {
        assert_eq!(contest.lost(now), Step::Move);
        contest.postponed();
    }
    assert_eq!(contest.lost(now), Step::Move);
    assert_eq!(contest.lost(now), Step::Wait);
}
