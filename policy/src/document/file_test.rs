use std::{io, path::Path};

use proptest::prelude::*;
use slipgate_abi::Protocol;

use super::*;
use crate::{
    Action, Destination, Filtering, Idle, Mapping, NatBehaviour, OnReload, PolicySet, Sleep,
    Timers,
    document::{Amount, CliOverrides, Count, LoadedPolicies, RuleFlag, schema},
};

fn file(text: &str) -> PolicyFile {
    PolicyFile::parse(Path::new("p/egress.toml"), text.into()).unwrap()
}

fn load(text: &str) -> Result<LoadedPolicies, String> {
    let file = PolicyFile::parse(Path::new("p/egress.toml"), text.into());
    let read = |path: &Path| match path.to_str() {
        Some("p/lists/bad.txt") => Ok("203.0.113.0/24 # bad\n".to_owned()),
        Some("p/lists/broken.txt") => Ok("\nnonsense/8\n".to_owned()),
        _ => Err(io::ErrorKind::NotFound.into()),
    };
    file.and_then(|file| LoadedPolicies::of(&CliOverrides::default(), Some(&file), &read))
        .map_err(|e| e.to_string())
}

fn compiled(text: &str) -> PolicySet {
    load(text).unwrap().compile().unwrap()
}

fn wrong(text: &str, said: &str) {
    let error = load(text).map(drop).unwrap_err();
    assert_eq!(error, said);
}

fn tcp(addr: &str, port: u16) -> Destination {
    Destination {
        addr: addr.parse().unwrap(),
        port,
        protocol: Protocol::Tcp,
    }
}

