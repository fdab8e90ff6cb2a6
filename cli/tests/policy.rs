//! `slipgate policy`, as people see it. Nothing here needs privileges.
use std::{fs, path::Path, process::Command};

const FILE: &str = r#"default = "deny"
rules = [
  { allow = ["*.code.test:443/tcp", "api.code.test:443/tcp"], comment = "code" },
  { deny = "pkg.test:80" },
  { allow = "pkg.test" },
  { inspect = "0.0.0.0/0:22/tcp" },
  { deny = "203.0.113.0/24" },
  { deny = "203.0.113.7:80" },
]

[policy.offline]
default = "deny"

[policy.open]
default = "allow"
rules = [{ allow = "code.test" }]
"#;

const LOG: &str = r#"{"event":"dns","vm":"a","name":"api.code.test","type":"A","verdict":"allow","rcode":"NOERROR","answers":["198.51.100.7"]}
{"event":"flow_start","id":"1","vm":"a","proto":"tcp","guest":"10.0.2.15:1","remote":"198.51.100.7:443","verdict":"fast","direction":"outbound","path":"kernel"}
{"event":"flow_end","id":"1","vm":"a","proto":"tcp","guest":"10.0.2.15:1","remote":"198.51.100.7:443","verdict":"fast","direction":"outbound","path":"kernel"}
{"event":"dns","vm":"a","name":"Cdn.code.test.","type":"A","verdict":"allow","rcode":"NOERROR","answers":["198.51.100.8","2001:db8::1"]}
{"event":"flow_end","id":"2","vm":"a","proto":"tcp","guest":"10.0.2.15:2","remote":"198.51.100.8:443","dns_name":"cdn.code.test","verdict":"fast","direction":"outbound","path":"kernel"}
{"event":"dns","vm":"a","name":"cdn.code.test","type":"TXT","verdict":"allow","rcode":"NOERROR","answers":[]}
{"id":"3","vm":"a","proto":"udp","guest":"10.0.2.15:3","remote":"192.0.2.9:123","direction":"outbound"}
{"id":"4","vm":"a","proto":"tcp","guest":"10.0.2.15:22","remote":"192.0.2.10:5000","direction":"inbound"}
{"id":"5","vm":"b","proto":"icmp","guest":"10.0.2.15:0","remote":"192.0.2.11:0","direction":"outbound"}
{"event":"flow_start","id":"6","vm":"b","proto":"tcp","guest":"10.0.2.15:6","remote":"198.51.100.7:443","direction":"outbound"}
{"event":"flow_start","id":"7","vm":"b","proto":"tcp","guest":"10.0.2.15:7","remote":"10.20.0.5:5432","dns_name":"db.corp.test","direction":"outbound"}
{"event":"refused","vm":"a","reason":"default","count":40,"proto":"tcp","guest":"10.0.2.15:8","remote":"203.0.113.7:80"}
{"event":"refused","vm":"a","reason":"flow_cap","count":9,"proto":"tcp","guest":"10.0.2.15:8","remote":"203.0.113.7:80"}
not a record
"#;

/// Runs `slipgate policy`; returns status, stdout and stderr.
fn policy(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_slipgate"))
        .arg("policy")
        .args(args)
        .current_dir(folder)
        .output()
        .expect("slipgate");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    let status = output.status.code().expect("an exit status");
    (status, text(output.stdout), text(output.stderr))
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in [("egress.toml", FILE), ("flows.jsonl", LOG)] {
        fs::write(folder.path().join(name), text).expect("writing");
    }
    folder
}

#[test]
fn a_file_that_says_no_default_is_no_policy() {
    let folder = folder();
    for text in [
        "",
        "# default = \"deny\"\n",
        "[quotas]\nmax_flows = 64\n",
        "[quotas]\nmax_flows = 64\n[policy.a]\ndefault = \"deny\"\n",
        "[policy.a]\n",
    ] {
        fs::write(folder.path().join("cut.toml"), text).expect("writing");
        for args in [
            &["check", "cut.toml"][..],
            &["explain", "cut.toml", "a.test:80"],
        ] {
            let (status, out, error) = policy(folder.path(), args);
            assert_eq!((status, &*out), (2, ""), "{text} {args:?}");
            assert!(
                error.contains("default") && error.contains("cut.toml:"),
                "{error}"
            );
        }
    }
}

