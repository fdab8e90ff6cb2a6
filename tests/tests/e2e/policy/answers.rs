//! Answers about allowed names that lead to destinations that are not allowed.

use slipgate_testbed::{
    clients::dns,
    dns_wire::{Record, types},
    servers::Answer,
};

use super::{
    ALLOW, ALLOWED, Cell, DENIED, Host, OFF, PRIVATE, Stage, holds, holds_beside, https, matrix,
};

matrix! {
    a_cname_elsewhere: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_rebinding_answer: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    svcb_hints: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

fn with(args: &[&'static str], more: [&'static str; 2]) -> Vec<&'static str> {
    args.iter().copied().chain(more).collect()
}

fn a_cname_elsewhere(cell: Cell) {
    let alias = |target: &str| Record::cname(target, 300);
    let set = |stage: &Stage| {
        let a = |host: Host, owner: &str| Record::of_address(stage.ip(host), 300).of(owner);
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
                vec![
                    Record::of_address(stage.ip(ALLOWED), 300),
                    a(DENIED, "api.example.test"),
                ],
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
        cell,
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
            let addresses = found.records.iter().filter_map(Record::ip);
            let allowed = [stage.ip(ALLOWED)];
            assert_eq!(addresses.collect::<Vec<_>>(), allowed, "{found:?}");
            stage.reaches(https(ALLOWED), b"by an alias");
        },
    );
}

fn a_rebinding_answer(cell: Cell) {
    // The private network is shut with the policy off, too, unless it is opened.
    let off = with(OFF, ["--allow", "{private}"]);
    // And what is denied by address is out of reach of names.
    let on = with(ALLOW, ["--deny", "{denied}"]);
    holds_beside(
        cell,
        &off,
        &on,
        |stage| {
            let rebinds = "rebinds.example.test";
            stage.dns.set(rebinds, stage.answer(ALLOWED, 0));
            stage.ask(rebinds);
            assert!(stage.says(https(ALLOWED), b"before"));
            for address in [PRIVATE, DENIED] {
                stage.dns.set(rebinds, stage.answer(address, 0));
                stage.ask(rebinds);
                stage.says(https(address), b"rebound");
            }
        },
        &[
            ("a private server", |seen| seen.at(PRIVATE) > 0),
            ("a denied one", |seen| seen.at(DENIED) > 0),
        ],
        |stage| {
            stage
                .dns
                .set("rebinds.example.test", stage.answer(PRIVATE, 0));
            assert!(stage.ask("rebinds.example.test").records.is_empty());
            stage.resolves_and_reaches("api.example.test", https(ALLOWED));
        },
    );
}

fn svcb_hints(cell: Cell) {
    let off = with(OFF, ["--allow", "{private}"]);
    let ask = |stage: &Stage, name: &str| {
        let question = dns::question(name, types::HTTPS);
        stage.ask_at(stage.resolver(), &question).unwrap()
    };
    holds_beside(
        cell,
        &off,
        ALLOW,
        |stage| {
            let answers = [
                (
                    "elsewhere",
                    Record::https("evil.test", stage.ip(DENIED), 300),
                ),
                ("private", Record::https("", stage.ip(PRIVATE), 300)),
                ("good", Record::https("", stage.ip(ALLOWED), 300)),
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