#[test]
fn every_key_is_understood() {
    let text = r#"
        default = "deny"
        on_reload = "keep"
        rules = [
            { allow = "*.example.com:443/tcp" },
            { inspect = ["api.example.com:443", "0.0.0.0/0:80/tcp"], http = "first" },
            { deny = "198.51.100.0/24", comment = "why" },
            { deny_file = "lists/bad.txt" },
        ]
        [quotas]
        max_flows = 100
        new_flows_per_second = "2K"
        tx_bytes_per_second = "10M"
        rx_bytes_per_second = "64Ki"
        tx_packets_per_second = 1_000
        rx_packets_per_second = 0
        dns_per_second = 50
        [dns]
        resolvers = ["192.0.2.53", "192.0.2.54:5353"]
        types = ["TXT", "ANY"]
        ttl_floor_s = 60
        ttl_ceiling_s = 3600
        max_labels = 8
        max_label_octets = 20
        new_name_octets_per_minute = "2Ki"
        new_name_burst_octets = 4000
        [timers]
        tcp_established_s = 86400
        tcp_closing_s = 300
        udp_s = 120

        [nat.udp]
        mapping = "endpoint-independent"
        filtering = "address-dependent"

        [nat.tcp]
        hairpin = false

        [sleep]
        packets = 64
        patience_s = 300
        [idle]
        ignores = ["keepalive"]
        [[forward]]
        protocol = "tcp"
        address = "127.0.0.1"
        host_port = "9000-9010"
        guest_port = "8000-8010"
        [[forward]]
        vm = "a"
        protocol = "udp"
        host_port = 53
        [policy.ci]
        default = "allow"
        rules = [{ deny = "0.0.0.0/0:25" }]
        quotas = { max_flows = 5 }
        dns = { types = ["NULL"] }
        [vms]
        runner = "ci"
    "#;
    let document = file(text).document;
    assert_eq!(document.quotas.rx_bytes_per_second, Some(Amount(65_536)));
    assert_eq!(document.quotas.new_flows_per_second, Some(Count(2_000)));
    let specs: Vec<String> = document
        .forward
        .iter()
        .map(|f| f.get_ref().spec())
        .collect();
    assert_eq!(specs, ["tcp:127.0.0.1:9000-9010:8000-8010", "a=udp:53:53"]);

    let policies = compiled(text);
    let top = policies.of(Some(0));
    assert_eq!(top.settings().on_reload, OnReload::Keep);
    assert_eq!(top.settings().dns.types, [16, 255]);
    let dns = &top.settings().dns;
    assert_eq!((dns.max_labels, dns.max_label_octets), (8, 20));
    let (rate, burst) = (dns.new_names.octets_per_minute, dns.new_names.burst_octets);
    assert_eq!((rate, burst), (2_048, 4_000));
    let timers = Timers {
        tcp_established_s: 86_400,
        tcp_opening_s: 240,
        tcp_closing_s: 300,
        udp_s: 120,
        icmp_s: 60,
    };
    assert_eq!(top.settings().timers, timers);
    let udp = NatBehaviour {
        mapping: Mapping::EndpointIndependent,
        filtering: Filtering::AddressDependent,
        hairpin: true,
    };
    assert_eq!(top.settings().nat.udp, udp);
    assert_eq!(top.settings().nat.tcp, NatBehaviour::default());
    let sleep = Sleep {
        packets: 64,
        patience_s: 300,
        ..Sleep::default()
    };
    assert_eq!(top.settings().sleep, sleep);
    let idle = Idle {
        ignores_keepalive: true,
        ignores_refused: false,
    };
    assert_eq!(top.settings().idle, idle);
    let named = policies.of(Some(1)).settings();
    assert_eq!(named.timers, Timers::default(), "each policy has its own");
    assert_eq!(named.sleep, Sleep::default(), "each policy has its own");
    assert_eq!(named.idle, Idle::default(), "each policy has its own");
    let texts: Vec<String> = policies.texts().collect();
    assert_eq!(
        texts,
        [
            "default deny",
            "safe defaults",
            "safe defaults: DNS elsewhere",
            "allow *.example.com:443/tcp",
            "inspect api.example.com:443",
            "inspect 0.0.0.0/0:80/tcp",
            "deny 198.51.100.0/24",
            "deny-file p/lists/bad.txt",
            "[ci] default allow",
            "[ci] safe defaults",
            "[ci] safe defaults: DNS elsewhere",
            "[ci] deny 0.0.0.0/0:25",
        ]
    );
    let denied = top.decide(tcp("198.51.100.7", 81));
    let note = top.note(denied.rule).unwrap();
    assert_eq!(note.place.as_deref(), Some("p/egress.toml:7"));
    assert_eq!(note.comment.as_deref(), Some("why"));
    assert_eq!(top.decide(tcp("203.0.113.9", 1)).line, Some(1));
    let inspected = top.decide(tcp("192.0.2.1", 80)).rule;
    assert!(top.inspects(inspected));
    assert_eq!(top.http(inspected), crate::Http::First);
    let (place, ci) = policies.by_name("ci").unwrap();
    assert_eq!((place, ci.default_action()), (1, Action::Allow));
    assert_eq!(ci.settings().dns.types, [10]);
    assert!(!ci.decide(tcp("192.0.2.1", 25)).is_allowed());
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    wrong(
        "default = \"deny\"\nrules = [\n  { alow = \"x.test\" },\n]\n",
        "p/egress.toml:3:5: unknown field `alow`, expected one of `allow`, `inspect`, `deny`, \
         `deny_file`, `http`, `comment`; see `slipgate policy schema` for the keys and their values\n 3 |   { \
         alow = \"x.test\" },\n   |     ^^^^",
    );
    wrong(
        "default = \"deny\"\nrules = [ { allow = [\"ok.test\", \"10.0.0.1/8\"] } ]",
        "p/egress.toml:2:33: \"10.0.0.1/8\" names a host inside a network: 10.0.0.0/8 is the \
         network, 10.0.0.1 the host; write CIDR or NAME[:PORT[-PORT]][/tcp|udp|icmp]\n 2 | rules = [ \
         { allow = [\"ok.test\", \"10.0.0.1/8\"] } ]\n   |                                 \
         ^^^^^^^^^^^^",
    );
    wrong(
        "rules = [{ deny = \"ä\" }]",
        "p/egress.toml:1:19: \"ä\" has characters that DNS names do not have: write the name as it is asked \
         for, each such label in its `xn--` form; write CIDR or NAME[:PORT[-PORT]][/tcp|udp|icmp]\n \
         1 | rules = [{ deny = \"ä\" }]\n   |                   ^^^",
    );
    wrong(
        "rules = [{ deny = \"a.test\" }]",
        "p/egress.toml:1:10: no default is given; write default = \"deny\" to refuse \
         flows that no rule matches, or \"allow\" to admit them\n 1 | rules = [{ deny = \"a.test\" }]\n   | \
         \x20        ^^^^^^^^^^^^^^^^^^^",
    );
}

