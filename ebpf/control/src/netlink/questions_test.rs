use super::{super::tests::uplink, *};
use crate::testing::{in_netns, run};

fn to(address: &str, to_port: u16) -> Packet {
    Packet {
        to: address.parse().unwrap(),
        from: None,
        mark: 0,
        protocol: Some(6),
        from_port: 0,
        to_port,
    }
}

/// The answer; `None`: it is not understood, or the kernel did not give one.
fn asked(packet: Packet) -> Option<Routing> {
    RouteQuestions::open().unwrap().ask(&packet).ok()
}

use Routing::{Blackhole, ByTable, NoRoute, Prohibited, Unreachable};

#[test]
fn the_kernel_says_which_table_its_rules_choose() {
    in_netns("the_kernel_says_which_table_its_rules_choose", || {
        uplink();
        run("ip addr add 2001:db8::2/64 dev up0 nodad");
        for (ip, hop, world) in [
            ("ip", "192.0.2.1", "203.0.113.9"),
            ("ip -6", "2001:db8::1", "2001:db8:9::9"),
        ] {
            assert_eq!(asked(to(world, 443)), Some(NoRoute), "{world}");
            run(&format!("{ip} route add default via {hop} dev up0"));
            run(&format!(
                "{ip} route add default via {hop} dev up0 table 1000"
            ));
            for rule in [
                "ipproto tcp dport 443 lookup 1000 priority 80",
                "sport 7000-7009 lookup 1000 priority 81",
                "fwmark 7 ipproto udp prohibit priority 82",
                "uidrange 1000-2000 prohibit priority 83",
                "dport 25 blackhole priority 84",
                "dport 26 unreachable priority 85",
            ] {
                run(&format!("{ip} rule add {rule}"));
            }
            assert_eq!(asked(to(world, 443)), Some(ByTable(1_000)), "{world}");
            assert_eq!(asked(to(world, 80)), Some(ByTable(254)));
            let by_udp = Packet {
                protocol: Some(17),
                ..to(world, 443)
            };
            assert_eq!(asked(by_udp), Some(ByTable(254)));
            let marked = Packet { mark: 7, ..by_udp };
            assert_eq!(asked(marked), Some(Prohibited));
            let from_port = |from_port| Packet {
                from_port,
                ..to(world, 80)
            };
            assert_eq!(asked(from_port(7_009)), Some(ByTable(1_000)));
            assert_eq!(asked(from_port(7_010)), Some(ByTable(254)));
            assert_eq!(asked(to(world, 25)), Some(Blackhole));
            assert_eq!(asked(to(world, 26)), Some(NoRoute));
            run(&format!("{ip} route add unreachable {world}"));
            assert_eq!(asked(to(world, 80)), Some(Unreachable));
        }
        assert_eq!(asked(to("192.0.2.2", 80)), Some(ByTable(LOCAL)));
    });
}

#[test]
fn a_source_counts_and_one_that_is_not_the_hosts_decides_nothing() {
    in_netns("a_source_counts_and_one_that_is_not_the_hosts", || {
        uplink();
        run("ip route add default via 192.0.2.1 dev up0");
        run("ip route add default via 192.0.2.1 dev up0 table 100");
        run("ip rule add from 192.0.2.2 lookup 100");
        let from = |from: &str| Packet {
            from: Some(from.parse().unwrap()),
            ..to("203.0.113.9", 80)
        };
        assert_eq!(asked(from("192.0.2.2")), Some(ByTable(100)));
        // EINVAL of some kernels, ENETUNREACH of others.
        let of_others = asked(from("192.0.2.3"));
        assert!(matches!(of_others, None | Some(NoRoute)), "{of_others:?}");
        assert_eq!(asked(to("203.0.113.9", 80)), Some(ByTable(254)));
    });
}

#[test]
fn a_socket_answers_one_question_after_the_other() {
    in_netns("a_socket_answers_one_question_after_the_other", || {
        uplink();
        let questions = RouteQuestions::open().unwrap();
        for _ in 0..1_000 {
            let routing = questions.ask(&to("192.0.2.9", 80)).unwrap();
            assert_eq!(routing, ByTable(254));
            let none = questions.ask(&to("203.0.113.9", 80)).unwrap();
            assert_eq!(none, NoRoute);
        }
    });
}
