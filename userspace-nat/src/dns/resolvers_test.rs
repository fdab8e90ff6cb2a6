use super::*;

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn resolvers_take_turns_and_silent_ones_rest() {
    let (a, b) = (at("10.0.0.1:53"), at("10.0.0.2:53"));
    let host = |_| None;
    let mut silent = Silent::default();
    let list = [a, b];
    let mut resolvers = Candidates::new(&list, &mut silent);
    assert_eq!(resolvers.next(&[], None, host, 0), Some(a));
    assert_eq!(resolvers.next(&[], Some(a), host, 0), Some(b));
    assert_eq!(resolvers.next(&[], Some(b), host, 0), Some(a), "in turn");
    assert_eq!(
        resolvers.next(&[a], Some(b), host, 0),
        Some(b),
        "spent ones are left out"
    );
    assert_eq!(resolvers.next(&[a, b], None, host, 0), None);
    resolvers.was_silent((a, None), 0);
    assert_eq!(resolvers.next(&[], None, host, REST_NS - 1), Some(b));
    assert_eq!(resolvers.next(&[], None, host, REST_NS), Some(a), "rested");
    resolvers.was_silent((a, None), 0);
    let other = [b, a];
    let others = Candidates::new(&other, &mut silent);
    assert_eq!(
        others.next(&[b], None, host, 1),
        Some(a),
        "for want of another"
    );
    let other = [a, b];
    let mut others = Candidates::new(&other, &mut silent);
    assert_eq!(
        others.next(&[], None, host, 1),
        Some(b),
        "whoever found it out"
    );
    let by_another = |_| Some(IfIndex::new(7));
    assert_eq!(
        others.next(&[], None, by_another, 1),
        Some(a),
        "by its link"
    );
    others.answered((a, None));
    assert_eq!(others.next(&[], None, host, 1), Some(a));
    let alone = [a];
    let alone = Candidates::new(&alone, &mut silent);
    assert_eq!(alone.next(&[], Some(a), host, 0), Some(a), "alone");
    assert_eq!(
        Candidates::new(&[], &mut silent).next(&[], None, host, 0),
        None
    );
    let many: Vec<SocketAddr> = (1..=9).map(|i| at(&format!("10.0.0.{i}:53"))).collect();
    assert!(!Candidates::new(&many, &mut silent).has(many[8]));
}
