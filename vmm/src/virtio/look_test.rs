use std::{
    convert::Infallible,
    time::{Duration, Instant},
};

use super::{Look, Patience};

const MOST: Duration = Duration::from_micros(100);
const SOON: Duration = Duration::from_micros(40);
const LATE: Duration = Duration::from_millis(1);

#[test]
fn looking_grows_while_it_would_have_paid_off() {
    let mut patience = Patience::new(MOST);
    assert_eq!(patience.window, Duration::ZERO);
    let mut last = Duration::ZERO;
    for _ in 0..8 {
        patience.slept(SOON);
        assert!(patience.window > last || last == MOST);
        last = patience.window;
    }
    assert_eq!(last, MOST);
}

#[test]
fn an_idle_device_does_not_look() {
    let mut patience = Patience::new(MOST);
    patience.slept(SOON);
    assert!(patience.window >= Patience::LEAST);
    patience.slept(LATE);
    assert_eq!(patience.window, Duration::ZERO);
    assert!(!patience.look().goes_on());
}

#[test]
fn a_look_ends_with_its_time_or_when_another_thread_used_the_core() {
    let look = || Look {
        window: Duration::from_secs(3600),
        ..Patience::new(MOST).look()
    };
    assert!(look().goes_on());
    let mut contended = look();
    contended.lost = Some(LATE);
    assert!(!contended.goes_on());
    let mut over = look();
    over.window = Duration::ZERO;
    assert!(!over.goes_on());
}

#[test]
fn after_another_thread_used_the_core_there_are_no_looks_for_a_while() {
    let mut patience = Patience::new(MOST);
    patience.slept(SOON);
    let mut look = patience.look();
    patience.looked(&look);
    assert!(patience.window > Duration::ZERO);
    look.lost = Some(Duration::from_secs(3600));
    patience.looked(&look);
    assert_eq!(patience.window, Duration::ZERO);
    patience.slept(SOON);
    assert_eq!(patience.window, Duration::ZERO);
    // The rest is over.
    patience.last_rest = Some((Instant::now(), 1));
    patience.slept(SOON);
    assert_eq!(patience.window, Patience::LEAST);
}

#[test]
fn a_loss_as_short_as_an_interrupt_ends_one_look_alone() {
    let mut patience = Patience::new(MOST);
    patience.slept(SOON);
    let mut look = patience.look();
    look.lost = Some(Patience::LEAST_LOST - Duration::from_nanos(1));
    assert!(!look.goes_on());
    patience.looked(&look);
    assert_eq!(patience.window, Patience::LEAST);
    patience.slept(SOON);
    assert_eq!(patience.window, Patience::LEAST * 2);
}

#[test]
fn rests_become_longer_while_another_thread_uses_the_core_again_and_again() {
    // Long enough for a pause of this test not to count.
    const LOST: Duration = Patience::MOST_LOST;
    let mut patience = Patience::new(MOST);
    let mut look = patience.look();
    look.lost = Some(LOST);
    let rest = |patience: &mut Patience| {
        patience.looked(&look);
        patience.last_rest.unwrap().1
    };
    let rests: Vec<u32> = (0..7).map(|_| rest(&mut patience)).collect();
    assert_eq!(rests, [1, 2, 4, 8, 16, 20, 20]);
    assert!(patience.is_core_wanted());
    // A yield long after the last rest has another cause.
    let long_ago = Instant::now().checked_sub(LOST * (Patience::SOON + 1));
    patience.last_rest = Some((long_ago.unwrap(), 20));
    assert_eq!(rest(&mut patience), 1);
}

#[test]
fn a_poll_ends_with_the_first_work() {
    let look = Patience::new(MOST).look();
    let mut polls = 0;
    let found: Result<_, Infallible> = look.rings(|| {
        polls += 1;
        Ok(polls == 3)
    });
    assert_eq!((found, polls), (Ok(true), 3));
    assert_eq!(look.rings(|| Err::<bool, _>("broken")), Err("broken"));
    assert_eq!(look.rings(|| Ok::<_, Infallible>(false)), Ok(false));
}