#[test]
fn a_file_with_named_policies_only_is_explained_by_name() {
    let folder = folder();
    let text = "[policy.a]\ndefault = \"deny\"\n[policy.b]\ndefault = \"allow\"\n";
    fs::write(folder.path().join("named.toml"), text).expect("writing");
    let asked = ["explain", "named.toml", "192.0.2.1:80"];
    let (status, _, error) = policy(folder.path(), &asked);
    assert_eq!(status, 2);
    assert!(
        error.contains("named policies only") && error.contains("a, b"),
        "{error}"
    );
    for (name, status) in [("a", 3), ("b", 0)] {
        let args = [&asked[..], &["--policy", name]].concat();
        assert_eq!(policy(folder.path(), &args).0, status, "{name}");
    }
}

#[test]
fn what_an_allow_by_address_takes_from_an_inspection_is_said() {
    let folder = folder();
    let at = |rules: &str| {
        let text = format!("default = \"deny\"\nrules = [{rules}]\n");
        fs::write(folder.path().join("f.toml"), text).expect("writing");
        let explained = policy(folder.path(), &["explain", "f.toml", "a.test:443"]);
        let checked = policy(folder.path(), &["check", "f.toml"]);
        (explained.0, explained.1, checked.1)
    };
    let inspect = r#"{ inspect = "a.test:443" }"#;

    let ipv4_only = at(&format!(r#"{{ allow = "0.0.0.0/0" }}, {inspect}"#)).1;
    assert!(
        ipv4_only.contains("Where its address is in ::/0, it is admitted and inspected"),
        "{ipv4_only}"
    );
    let everything = r#"{ allow = ["0.0.0.0/0", "::/0"] }"#;
    let (status, explained, checked) = at(&format!("{everything}, {inspect}"));
    assert_eq!(status, 0);
    assert!(!explained.contains("Inspected:"), "{explained}");
    assert!(
        explained.contains("not inspected whatever address it has"),
        "{explained}"
    );
    assert!(
        checked.contains("does not inspect what rule 1"),
        "{checked}"
    );

    let (_, explained, checked) = at(&format!(r#"{{ allow = "203.0.113.0/24" }}, {inspect}"#));
    assert!(explained.contains("Inspected:"), "{explained}");
    let where_not = "in 203.0.113.0/24, it is admitted and not inspected by rule 1";
    assert!(explained.contains(where_not), "{explained}");
    assert!(
        checked.contains("does not inspect what rule 1"),
        "{checked}"
    );

    // Behind it, or of other ports, it takes nothing.
    for rules in [
        format!(r#"{inspect}, {{ allow = "0.0.0.0/0" }}"#),
        format!(r#"{{ allow = "0.0.0.0/0:80" }}, {inspect}"#),
    ] {
        let (_, explained, checked) = at(&rules);
        assert!(explained.contains("Inspected:"), "{explained}");
        assert!(!explained.contains("not inspected"), "{explained}");
        assert!(!checked.contains("does not inspect"), "{checked}");
    }

    // A deny beats the name from wherever it stands.
    let (status, explained, _) = at(&format!(
        r#"{inspect}, {{ deny = ["0.0.0.0/0:443", "[::/0]:443"] }}"#
    ));
    assert_eq!(status, 3);
    assert!(
        explained.contains("refused whatever address it has"),
        "{explained}"
    );
}

#[test]
fn check_says_what_is_likely_meant_otherwise() {
    let folder = folder();
    let expected = "\
egress.toml:3: warning: rule 2, `allow api.code.test:443/tcp` never decides: rule 1, `allow *.code.test:443/tcp` (egress.toml:3: code) matches all of it
egress.toml:5: warning: rule 4, `allow pkg.test` names the same as rule 3, `deny pkg.test:80` (egress.toml:4): where both match, the first decides
egress.toml:6: warning: rule 5, `inspect 0.0.0.0/0:22/tcp`: the protocol of this port does not begin with TLS or HTTP, so every connection would be refused
egress.toml:8: warning: rule 7, `deny 203.0.113.7:80` never decides: rule 6, `deny 203.0.113.0/24` (egress.toml:7) matches all of it
egress.toml: warning: policy open: the default is allow and nothing is denied: the rules by name change nothing
egress.toml: can be used: 8 rules, 2 named policies, 5 warnings
";
    let (status, out, err) = policy(folder.path(), &["check", "egress.toml"]);
    assert_eq!((status, &out[..], &err[..]), (0, expected, ""));
    assert_eq!(
        policy(folder.path(), &["check", "egress.toml", "--strict"]).0,
        2
    );
}

#[test]
fn check_shows_the_place_of_what_is_wrong() {
    let folder = folder();
    let text = "default = \"deny\"\nrules = [\n  { allow = \"api.code.test:0\" },\n]\n";
    fs::write(folder.path().join("bad.toml"), text).expect("writing");
    let (status, out, err) = policy(folder.path(), &["check", "bad.toml"]);
    let expected = "\
slipgate: bad.toml:3:13: Port \"0\" in \"api.code.test:0\" is neither 1 to 65535 nor a range such as 8000-8010; write CIDR or NAME[:PORT[-PORT]][/tcp|udp|icmp]
 3 |   { allow = \"api.code.test:0\" },
   |             ^^^^^^^^^^^^^^^^^
";
    assert_eq!((status, &out[..], &err[..]), (2, "", expected));
    let (status, _, err) = policy(folder.path(), &["check", "missing.toml"]);
    assert_eq!(status, 2);
    assert!(err.contains("missing.toml: it can't be read"), "{err}");
}

#[test]
fn explain_says_which_rules_match_and_which_decides() {
    let folder = folder();
    let explain = |args: &[&str]| {
        let (status, out, err) =
            policy(folder.path(), &[&["explain", "egress.toml"], args].concat());
        (status, out + &err)
    };
    let (status, out) = explain(&["api.code.test:443"]);
    assert_eq!(
        (status, &out[..]),
        (0, "\
yes:
  api.code.test is resolved, by rule 1, `allow *.code.test:443/tcp` (egress.toml:3: code).
  TCP port 443 of what DNS tells for it is opened by rule 1, `allow *.code.test:443/tcp` (egress.toml:3: code).
  What a rule by address denies, protected space and public resolvers stay shut all the same.
rules that match, in order:
  rule 1, `allow *.code.test:443/tcp` (egress.toml:3: code)
  rule 2, `allow api.code.test:443/tcp` (egress.toml:3: code)
")
    );
    let (status, out) = explain(&["203.0.113.7:80"]);
    assert_eq!(
        (status, &out[..]),
        (
            3,
            "\
no:
  TCP to 203.0.113.7:80 is refused by rule 6, `deny 203.0.113.0/24` (egress.toml:7).
rules that match, in order:
  rule 6, `deny 203.0.113.0/24` (egress.toml:7)
  rule 7, `deny 203.0.113.7:80` (egress.toml:8)
"
        )
    );
    let (status, out) = explain(&["evil.test", "--policy", "offline"]);
    assert_eq!(
        (status, &out[..]),
        (
            3,
            "\
no:
  evil.test is not resolved, for the default is deny: the guest is answered REFUSED.
rules that match: none
"
        )
    );
    let (status, out) = explain(&["pkg.test:80"]);
    assert_eq!(status, 3);
    assert!(
        out.contains("TCP port 80 of it is refused by rule 3"),
        "{out}"
    );
    assert_eq!(explain(&["pkg.test:443"]).0, 0);
    assert_eq!(explain(&["169.254.169.254:80"]).0, 3);
    assert_eq!(
        explain(&["192.0.2.1", "--proto", "icmp", "--policy", "open"]).0,
        0
    );
    for (args, said) in [
        (&["192.0.2.1"][..], "no port"),
        (&["x.test:0"], "\"0\" is no port"),
        (&["x.test", "--policy", "gone"], "give one of offline, open"),
        (&["10.1:80"], "neither an address nor a name"),
    ] {
        let (status, out) = explain(args);
        assert!(status == 2 && out.contains(said), "{args:?}: {out}");
    }
}

#[test]
fn port_53_is_slipgates_whatever_the_rules_say_of_the_address() {
    let folder = folder();
    let rules = |rules: &str| {
        let text = format!("default = \"deny\"\nrules = [{rules}]");
        fs::write(folder.path().join("f.toml"), text).expect("writing");
    };
    let explain = |to: &str, proto: &str| {
        let args = ["explain", "f.toml", to, "--proto", proto];
        let (status, out, _) = policy(folder.path(), &args);
        (status, out)
    };
    rules(r#"{ allow = "10.0.2.3:53" }"#);
    for to in ["10.0.2.3:53", "8.8.8.8:53", "ns.test:53"] {
        for proto in ["udp", "tcp"] {
            let (status, out) = explain(to, proto);
            assert_eq!(status, 3, "{out}");
            assert!(out.contains("slipgate's own resolver"), "{out}");
            assert!(out.contains("REFUSED, whatever is asked"), "{out}");
            assert!(!out.contains("would open"), "{out}");
        }
    }
    rules(r#"{ allow = "a.test" }"#);
    let (status, out) = explain("10.0.2.3:53", "udp");
    assert!(status == 0 && !out.contains("REFUSED"), "{out}");
}

#[test]
fn diff_says_what_would_have_been_decided_otherwise() {
    let folder = folder();
    let candidate = r#"
default = "deny"
dns = { types = ["TXT"] }
rules = [{ allow = ["cdn.code.test:443", "203.0.113.0/24", "192.0.2.9:123/udp"] }]
"#;
    fs::write(folder.path().join("next.toml"), candidate).expect("writing");
    let diff = |args: &[&str]| policy(folder.path(), &[&["diff"], args].concat());
    let (status, out, err) = diff(&[
        "egress.toml",
        "next.toml",
        "--flow-log",
        "flows.jsonl",
        "--vm",
        "a",
    ]);
    assert_eq!(
        (status, &out[..], &err[..]),
        (
            1,
            "\
refused from now on:
         1  api.code.test:443/tcp  by default deny
let through from now on:
        40  203.0.113.7:80/tcp  by rule 2, `allow 203.0.113.0/24` (next.toml:4)
         1  192.0.2.9:123/udp   by rule 3, `allow 192.0.2.9:123/udp` (next.toml:4)
questions refused from now on:
         1  api.code.test  by default deny
questions answered from now on:
         1  cdn.code.test (TXT)  by rule 1, `allow cdn.code.test:443` (next.toml:4)
44 decided otherwise, of 7 records
",
            "slipgate: 1 lines of flows.jsonl are no records and were left out\n"
        )
    );
    let (status, out, _) = diff(&["egress.toml", "egress.toml", "--flow-log", "flows.jsonl"]);
    assert_eq!(
        (status, &out[..]),
        (
            0,
            "the same: all of 10 flows, questions and refusals recorded\n"
        )
    );
    let (status, _, err) = diff(&["egress.toml", "next.toml", "--flow-log", "gone"]);
    assert!(status == 2 && err.contains("--flow-log gone"), "{err}");
}

#[test]
fn diff_holds_a_record_against_bounds() {
    let folder = folder();
    let write =
        |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("writing");
    let open = "default = \"deny\"\nrules = [{ allow = \"*.code.test:443\" }]\n";
    let label = "x".repeat(40);
    let question = |i: usize, second: usize, source: &str| {
        format!(
            "{{\"event\":\"dns\",\"time\":\"2026-11-20T20:00:{second:02}.000Z\",\"vm\":\"a\",\
             \"name\":\"{i}.{label}.code.test\",\"type\":\"A\",\"source\":\"{source}\",\
             \"answers\":[\"198.51.100.{i}\"]}}\n"
        )
    };
    let flow = |i: usize, event: &str| {
        format!(
            "{{\"event\":\"{event}\",\"id\":\"{i}\",\"vm\":\"a\",\"proto\":\"tcp\",\
             \"started\":\"2026-11-20T20:00:30.000Z\",\"remote\":\"198.51.100.{i}:443\"}}\n"
        )
    };
    let mut log: String = (0..20).map(|i| question(i, i / 10, "upstream")).collect();
    log.extend((0..5).map(|i| question(i, 5, "cache")));
    log.extend((0..8).map(|i| flow(i, "flow_start")));
    log.extend((0..8).map(|i| flow(i, "flow_end")));
    log.extend((10..12).map(|i| flow(i, "flow_start")));
    write("bounds.jsonl", &log);
    write("open.toml", open);
    let diff = |more: &str| {
        write("bound.toml", &format!("{open}{more}"));
        let args = [
            "diff",
            "open.toml",
            "bound.toml",
            "--flow-log",
            "bounds.jsonl",
        ];
        let (status, out, err) = policy(folder.path(), &args);
        assert_eq!(err, "");
        (status, out)
    };
    for (more, said) in [
        (
            "[quotas]\ndns_per_second = 6",
            "8  questions  by dns_per_second 6",
        ),
        (
            "[quotas]\nnew_flows_per_second = 7",
            "3  new flows  by new_flows_per_second 7",
        ),
        (
            "[quotas]\nmax_flows = 5",
            "3  flows at once  by max_flows 5",
        ),
        // 44 octets and two each.
        (
            "[dns]\nnew_name_octets_per_minute = 60\nnew_name_burst_octets = 500",
            "9  new names beneath wildcards  by new_name_octets_per_minute 60",
        ),
        (
            "[dns]\nmax_label_octets = 39",
            "by a label of more than 39 octets",
        ),
        ("[dns]\nmax_labels = 3", "by a name of more than 3 labels"),
    ] {
        let (status, out) = diff(more);
        assert!(status == 1 && out.contains(said), "{more}\n{out}");
    }
    let (status, out) = diff(
        "[quotas]\nmax_flows = 8\nnew_flows_per_second = 10\ndns_per_second = 10\ntx_bytes_per_second = 9",
    );
    assert_eq!(
        (status, &out[..]),
        (
            0,
            "the same: all of 35 flows, questions and refusals recorded\n\
             not compared: bytes and packets per second, for a record does not say when they passed\n"
        )
    );
}

#[test]
fn check_says_when_there_is_no_room_for_the_rules() {
    let folder = folder();
    let rules = |n: usize| -> String {
        let lines =
            (0..n).map(|i| format!("  {{ deny = \"10.{}.{}.0/24\" }},\n", i / 256, i % 256));
        format!(
            "default = \"allow\"\nrules = [\n{}]\n",
            lines.collect::<String>()
        )
    };
    for (n, status, said) in [
        (2_045, 0, "good: 2045 rules"),
        (
            2_046,
            0,
            "2049 rules and defaults are more than half of the 4096",
        ),
        (
            4_094,
            0,
            "4097 rules and defaults are more than the 4096 that there is room for",
        ),
    ] {
        fs::write(folder.path().join("big.toml"), rules(n)).expect("writing");
        let found = policy(folder.path(), &["check", "big.toml"]);
        let text = format!("{}{}", found.1, found.2);
        assert!(found.0 == status && text.contains(said), "{n}: {text}");
    }
}

#[test]
fn learn_prints_the_least_policy_and_check_takes_it() {
    let folder = folder();
    let learn = |args: &[&str]| {
        policy(
            folder.path(),
            &[&["learn", "--flow-log", "flows.jsonl"], args].concat(),
        )
    };
    let (status, out, _) = learn(&["a"]);
    assert_eq!(
        (status, &out[..]),
        (
            0,
            "\
# The least policy for the recorded flows of a: 3 flows, 3 rules.
default = \"deny\"
rules = [
  { allow = \"api.code.test:443/tcp\" }, # 1 flow
  { allow = \"cdn.code.test:443/tcp\" }, # 1 flow
  { allow = \"192.0.2.9:123/udp\" }, # 1 flow
]
"
        )
    );
    // Another VM's names are not its own; a private address needs a rule of its own.
    let (_, out, _) = learn(&["b"]);
    let rules: Vec<&str> = out.lines().filter(|line| line.contains("allow")).collect();
    assert_eq!(
        rules,
        [
            "  { allow = \"db.corp.test:5432/tcp\" }, # 1 flow",
            "  { allow = \"10.20.0.5:5432/tcp\" }, # 1 flow",
            "  { allow = \"192.0.2.11/icmp\" }, # 1 flow",
            "  { allow = \"198.51.100.7:443/tcp\" }, # 1 flow",
        ]
    );
    let (_, out, _) = learn(&["--generalise"]);
    assert!(
        out.contains("{ allow = \"*.code.test:443/tcp\" }, # 2 flows"),
        "{out}"
    );
    assert!(
        out.contains("db.corp.test:5432"),
        "one name is no family: {out}"
    );

    fs::write(folder.path().join("learnt.toml"), out).expect("writing");
    let (status, out, err) = policy(folder.path(), &["check", "learnt.toml", "--strict"]);
    assert_eq!((status, &err[..]), (0, ""), "{out}");
    // What was seen is let through by what was learnt.
    let (_, out, _) = policy(
        folder.path(),
        &[
            "diff",
            "learnt.toml",
            "learnt.toml",
            "--flow-log",
            "flows.jsonl",
        ],
    );
    assert!(out.starts_with("the same"), "{out}");
    for seen in ["api.code.test:443", "db.corp.test:5432", "198.51.100.7:443"] {
        let (status, out, _) = policy(folder.path(), &["explain", "learnt.toml", seen]);
        assert_eq!(status, 0, "{seen}: {out}");
    }
}

#[test]
fn mistakes_are_told_in_plain_words() {
    let folder = folder();
    for (text, said) in [
        (
            "rules = [\"x\"]",
            "expected a table, as in { allow = \"example.com:443\" }",
        ),
        ("default = 1", "expected a text in quotes"),
        (
            "[quotas]\nmax_flows = 99999999999999999999999999",
            "`99999999999999999999999999`, expected",
        ),
    ] {
        fs::write(folder.path().join("m.toml"), text).expect("writing");
        let (status, _, error) = policy(folder.path(), &["check", "m.toml"]);
        assert_eq!(status, 2, "{text}");
        assert!(error.contains(said), "{error}");
    }
    let (status, _, error) = policy(folder.path(), &["check", "nowhere.toml"]);
    assert_eq!(status, 2);
    assert!(
        error.contains("nowhere.toml: it can't be read (No such file") && !error.contains("--"),
        "{error}"
    );
    let url = "default = \"deny\"\nrules = [{ allow = \"https://x.test/\" }]";
    fs::write(folder.path().join("m.toml"), url).expect("writing");
    let (_, _, error) = policy(folder.path(), &["check", "m.toml"]);
    assert!(error.contains("write \"x.test:443/tcp\""), "{error}");
    let url = ["explain", "egress.toml", "https://example.com/"];
    let (status, _, error) = policy(folder.path(), &url);
    assert_eq!(status, 2);
    assert!(error.contains("leave the scheme out"), "{error}");
}

#[test]
fn a_vm_that_no_record_is_of_is_a_mistake() {
    let folder = folder();
    fs::write(folder.path().join("empty.jsonl"), "").expect("writing");
    let diff = ["diff", "egress.toml", "egress.toml", "--flow-log"];
    for (args, said) in [
        (
            [&diff[..], &["flows.jsonl", "--vm", "nobdy"]].concat(),
            "records of a, b",
        ),
        (
            vec!["learn", "nobdy", "--flow-log", "flows.jsonl"],
            "records of a, b",
        ),
        ([&diff[..], &["empty.jsonl"]].concat(), "has no records"),
        (vec!["learn", "--flow-log", "empty.jsonl"], "has no records"),
    ] {
        let (status, out, error) = policy(folder.path(), &args);
        assert_eq!((status, &*out), (2, ""), "{args:?}");
        assert!(error.contains(said), "{error}");
    }
    let (status, ..) = policy(
        folder.path(),
        &[&diff[..], &["flows.jsonl", "--vm", "a"]].concat(),
    );
    assert_eq!(status, 0);
}

#[test]
fn learn_follows_a_log_over_its_rotation() {
    let folder = folder();
    let log = folder.path().join("flows.jsonl");
    let child = Command::new(env!("CARGO_BIN_EXE_slipgate"))
        .args([
            "policy",
            "learn",
            "--flow-log",
            "flows.jsonl",
            "--follow",
            "--for",
            "2s",
        ])
        .current_dir(folder.path())
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("slipgate");
    let line = |id: &str, port: u16| {
        format!(
            "{{\"id\":\"{id}\",\"vm\":\"a\",\"proto\":\"tcp\",\"guest\":\"10.0.2.15:1\",\"remote\":\"192.0.2.77:{port}\"}}\n"
        )
    };
    std::thread::sleep(std::time::Duration::from_millis(500));
    let mut old = fs::OpenOptions::new()
        .append(true)
        .open(&log)
        .expect("the log");
    std::io::Write::write_all(&mut old, line("90", 1001).as_bytes()).expect("appending");
    fs::rename(&log, folder.path().join("flows.jsonl.1")).expect("rotating");
    std::io::Write::write_all(&mut old, line("91", 1002).as_bytes()).expect("appending");
    fs::write(&log, line("92", 1003)).expect("the next one");
    let output = child.wait_with_output().expect("its end");
    let out = String::from_utf8(output.stdout).expect("UTF-8");
    for port in [1001, 1002, 1003] {
        assert!(
            out.contains(&format!("192.0.2.77:{port}/tcp")),
            "{port}: {out}"
        );
    }
}

#[test]
fn learn_lets_in_what_an_alias_leads_through() {
    let folder = folder();
    let log = r#"{"event":"dns","vm":"a","name":"www.shop.test","type":"A","verdict":"allowed","rcode":"NOERROR","chain":["shop.cdn.test","e7.edge.test"],"answers":["198.51.100.7"]}
{"event":"dns","vm":"a","name":"unused.test","type":"A","verdict":"allowed","rcode":"NOERROR","chain":["other.cdn.test"],"answers":["198.51.100.9"]}
{"event":"dns","vm":"b","name":"www.shop.test","type":"A","verdict":"allowed","rcode":"NOERROR","chain":["of-b.cdn.test"],"answers":["198.51.100.8"]}
{"event":"flow_start","id":"1","vm":"a","proto":"tcp","guest":"10.0.2.15:1","remote":"198.51.100.7:443","dns_name":"www.shop.test","direction":"outbound"}
{"event":"dns","vm":"a","name":"www.shop.test","type":"A","verdict":"allowed","rcode":"NOERROR","chain":["later.cdn.test","a\"b.cdn.test"],"answers":["198.51.100.10"]}
"#;
    fs::write(folder.path().join("flows.jsonl"), log).expect("writing");
    let args = ["learn", "a", "--flow-log", "flows.jsonl"];
    let (status, out, err) = policy(folder.path(), &args);
    let expected = "\
# The least policy for the recorded flows of a: 1 flows, 4 rules.
default = \"deny\"
rules = [
  { allow = \"e7.edge.test:443/tcp\" }, # by alias
  { allow = \"later.cdn.test:443/tcp\" }, # by alias
  { allow = \"shop.cdn.test:443/tcp\" }, # by alias
  { allow = \"www.shop.test:443/tcp\" }, # 1 flow
]
";
    assert_eq!((status, &out[..], &err[..]), (0, expected, ""));

    // What is learnt answers as before; without the alias's rule it would not.
    fs::write(folder.path().join("learnt.toml"), &out).expect("writing");
    let without: Vec<&str> = out.lines().filter(|line| !line.contains("e7.")).collect();
    fs::write(folder.path().join("without.toml"), without.join("\n")).expect("writing");
    let args = [
        "diff",
        "learnt.toml",
        "without.toml",
        "--flow-log",
        "flows.jsonl",
        "--vm",
        "a",
    ];
    let (status, out, err) = policy(folder.path(), &args);
    let refused = "1  www.shop.test  by default deny, for its alias e7.edge.test";
    assert!(status == 1 && out.contains(refused), "{out}{err}");
}

#[test]
fn learn_follows_for_a_day_at_most() {
    let folder = folder();
    for seconds in ["0", "86401", "18446744073709551615"] {
        let args = ["learn", "--flow-log", "flows.jsonl", "--follow", "--for"];
        let (status, _, err) = policy(folder.path(), &[&args[..], &[seconds]].concat());
        assert!(
            status == 2 && err.contains("give a second to a day"),
            "{err}"
        );
    }
    for (args, said) in [
        (&["learn"][..], "<VM>"),
        (
            &["learn", "a", "--open", "--flow-log", "f"],
            "cannot be used with",
        ),
        (&["learn", "a", "--follow"], "--flow-log"),
        (
            &["learn", "a", "--flow-log", "flows.jsonl", "--for", "1s"],
            "--follow",
        ),
    ] {
        let (status, _, err) = policy(folder.path(), args);
        assert!(status == 2 && err.contains(said), "{args:?}: {err}");
    }
}

#[test]
fn the_schema_is_the_committed_one() {
    let folder = folder();
    let (status, out, _) = policy(folder.path(), &["schema"]);
    assert_eq!(
        (status, &out[..]),
        (0, include_str!("../../docs/policy.schema.json"))
    );
}

const LED: &str = r#"{"event":"flow_start","id":"r1-1","vm":"a","proto":"tcp","guest":"10.0.2.15:1","remote":"10.0.2.2:8080","nat":"127.0.0.1:4000","host":"127.0.0.1:80","rule_text":"host_loopback 8080:80","verdict":"relay","direction":"outbound","path":"relay"}
{"event":"flow_end","id":"r1-1","vm":"a","proto":"tcp","guest":"10.0.2.15:1","remote":"10.0.2.2:8080","nat":"127.0.0.1:4000","host":"127.0.0.1:80","rule_text":"host_loopback 8080:80","verdict":"relay","direction":"outbound","path":"relay"}
{"event":"flow_start","id":"r1-2","vm":"a","proto":"udp","guest":"10.0.2.15:1","remote":"10.0.2.100:5300","nat":"127.0.0.1:4000","host":"127.0.0.1:5300","verdict":"relay","direction":"outbound","path":"relay"}
"#;

#[test]
fn what_leads_to_the_hosts_loopback_is_explained_checked_compared_and_learnt() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        fs::write(folder.path().join(name), text).expect("writing");
    };
    let run = |args: &[&str]| {
        let (status, out, err) = policy(folder.path(), args);
        assert_eq!(err, "");
        (status, out)
    };
    write("flows.jsonl", LED);
    let learnt = "\
# The least policy for the recorded flows of a: 2 flows, 0 rules.
default = \"deny\"
rules = [
]
[host_loopback]
ports = [
  \"8080:80/tcp\", # 1 flow
  \"10.0.2.100:5300/udp\", # 1 flow
]
";
    let (status, out) = run(&["learn", "a", "--flow-log", "flows.jsonl"]);
    assert_eq!((status, &out[..]), (0, learnt));
    write("now.toml", learnt);
    assert_eq!(run(&["check", "now.toml", "--strict"]).0, 0);
    let (status, out) = run(&["explain", "now.toml", "10.0.2.2:8080"]);
    assert_eq!(
        (status, &out[..]),
        (
            0,
            "yes:\n  TCP to 10.0.2.2:8080 is allowed: `host_loopback 8080:80/tcp` leads it to the \
             host's 127.0.0.1:80.\nrules that match: none\n"
        )
    );
    assert_eq!(run(&["explain", "now.toml", "10.0.2.2:80"]).0, 3);

    write(
        "next.toml",
        "default = \"deny\"\nrules = [{ deny = \"10.0.2.2\" }]\n\
         [host_loopback]\nports = [\"8080:80\"]\n",
    );
    let (status, out) = run(&["check", "next.toml", "--strict"]);
    let warning = "next.toml: warning: TCP to 10.0.2.2:8080 is refused by rule 1, `deny 10.0.2.2` \
                   (next.toml:2): `host_loopback 8080:80` leads it to the host's 127.0.0.1:80, but \
                   a rule that denies has precedence.\n";
    assert!(status == 2 && out.contains(warning), "{out}");
    let (status, out) = run(&["explain", "next.toml", "10.0.2.2:8080"]);
    assert!(status == 3 && out.contains("has precedence"), "{out}");
    let (status, out) = run(&["diff", "now.toml", "next.toml", "--flow-log", "flows.jsonl"]);
    assert_eq!(
        (status, &out[..]),
        (
            1,
            "refused from now on:\n         1  10.0.2.100:5300/udp  by no host_loopback lists it\n         \
             1  10.0.2.2:8080/tcp    by rule 1, `deny 10.0.2.2` (next.toml:2)\n\
             2 decided otherwise, of 2 records\n"
        )
    );
}