#[test]
fn each_mistake_has_its_error() {
    for (text, said) in [
        ("default = \"maybe\"", "1:11: unknown variant `maybe`"),
        ("default = deny", "1:11:"),
        (
            "[policy.a]\non_reload = \"cut\"",
            "1:9: the policy a has no default",
        ),
        (
            "[policy.\"a b\"]\ndefault = \"deny\"",
            "1:9: \"a b\" can't be a name",
        ),
        (
            "default = \"deny\"\nrules = [{ allow = \"a.test\", deny = \"b.test\" }]",
            "exactly one of",
        ),
        (
            "default = \"deny\"\nrules = [{ comment = \"x\" }]",
            "exactly one of",
        ),
        (
            "default = \"deny\"\nrules = [{ allow = \"a.test\", http = \"each\" }]",
            "http applies only to inspected flows",
        ),
        (
            "default = \"deny\"\nrules = [{ deny_file = \"none.txt\" }]",
            "2:24: p/none.txt can't be read",
        ),
        (
            "default = \"deny\"\nrules = [{ deny_file = \"lists/broken.txt\" }]",
            "p/lists/broken.txt:2",
        ),
        ("[quotas]\nmax_flows = 0", "0 is out of range"),
        ("[quotas]\nmax_flows = -1", "negative"),
        ("[quotas]\ndns_per_second = \"10X\"", "\"10X\" is no amount"),
        (
            "[dns]\nttl_floor_s = 60\nttl_ceiling_s = 59",
            "3:17: ttl_ceiling_s is 59",
        ),
        ("[dns]\nmax_labels = 0", "2:14: max_labels is 0"),
        ("[timers]\nudp_s = 119", "2:9: udp_s is 119"),
        ("[timers]\nicmp_s = 604801", "2:10: icmp_s is 604801"),
        ("[timers]\ntcp_opening_s = 239", "RFC 5382 REQ-5"),
        (
            "[nat.udp]\nfiltering = \"endpoint-independent\"",
            "write mapping = \"endpoint-independent\" beside it",
        ),
        (
            "[nat.udp]\nhairpin = true",
            "2:11: hairpinning needs a port that does not depend on the destination",
        ),
        (
            "[nat.tcp]\nmapping = \"address-dependent\"",
            "unknown variant `address-dependent`",
        ),
        ("[sleep]\npackets = 0", "2:11: packets of [sleep] is 0"),
        ("[sleep]\nbytes = 16777217", "give 1 to 16777216"),
        ("[sleep]\npatience_s = 3601", "give 1 to 3600"),
        (
            "[idle]\nignores = [\"ping\"]",
            "expected `keepalive` or `refused`",
        ),
        ("[dns]\ntypes = [\"A\"]", "unknown variant `A`"),
        (
            "[dns]\nmax_label_octets = 64",
            "2:20: max_label_octets is 64",
        ),
        ("[dns]\nnew_name_octets_per_minute = 0", "0 is out of range"),
        (
            "[policy.a]\ndefault = \"deny\"\ndns = { resolvers = \"nobody\" }",
            "3:21: a list of resolvers' addresses, \"host\" or \"none\"",
        ),
        (
            "default = \"deny\"\n[dns]\nresolvers = [\"none\", \"9.9.9.9\"]",
            "3:13: a list has addresses only; write resolvers = \"none\"",
        ),
        (
            "default = \"deny\"\n[dns]\nresolvers = [\"host\"]",
            "3:13: a list has addresses only; write resolvers = \"none\"",
        ),
        (
            "[policy.a]\ndefault = \"deny\"\ndns = { resolvers = [\"x\"] }",
            "3:21: \"x\": not a resolver's address",
        ),
        (
            "default = \"deny\"\n[dns]\nresolvers = [\"2001:db8::53\", \"fe80::1%eth0\"]",
            "3:13: \"fe80::1%eth0\": an address of one link",
        ),
        (
            "[dns]\nresolvers = [\"9.9.9.1\", \"9.9.9.2\", \"9.9.9.3\", \"9.9.9.4\", \
             \"9.9.9.5\", \"9.9.9.6\", \"9.9.9.7\", \"9.9.9.8\", \"9.9.9.9\"]",
            "\"9.9.9.9\": one too many: 8 are asked at most",
        ),
        (
            "[host_loopback]\nports = [8080, \"8080:80/tcp\"]",
            "2:16: port 8080 leads to port 8080 of the host already",
        ),
        (
            "[host_loopback]\nports = [\"80-81:80\"]",
            "2:10: 2 ports lead to 1 ports of the host",
        ),
        ("[host_loopback]\nports = [53]", "slipgate's own: its DNS"),
        (
            "[host_loopback]\nports = [true]",
            "a port, or ports like \"9000-9010\" or \"8080:80/tcp\"",
        ),
        ("[host_loopback]\nports = [70000]", "a port, or ports like"),
        ("[host_loopback]\naddress = \"x\"", "invalid IPv4"),
        ("[host_loopback]\nvm = \"a\"", "unknown field `vm`"),
        (
            "[policy.a]\ndefault = \"deny\"\n[policy.a.host_loopback]\nports = [\"x\"]",
            "4:10: \"x\" is no port",
        ),
    ] {
        let error = load(text).map(drop).unwrap_err();
        assert!(error.contains(said), "{text}\n{error}");
        assert!(
            error.starts_with("p/egress.toml:") || error.starts_with("deny_file "),
            "{error}"
        );
    }
}

