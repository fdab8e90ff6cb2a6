use super::*;
use crate::wire;

fn matcher(lines: u32) -> NameMatcher {
    let line = |i: u32| format!("{}n{i}.bad{}.test", ["", "*."][i as usize % 2], i % 99);
    let patterns: Vec<NamePattern> = (0..lines).map(|i| line(i).parse().unwrap()).collect();
    NameMatcher::new((1..).zip(&patterns))
}

#[test]
fn a_hundred_thousand_names_take_as_many_look_ups_as_ten() {
    let (few, many) = (matcher(10), matcher(100_000));
    for (name, parents) in [
        ("test", 0),
        ("n7.bad7.test", 2),
        ("www.n7.bad7.test", 3),
        ("a.b.c.d.e.f.n7.bad7.test", 3),
    ] {
        let wire = wire(name).unwrap();
        for matcher in [&few, &many] {
            let looked_up: Vec<_> = matcher.parents_to_look_up(Name(&wire)).collect();
            assert_eq!(looked_up.len(), parents, "{name}");
            // Whatever it is beneath is found by these.
            let found = matcher.matching(Name(&wire));
            let expected: &[u32] = if parents == 3 { &[8] } else { &[] };
            assert_eq!(found, expected, "{name}");
        }
    }
}
