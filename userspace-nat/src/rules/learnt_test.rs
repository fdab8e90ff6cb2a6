use super::*;

const LASTING: Lasting = Lasting {
    floor_s: FLOOR_S,
    ceiling_s: CEILING_S,
};

fn name(text: &str, rules: &[u32]) -> Rc<LearntName> {
    Rc::new(LearntName {
        name: text.into(),
        rules: rules
            .iter()
            .map(|&order| Place { order, line: 0 })
            .collect(),
        way: text.as_bytes().into(),
    })
}

fn at(n: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(0xc000_0200 + n)
}

fn equal(a: &LearntName, b: &LearntName) -> bool {
    a.rules == b.rules
}

fn names(learnt: &Learnt, vm: u32, address: Ipv4Addr, now_ns: u64) -> Vec<String> {
    let names = learnt.names(vm, address, now_ns);
    names.map(|name| name.name.to_string()).collect()
}

#[test]
fn an_opening_lasts_for_its_ttl_within_floor_and_ceiling() {
    let mut learnt = Learnt::default();
    let forever = u32::MAX;
    let open = [(at(0), 0), (at(1), 100), (at(2), forever)];
    learnt
        .open(1, &name("a", &[0]), &open, equal, LASTING, 0)
        .unwrap();
    for (address, lasts_s) in [(at(0), FLOOR_S), (at(1), 100), (at(2), CEILING_S)] {
        let end_ns = u64::from(lasts_s) * SECOND_NS;
        assert_eq!(names(&learnt, 1, address, end_ns - 1), ["a"]);
        assert_eq!(names(&learnt, 1, address, end_ns), [""; 0]);
    }
    assert_eq!(names(&learnt, 2, at(1), 1), [""; 0], "another VM's");
}

#[test]
fn an_answer_with_less_ttl_does_not_shorten_what_is_open() {
    let mut learnt = Learnt::default();
    learnt
        .open(1, &name("a", &[0]), &[(at(0), 1_000)], equal, LASTING, 0)
        .unwrap();
    learnt
        .open(1, &name("b", &[0]), &[(at(0), 10)], equal, LASTING, 0)
        .unwrap();
    assert_eq!(
        names(&learnt, 1, at(0), 999 * SECOND_NS),
        ["b"],
        "the last name asked for"
    );
    assert_eq!(learnt.count(1), 1);
    learnt
        .open(1, &name("c", &[1]), &[(at(0), 10)], equal, LASTING, 0)
        .unwrap();
    assert_eq!(
        names(&learnt, 1, at(0), 1),
        ["b", "c"],
        "other rules stand beside"
    );
    assert_eq!(learnt.addresses(1, "c", 1), [at(0)]);
}

#[test]
fn what_is_full_refuses_the_new_and_makes_room_only_by_time() {
    let mut learnt = Learnt::default();
    let all: Vec<_> = (0..MAX_PER_VM as u32).map(|n| (at(n), 100)).collect();
    learnt
        .open(1, &name("a", &[0]), &all, equal, LASTING, 0)
        .unwrap();
    let more = [(at(5), 100), (at(MAX_PER_VM as u32), 100)];
    let refused = learnt.open(1, &name("a", &[0]), &more, equal, LASTING, 1);
    assert_eq!(refused, Err(Full));
    assert_eq!(learnt.count(1), MAX_PER_VM);
    assert_eq!(names(&learnt, 1, at(7), 1), ["a"], "what lives stays");
    learnt
        .open(1, &name("a", &[0]), &more[..1], equal, LASTING, 1)
        .unwrap();
    learnt
        .open(2, &name("a", &[0]), &more, equal, LASTING, 1)
        .unwrap();
    learnt
        .open(1, &name("a", &[0]), &more, equal, LASTING, 100 * SECOND_NS)
        .unwrap();
    assert_eq!(learnt.count(1), 2, "the rest is over");
    learnt.forget(1);
    assert_eq!((learnt.count(1), learnt.count(2)), (0, 2));
}
