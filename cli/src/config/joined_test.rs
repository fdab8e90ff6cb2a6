use clap::FromArgMatches as _;

use super::*;
use crate::args;

fn joined(typed: &[&str]) -> Result<Vec<VmDefinition>, ConfigError> {
    let all = ["slipgate", "attach"].iter().chain(typed);
    let matches = CommandLine::command().try_get_matches_from(all).unwrap();
    let line = CommandLine::from_arg_matches(&matches).unwrap();
    let args::Command::Attach(args) = line.command else {
        panic!("attach");
    };
    attach(&args, matches.subcommand_matches("attach").unwrap())
}

#[test]
fn what_is_said_of_a_vm_goes_to_the_daemon() {
    let vms = joined(&[
        "--vm",
        "name=a,tap=tap0,max-flows=5,policy=closed,mac=52:54:00:00:00:01",
        "--tap",
        "tap1",
        "--forward",
        "a=tcp:8080-8081:80-81",
        "--forward",
        "tap1=udp:53:53",
        "--max-flows",
        "9",
        "--dns-per-second",
        "7",
        "--uplink",
        "eth0",
    ])
    .unwrap();
    let shown: Vec<_> = vms
        .iter()
        .map(|vm| serde_json::to_value(vm).unwrap())
        .collect();
    let expected = [
        serde_json::json!({
            "name": "a",
            "tap": "tap0",
            "mac": "52:54:00:00:00:01",
            "policy": "closed",
            "quotas": { "max_flows": 5, "dns_per_second": 7 },
            "forwards": ["tcp:8080-8081:80-81"],
        }),
        serde_json::json!({
            "name": "tap1",
            "tap": "tap1",
            "quotas": { "max_flows": 9, "dns_per_second": 7 },
            "forwards": ["udp:53:53"],
        }),
    ];
    assert_eq!(shown, expected);
    let typed = ["--tap", "tap0", "--guest-ip", "10.0.2.15"];
    assert!(joined(&typed).unwrap()[0].ip.is_some());
    let typed = [
        "--tap",
        "tap0",
        "--ipv6",
        "off",
        "--ipv6-prefix",
        "fd00:7::/64",
    ];
    let vm = &joined(&typed).unwrap()[0];
    assert_eq!(vm.ipv6, Some(slipgate_model::Ipv6Mode::Off));
    assert_eq!(vm.ipv6_prefix.as_deref(), Some("fd00:7::/64"));
}

#[test]
fn what_is_said_of_the_nat_is_refused_with_the_reason() {
    for (typed, part) in [
        (["--flow-log", "f"], "has that for all its VMs"),
        (["--mtu", "1400"], "has that for all its VMs"),
        (["--metrics", "127.0.0.1:9600"], "has that for all its VMs"),
        (["--nat-ports", "61000-62000"], "has that for all its VMs"),
        (["--policy", "f"], "reads no file"),
        (["--deny-file", "f"], "reads no file"),
        (["--dns", "192.0.2.1"], "reads no file"),
        (["--allow", "nonsense/99"], "give CIDR or NAME"),
        (["--host-loopback", "53"], "DNS"),
        (["--on-exit", "keep"], "removes the VM when"),
    ] {
        let error = joined(&[&["--tap", "tap0"], &typed[..]].concat()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(part) && error.contains(typed[0]), "{error}");
    }
}

/// The flags that `run` has and `attach` has not are all about its machine.
#[test]
fn what_is_said_of_the_machine_is_no_daemons() {
    let line = CommandLine::command();
    let flags = |command| {
        let command = line.find_subcommand(command).unwrap();
        let flags = command.get_arguments().filter_map(|flag| flag.get_long());
        flags.map(str::to_owned).collect::<Vec<_>>()
    };
    let of_attach = flags("attach");
    let mut its_own = flags("run");
    its_own.retain(|flag| !of_attach.contains(flag) && !OF_THE_MACHINE.contains(&&**flag));
    assert_eq!(its_own, Vec::<String>::new());
}

#[test]
fn rules_become_the_vms_policy_in_their_order() {
    let policy = |typed: &[&str]| {
        let vms = joined(&[&["--tap", "tap0"], typed].concat()).unwrap();
        let text = vms.into_iter().next().unwrap().inline_policy?;
        slipgate_policy::document::check_inline(&text).unwrap();
        Some(toml::from_str::<serde_json::Value>(&text).unwrap())
    };
    assert_eq!(policy(&[]), None);
    let typed = [
        "--deny",
        "192.0.2.1",
        "--allow",
        "192.0.2.0/24:443/tcp",
        "--inspect",
        "*.example.com:443",
    ];
    let rules = serde_json::json!([
        { "deny": "192.0.2.1" },
        { "allow": "192.0.2.0/24:443/tcp" },
        { "inspect": "*.example.com:443" },
    ]);
    let expected = |default: &str| serde_json::json!({ "default": default, "rules": rules });
    assert_eq!(policy(&typed), Some(expected("allow")));
    let denies = [&typed[..], &["--default", "deny"]].concat();
    assert_eq!(policy(&denies), Some(expected("deny")));
    let vms = joined(&["--tap", "tap0", "--host-loopback", "8000:80/tcp"]).unwrap();
    assert_eq!(vms[0].host_loopback, ["8000:80/tcp"]);
    let named = ["--vm", "name=a,tap=tap0,policy=closed"];
    let error = joined(&[&named[..], &["--deny", "192.0.2.1"]].concat()).unwrap_err();
    assert!(
        error.to_string().contains("give the rules alone"),
        "{error}"
    );
}
