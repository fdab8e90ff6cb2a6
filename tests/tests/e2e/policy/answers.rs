//! Answers about allowed names that lead to destinations that are not allowed.

use slipgate_testbed::{
    clients::dns,
    dns_wire::{Record, types},
    require_root_and_tun,
    servers::Answer,
};

use super::{ALLOW, ALLOWED, DENIED, OFF, PRIVATE, Stage, holds, holds_beside, https};
use crate::{DNS, at};

fn with(args: &[&'static str], more: [&'static str; 2]) -> Vec<&'static str> {
    args.iter().copied().chain(more).collect()
}

#[test]
fn a_cname_elsewhere() {
    require_root_and_tun!();
    let alias = |target: &str| Record::cname(target, 300);
    let a = |address, owner: &str| Record::a(address, 300).of(owner);
    let set = |stage: &Stage| {
        let answers = [
            ("out", vec![alias("evil.test"), a(DENIED, "evil.test")]),
            // Through an allowed name, out, and back to an allowed one.
            (
                "through",
                vec![
                    alias("api.example.test"),
                    alias("evil.test").of("api.example.test"),
                    alias("back.example.test").of("evil.test"),
                    a(DENIED, "back.example.test"),
                ],
            ),
            // What nobody asked for is no answer.
            (
                "poison",
                vec![Record::a(ALLOWED, 300), a(DENIED, "api.example.test")],
            ),
            (
                "www",
                vec![alias("api.example.test"), a(ALLOWED, "api.example.test")],
            ),
        ];
        for (name, records) in answers {
            let name = format!("{name}.example.test");
            stage.dns.set(&name, Answer::records(records));
        }
    };
    holds(
        ALLOW,
        |stage| {
            set(stage);
            for name in ["out", "through", "poison"] {
                // Twice: from upstream, from the cache.
                stage.ask(&format!("{name}.example.test"));
                stage.ask(&format!("{name}.example.test"));
            }
            stage.says(https(DENIED), b"by an alias");
        },
        &[("the connection", |seen| seen.at(DENIED) > 0)],
        |stage| {
            let found = stage.ask("www.example.test");
            let addresses = found.records.iter().filter_map(Record::address);
            assert_eq!(addresses.collect::<Vec<_>>(), [ALLOWED], "{found:?}");
            stage.reaches(https(ALLOWED), b"by an alias");
        },
    );
}

#[test]
fn a_rebinding_answer() {
    require_root_and_tun!();
    // The private network is shut with the policy off, too, unless it is opened.
    let off = with(OFF, ["--allow", "10.9.0.0/24"]);
    // And what is denied by address is out of reach of names.
    let on = with(ALLOW, ["--deny", "203.0.113.30"]);
    holds_beside(
        &off,
        &on,
        |stage| {
            let rebinds = "rebinds.example.test";
            stage.dns.set(rebinds, Answer::a(ALLOWED, 0));
            stage.ask(rebinds);
            assert!(stage.says(https(ALLOWED), b"before"));
            for address in [PRIVATE, DENIED] {
                stage.dns.set(rebinds, Answer::a(address, 0));
                stage.ask(rebinds);
                stage.says(https(address), b"rebound");
            }
        },
        &[
            ("a private server", |seen| seen.at(PRIVATE) > 0),
            ("a denied one", |seen| seen.at(DENIED) > 0),
        ],
        |stage| {
            stage.dns.set("rebinds.example.test", Answer::a(PRIVATE, 0));
            assert!(stage.ask("rebinds.example.test").records.is_empty());
            stage.resolves_and_reaches("api.example.test", https(ALLOWED));
        },
    );
}

#[test]
fn svcb_hints() {
    require_root_and_tun!();
    let off = with(OFF, ["--allow", "10.9.0.0/24"]);
    let ask = |stage: &Stage, name: &str| {
        let question = dns::question(name, types::HTTPS);
        stage.ask_at(at(DNS, 53), &question).unwrap()
    };
    holds_beside(
        &off,
        ALLOW,
        |stage| {
            let answers = [
                ("elsewhere", Record::https("evil.test", DENIED, 300)),
                ("private", Record::https("", PRIVATE, 300)),
                ("good", Record::https("", ALLOWED, 300)),
            ];
            for (name, record) in answers {
                let name = format!("{name}.example.test");
                stage.dns.set(&name, Answer::records(vec![record]));
            }
            for name in [
                "elsewhere.example.test",
                "private.example.test",
                "evil.test",
            ] {
                ask(stage, name);
            }
            stage.says(https(DENIED), b"by a hint");
            stage.says(https(PRIVATE), b"by a hint");
        },
        &[
            ("the question", |seen| seen.ask_for("evil.test")),
            ("another name's server", |seen| seen.at(DENIED) > 0),
            ("a private server", |seen| seen.at(PRIVATE) > 0),
        ],
        |stage| {
            let found = ask(stage, "good.example.test");
            assert_eq!(found.records.len(), 1, "{found:?}");
            stage.reaches(https(ALLOWED), b"by a hint");
        },
    );
}
