use std::time::Duration;

use super::Patience;

const SOON: Duration = Duration::from_micros(40);
const LATE: Duration = Duration::from_millis(1);

#[test]
fn looking_grows_while_it_would_have_paid_off() {
    let mut patience = Patience::default();
    assert_eq!(patience.window, Duration::ZERO);
    let mut last = Duration::ZERO;
    for _ in 0..8 {
        patience.slept(SOON);
        assert!(patience.window > last || last == Patience::MOST);
        last = patience.window;
    }
    assert_eq!(last, Patience::MOST);
}

#[test]
fn an_idle_card_does_not_look() {
    let mut patience = Patience::default();
    patience.slept(SOON);
    assert!(patience.window >= Patience::LEAST);
    patience.slept(LATE);
    assert_eq!(patience.window, Duration::ZERO);
}
