use std::io::Write as _;

use slipgate_policy::Resolvers as Asked;

use super::{tests::config, *};

const FILE: &str = r#"
default = "deny"
rules = [{ allow = "a.test" }]
[quotas]
max_flows = 10
tx_bytes_per_second = "1M"
dns_per_second = 5
[dns]
resolvers = ["192.0.2.53"]
[[forward]]
vm = "one"
protocol = "tcp"
host_port = 8080
[policy.ci]
default = "allow"
[policy.ci.quotas]
max_flows = 20
[vms]
two = "ci"
"#;

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn with(text: &str, flags: &str) -> Result<Config, String> {
    let file = file(text);
    config(&format!("--policy {} {flags}", file.path().display()))
}

#[test]
fn a_vm_has_the_policy_and_quotas_that_are_nearest_to_it() {
    let c = with(
        FILE,
        "--vm name=one,tap=t1 --vm name=two,tap=t2 --vm name=three,tap=t3,policy=ci,max-flows=7 \
         --dns-per-second 9 --rx-packets-per-second 2K",
    )
    .unwrap();
    let of = |index: usize| {
        let limits = c.vms[index].limits;
        let policy = c.vms[index].policy.as_deref();
        (policy, limits.max_flows, limits.dns_per_second)
    };
    assert_eq!(of(0), (None, 10, 9));
    assert_eq!(of(1), (Some("ci"), 20, 9));
    assert_eq!(of(2), (Some("ci"), 7, 9));
    assert_eq!(c.vms[0].limits.rates.tx.bytes_per_second, 1_000_000);
    assert_eq!(
        c.vms[1].limits.rates.tx.bytes_per_second, 0,
        "another policy's"
    );
    assert_eq!(c.vms[1].limits.rates.rx.packets_per_second, 2_000);
    assert_eq!(c.vms[1].limits.new_flows_per_second, 2_000);
    let asked = Asked::These(vec!["192.0.2.53:53".parse().unwrap()]);
    assert_eq!(resolvers(&c), [asked.clone(), asked]);
    assert_eq!(c.forwards[0].spec, "one=tcp:8080:8080");

    let c = with(FILE, "--vm name=one,tap=t1 --policy-name ci --dns none").unwrap();
    assert_eq!(c.vms[0].policy.as_deref(), Some("ci"));
    assert_eq!(resolvers(&c), [Asked::Nobody, Asked::Nobody]);
}

/// Resolvers of each policy, the unnamed one first.
fn resolvers(config: &Config) -> Vec<Asked> {
    let loaded = config.load_policies().unwrap().policies.into_iter();
    loaded.map(|policy| policy.settings.dns.resolvers).collect()
}

#[test]
fn each_policy_has_its_own_resolvers_else_the_top_levels() {
    let text = "[dns]\nresolvers = [\"192.0.2.1\"]\n\
                [policy.a]\ndefault = \"allow\"\n\
                [policy.b]\ndefault = \"allow\"\ndns.resolvers = [\"192.0.2.2:5353\", \"192.0.2.3\"]\n\
                [policy.c]\ndefault = \"allow\"\ndns.resolvers = \"none\"\n\
                [policy.d]\ndefault = \"allow\"\ndns.resolvers = \"host\"\n";
    let these = |list: &[&str]| Asked::These(list.iter().map(|a| a.parse().unwrap()).collect());
    let (top, b) = (
        these(&["192.0.2.1:53"]),
        these(&["192.0.2.2:5353", "192.0.2.3:53"]),
    );
    let all = [top.clone(), top, b, Asked::Nobody, Asked::Host];
    let flags = "--vm name=x,tap=t,policy=a";
    assert_eq!(resolvers(&with(text, flags).unwrap()), all);
    let typed = with(text, &format!("{flags} --dns 192.0.2.9")).unwrap();
    let nine = these(&["192.0.2.9:53"]);
    assert!(resolvers(&typed).iter().all(|asked| *asked == nine));
    let none = with("default = \"deny\"", "--tap t").unwrap();
    assert_eq!(resolvers(&none), [Asked::Host]);
}

#[test]
fn endpoint_independent_mapping_needs_ports() {
    let text = "default = \"allow\"\n[nat.udp]\nmapping = \"endpoint-independent\"\n";
    let refused = with(text, "--tap t").unwrap().load_policies().unwrap_err();
    assert!(refused.to_string().contains("--eim-ports"), "{refused}");
    let c = with(text, "--tap t --eim-ports 20000-20999").unwrap();
    assert_eq!(c.eim_ports, Some(20_000..=20_999));
    assert!(c.load_policies().is_ok());
}

#[test]
fn nobody_gets_a_policy_by_accident() {
    let named = "[policy.a]\ndefault = \"deny\"\n[policy.b]\ndefault = \"allow\"\n";
    for (text, flags, said) in [
        (named, "--vm name=x,tap=t", "x names no policy"),
        (
            named,
            "--vm name=x,tap=t,policy=c",
            "has no such policy; the file has a, b",
        ),
        (
            named,
            "--vm name=x,tap=t --policy-name c",
            "--policy-name c",
        ),
        (
            "[vms]\nx = \"gone\"",
            "--vm name=x,tap=t",
            "no policy \"gone\"",
        ),
        (
            "[vms]\ny = \"gone\"",
            "--vm name=x,tap=t",
            "no policy \"gone\"",
        ),
        (
            "[dns]\nresolvers = [\"x\"]",
            "--tap t",
            "\"x\": not a resolver's address",
        ),
        ("[dns]\nresolvers = []", "--tap t", "no resolver"),
        (
            "[[forward]]\nprotocol = \"tcp\"\nhost_port = 61500",
            "--tap t",
            "covers port 61500",
        ),
        (
            "[[forward]]\nvm = \"z\"\nprotocol = \"tcp\"\nhost_port = 1",
            "--tap t",
            "no VM \"z\"",
        ),
    ] {
        let error = with(text, flags).map(drop).unwrap_err();
        assert!(error.contains(said), "{text}\n{error}");
    }
    let error = config("--vm name=x,tap=t,policy=c").map(drop).unwrap_err();
    assert!(error.contains("there is no --policy"), "{error}");
}

#[test]
fn reading_again_keeps_what_was_typed() {
    let file = file("default = \"deny\"\n[quotas]\nmax_flows = 10\n");
    let flags = format!("--policy {} --tap t --dns none", file.path().display());
    let before = config(&flags).unwrap();
    std::fs::write(
        &file,
        "default = \"deny\"\n[quotas]\nmax_flows = 11\n[dns]\nresolvers = [\"192.0.2.1\"]\n",
    )
    .unwrap();
    let after = before.reread().unwrap();
    assert_eq!(
        (
            before.vms[0].limits.max_flows,
            after.vms[0].limits.max_flows
        ),
        (10, 11)
    );
    assert_eq!(resolvers(&after), [Asked::Nobody]);
    std::fs::write(&file, "nonsense").unwrap();
    let error = after.reread().unwrap_err().to_string();
    assert!(error.contains(":1:9: "), "{error}");
}
