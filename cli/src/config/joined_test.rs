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
}

#[test]
fn what_is_said_of_the_nat_is_refused_with_the_reason() {
    for (typed, part) in [
        (["--flow-log", "f"], "has that for all its VMs"),
        (["--mtu", "1400"], "has that for all its VMs"),
        (["--metrics", "127.0.0.1:9600"], "has that for all its VMs"),
        (["--nat-ports", "61000-62000"], "has that for all its VMs"),
        (["--allow", "0.0.0.0/0"], "policies by name"),
        (["--host-loopback", "80"], "policies by name"),
        (["--on-exit", "keep"], "removes the VM when"),
    ] {
        let error = joined(&[&["--tap", "tap0"], &typed[..]].concat()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(part) && error.contains(typed[0]), "{error}");
    }
}
