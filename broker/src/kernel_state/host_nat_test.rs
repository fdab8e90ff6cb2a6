use super::*;

fn watch() -> HostNatWatch {
    HostNatWatch {
        rules: None,
        facts: HostFacts::default(),
        is_stale: false,
        due: None,
        not_before: Instant::now(),
        told: BTreeSet::new(),
        accepted: BTreeSet::new(),
        has_news: false,
        translated: TranslatedPorts::default(),
        allowance: Allowance::new(Instant::now()),
    }
}

#[test]
fn what_is_shared_is_told_once_and_again_when_it_comes_back() {
    let mut watch = watch();
    let of = |all: &[&str]| all.iter().map(|it| (*it).to_owned()).collect();
    assert_eq!(watch.now_shares(of(&["a"])), ["a"]);
    assert_eq!(watch.now_shares(of(&["a", "b"])), ["b"]);
    assert!(watch.now_shares(of(&["a", "b"])).is_empty());
    assert!(watch.now_shares(of(&[])).is_empty());
    assert_eq!(watch.now_shares(of(&["a"])), ["a"]);
}

#[test]
fn looks_keep_apart_and_farther_where_they_are_costly() {
    let mut watch = watch();
    watch.look_soon();
    let first = watch.due.unwrap();
    assert!(first <= Instant::now() + SETTLES_IN);
    // More of the same changes do not put it off.
    watch.look_soon();
    assert_eq!(watch.due, Some(first));
    let now = Instant::now();
    let soon = |took: u64| next_look(now, now + Duration::from_millis(took));
    assert_eq!(soon(1), now + Duration::from_millis(1) + APART);
    assert_eq!(soon(100), now + Duration::from_millis(100 + 2_000));
    watch.due = None;
    watch.not_before = now + Duration::from_secs(60);
    watch.look_soon();
    assert_eq!(watch.due, Some(watch.not_before));
}

#[test]
fn looks_for_requests_take_a_twentieth_of_the_time_in_the_long_run() {
    const TAKES: Duration = Duration::from_millis(23);
    let begun = Instant::now();
    let mut allowance = Allowance::new(begun);
    // A hundred requests a second, each with rules that changed.
    let mut looks = Vec::new();
    for at in (0..60_000).step_by(10).map(Duration::from_millis) {
        if allowance.allows(begun + at) {
            allowance.spent += TAKES;
            looks.push(at);
        }
    }
    let most = Duration::from_secs(60) / APART_IN_LOOKS + AT_ONCE + TAKES;
    let took = TAKES * looks.len() as u32;
    assert!(took <= most && took >= most / 2, "{took:?} of {most:?}");
    // The first of them are looked at each.
    assert!(looks.starts_with(&[0, 10, 20, 30, 40].map(Duration::from_millis)));
    // A pause is not saved up beyond that.
    let later = begun + Duration::from_secs(100_000);
    let many = (0..100).filter(|_| {
        let allows = allowance.allows(later);
        allowance.spent += if allows { TAKES } else { Duration::ZERO };
        allows
    });
    assert_eq!(many.count(), 11);
}

#[test]
fn what_nobody_tells_is_behind_once_it_is_other_than_before() {
    let mut watch = watch();
    // Without notices it may be other at any time.
    watch.take_unnoticed(|facts| facts);
    assert!(watch.is_behind());
    let Ok(rules) = RuleWatch::open() else {
        return;
    };
    (watch.rules, watch.is_stale, watch.due) = (Some(rules), false, None);
    watch.take_unnoticed(|facts| facts);
    assert!(!watch.is_behind());
    let local_ports = Some((1_024, 60_999));
    watch.take_unnoticed(|facts| HostFacts {
        local_ports,
        ..facts
    });
    assert!(watch.is_behind());
}
