use std::net::Ipv4Addr;

use crate::Destination;

use super::*;

fn flow(addr: u32, name: Option<&str>) -> Seen {
    Seen::Flow {
        vm: "a".into(),
        to: Destination {
            addr: Ipv4Addr::from_bits(addr).into(),
            port: 443,
            protocol: Protocol::Tcp,
        },
        name: name.map(str::to_owned),
        id: None,
        at_ns: None,
        is_over: true,
    }
}

fn question(name: &str, chain: &[String]) -> Seen {
    Seen::Question {
        vm: "a".into(),
        name: name.into(),
        kind: "A".into(),
        chain: chain.to_vec(),
        at_ns: None,
        from_cache: false,
    }
}

#[test]
fn what_was_seen_is_covered_by_name_and_its_aliases() {
    let mut learnt = Learnt::default();
    learnt.take(question("www.test", &["cdn.test".into()]), None);
    learnt.take(flow(0xc633_6401, Some("www.test")), Some("a"));
    learnt.take(flow(0xc633_6402, None), Some("b"));
    assert_eq!(learnt.too_much(), None);
    let remark = "something is missing".to_owned();
    assert_eq!(
        learnt.toml(
            Some("a"),
            Ipv4Addr::new(10, 0, 2, 2).into(),
            false,
            &[remark]
        ),
        "# something is missing.\n\
         # The least policy for the recorded flows of a: 1 flows, 2 rules.\n\
         default = \"deny\"\n\
         rules = [\n  \
           { allow = \"cdn.test:443/tcp\" }, # by alias\n  \
           { allow = \"www.test:443/tcp\" }, # 1 flow\n\
         ]\n"
    );
}

#[test]
fn a_guest_that_goes_everywhere_takes_no_more_than_so_much_and_it_is_said() {
    let mut learnt = Learnt::default();
    for addr in 0..MOST_SEEN as u32 + 10 {
        learnt.take(flow(0xc800_0000 + addr, None), None);
    }
    // What is known is counted still.
    learnt.take(flow(0xc800_0000, None), None);
    assert_eq!((learnt.seen.len(), learnt.left_out), (MOST_SEEN, 10));
    let aliases = |from: usize| {
        (from..from + 200)
            .map(|i| format!("x{i}.test"))
            .collect::<Vec<_>>()
    };
    for from in [0, 0, 100, 200] {
        learnt.take(question("www.test", &aliases(from)), None);
    }
    assert_eq!(learnt.aliases["www.test"].len(), MOST_ALIASES);
    for i in 0..MOST_SEEN + 10 {
        learnt.take(question(&format!("y{i}.test"), &["z.test".into()]), None);
    }
    assert_eq!(learnt.aliases.len(), MOST_SEEN);
    let said = learnt.too_much().unwrap();
    assert!(said.starts_with("10 flows and "), "{said}");
}