#[test]
fn the_schema_that_is_committed_is_the_files() {
    let committed: serde_json::Value =
        serde_json::from_str(include_str!("../../../docs/policy.schema.json")).unwrap();
    assert!(
        committed == schema(),
        "write it again: cargo run -- policy schema > docs/policy.schema.json"
    );
}

fn pattern() -> impl Strategy<Value = String> {
    let host = prop_oneof![
        any::<[u8; 4]>().prop_map(|a| std::net::Ipv4Addr::from(a).to_string()),
        "(\\*\\.)?[a-z]{1,5}\\.(test|example)",
    ];
    let ports = prop_oneof![Just(String::new()), (1u16..).prop_map(|p| format!(":{p}"))];
    (host, ports).prop_map(|(host, ports)| format!("{host}{ports}"))
}

proptest! {
    /// The same rules as flags and as a file: one order, one meaning.
    #[test]
    fn flags_and_file_say_the_same(
        rules in proptest::collection::vec((0..2, pattern()), 0..10),
        split in 0usize..10,
        addr in any::<[u8; 4]>(),
        port in any::<u16>(),
    ) {
        let flags: Vec<RuleFlag> = rules.iter().map(|(kind, text)| match kind {
            0 => RuleFlag::Match(Action::Allow, text.clone()),
            _ => RuleFlag::Match(Action::Deny, text.clone()),
        }).collect();
        let line = |(kind, text): &(i32, String)| {
            format!("{{ {} = \"{text}\" }},\n", if *kind == 0 { "allow" } else { "deny" })
        };
        let split = split.min(rules.len());
        let body: String = rules[split..].iter().map(line).collect();
        let file = file(&format!("default = \"deny\"\nrules = [\n{body}]\n"));
        let none = |_: &Path| Err(io::ErrorKind::NotFound.into());
        let by_flags = |rules: &[RuleFlag], default| CliOverrides {
            rules: rules.to_vec(),
            default,
            ..CliOverrides::default()
        };
        let all = by_flags(&flags, Some(Action::Deny));
        let typed = LoadedPolicies::of(&all, None, &none).unwrap();
        let some = by_flags(&flags[..split], None);
        let both = LoadedPolicies::of(&some, Some(&file), &none).unwrap();
        let (typed, both) = (typed.compile().unwrap(), both.compile().unwrap());
        let to = Destination { addr: addr.into(), port, protocol: Protocol::Tcp };
        prop_assert_eq!(typed.of(Some(0)).decide(to), both.of(Some(0)).decide(to));
        let bare = |text: String| text.trim_start_matches('-').to_owned();
        let texts = |set: &PolicySet| set.texts().map(bare).collect::<Vec<_>>();
        prop_assert_eq!(texts(&typed), texts(&both));
        // What the engine is sent is what it gets.
        let loaded = LoadedPolicies::of(&by_flags(&flags, None), Some(&file), &none).unwrap();
        let json = serde_json::to_string(&loaded).unwrap();
        prop_assert_eq!(serde_json::from_str::<LoadedPolicies>(&json).unwrap(), loaded);
    }

    #[test]
    fn no_text_panics(text in "(?s).{0,200}") {
        let _ = load(&text);
    }

    #[test]
    fn amounts_are_multiples(number in 0u64..1_000_000, unit in 0usize..3) {
        let (name, factor) = [("", 1), ("K", 1_000), ("Mi", 1 << 20)][unit];
        prop_assert_eq!(format!("{number}{name}").parse::<Amount>(), Ok(Amount(number * factor)));
    }
}
