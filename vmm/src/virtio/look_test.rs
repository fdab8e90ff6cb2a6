use std::{convert::Infallible, time::Duration};

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
    look.lost = Some(Duration::ZERO);
    patience.looked(&look);
    patience.slept(SOON);
    assert_eq!(patience.window, Patience::LEAST);
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
