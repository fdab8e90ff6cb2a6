use std::net::Ipv4Addr;

use clap::{CommandFactory as _, FromArgMatches as _};
use slipgate_broker::config::from_disk;
use slipgate_policy::{
    Action, Resolvers as Asked,
    document::{CliOverrides, LoadedPolicies},
};

use super::*;
use crate::args::{Command, CommandLine};

/// Overrides that consist of rules only.
fn by(rules: &[RuleFlag]) -> CliOverrides {
    CliOverrides {
        rules: rules.to_vec(),
        ..CliOverrides::default()
    }
}

/// The configuration that a command line makes, or the error's text.
pub(crate) fn config(flags: &str) -> Result<Config, String> {
    let words = ["slipgate", "attach"]
        .into_iter()
        .chain(flags.split_whitespace());
    let matches = CommandLine::command()
        .try_get_matches_from(words)
        .map_err(|e| e.to_string())?;
    let typed = CommandLine::from_arg_matches(&matches).map_err(|e| e.to_string())?;
    let Command::Attach(args) = typed.command else {
        panic!("not attach");
    };
    let attach = matches.subcommand_matches("attach").expect("attach");
    super::attach(&args, rule_flags(attach)).map_err(|e| e.to_string())
}

#[track_caller]
fn refused(flags: &str, parts: &[&str]) {
    let error = config(flags).expect_err(flags);
    for part in parts {
        assert!(
            error.contains(part),
            "{flags}\n  says {error:?}\n  not {part:?}"
        );
    }
}

#[test]
fn one_tap_and_nothing_else_is_enough() {
    let c = config("--tap tap0").unwrap();
    assert_eq!(c.vms.len(), 1);
    assert_eq!(
        (c.vms[0].name.as_str(), c.vms[0].tap.as_str()),
        ("tap0", "tap0")
    );
    assert_eq!(c.vms[0].ip, Ipv4Addr::new(10, 0, 2, 15));
    assert_eq!(c.network.gateway, Ipv4Addr::new(10, 0, 2, 2));
    assert_eq!(c.network.dns, Ipv4Addr::new(10, 0, 2, 3));
    assert_eq!(c.nat_ports, 61_000..=65_535);
    assert_eq!(c.flow_table, 65_536);
    assert_eq!((c.max_vms, c.max_rules), (4_096, 4_096));
    assert!(c.flags.default.is_none() && c.flags.rules.is_empty() && c.forwards.is_empty());
}

#[test]
fn a_vm_has_all_that_was_said_of_it() {
    let c = config("--vm name=a,tap=tap0,mac=52:54:00:12:34:56,ip=10.0.2.77,max-flows=9 --tap t1")
        .unwrap();
    assert_eq!(c.vms.len(), 2);
    assert_eq!(c.vms[0].mac, Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
    assert_eq!(
        (c.vms[0].ip, c.vms[0].limits.max_flows),
        (Ipv4Addr::new(10, 0, 2, 77), 9)
    );
    assert_eq!(c.vms[1].name, "t1");
}

#[test]
fn a_vm_that_cannot_be_names_the_flag_the_value_and_the_remedy() {
    refused("", &["--vm", "--tap IF"]);
    refused("--vm name=a", &["--vm name=a", "no TAP", "tap=IF"]);
    refused("--vm a,tap=tap0", &["\"a\" is not KEY=VALUE"]);
    refused("--vm tap=tap0,colour=red", &["\"colour\"", "max-flows"]);
    refused("--vm tap=tap0,tap=tap1", &["tap is given twice"]);
    refused("--vm tap=a/b", &["\"a/b\"", "ip link"]);
    refused("--tap sgport7", &["--tap sgport7", "own devices"]);
    refused("--vm name=a,tap=sgport0", &["own devices", "sgvm0"]);
    refused("--tap ü0", &["\"ü0\" can't be a name", "name=NAME,tap=ü0"]);
    assert_eq!(config("--vm name=a,tap=ü0").unwrap().vms[0].tap, "ü0");
    refused("--vm tap=abcdefghijklmnop", &["1 to 15"]);
    refused("--vm name=a*,tap=tap0", &["\"a*\" can't be a name"]);
    refused(
        "--vm tap=tap0,mac=01:00:00:00:00:01",
        &["not the MAC of one device"],
    );
    refused(
        "--vm tap=tap0,mac=52:54:00:12:34",
        &["not the MAC of one device"],
    );
    refused("--vm tap=tap0,max-flows=0", &["max-flows=0"]);
    refused(
        "--vm tap=tap0,ip=10.0.3.1",
        &[
            "outside the gateway's network 10.0.2.0/24",
            "10.0.2.1 to 10.0.2.254",
        ],
    );
    refused(
        "--vm name=a,tap=tap0 --vm name=a,tap=tap1",
        &["name a is taken"],
    );
    refused(
        "--vm name=a,tap=tap0 --tap tap0",
        &["--tap tap0", "another VM's"],
    );
    refused(
        "--tap tap0 --uplink tap0",
        &["--uplink tap0", "TAP of tap0"],
    );
}

#[test]
fn the_guests_network_holds_together() {
    let c = config("--tap t --gateway 192.168.7.1 --guest-ip 192.168.7.3 --prefix 29").unwrap();
    assert_eq!(c.network.dns, Ipv4Addr::new(192, 168, 7, 2));
    let c = config("--tap t --gateway 192.168.7.1 --guest-ip 192.168.7.2 --prefix 30").unwrap();
    assert_eq!(
        c.network.dns, c.network.gateway,
        "there is no third address in a /30"
    );

    let c = config("--tap t --guest-ip 10.0.2.3").unwrap();
    assert_eq!(
        c.network.dns,
        Ipv4Addr::new(10, 0, 2, 4),
        "the guest's own address is not it"
    );

    refused(
        "--tap t --guest-ip 10.0.2",
        &["--guest-ip 10.0.2", "10.0.2.15"],
    );
    refused("--tap t --guest-ip 10.9.2.15", &["--guest-ip", "outside"]);
    refused(
        "--tap t --guest-ip 10.0.2.2",
        &["--guest-ip", "gateway's address"],
    );
    refused("--vm tap=t,ip=10.0.2.3", &["--vm 10.0.2.3", "DNS server's"]);
    refused(
        "--tap t --guest-ip 10.0.2.255",
        &["--guest-ip", "last address"],
    );
    refused(
        "--tap t --gateway 224.0.0.1",
        &["--gateway", "not a unicast"],
    );
    refused("--tap t --prefix 31", &["--prefix", "31", "1..=30"]);
    refused("--tap t --mtu 500", &["--mtu", "500", "576"]);
}

#[test]
fn rules_keep_the_order_typed_across_flags() {
    let c = config("--tap t --deny 192.0.2.1 --allow 192.0.2.0/24 --deny-file f --deny 0.0.0.0/0 --allow 198.51.100.7:443/tcp").unwrap();
    let deny = |t: &str| RuleFlag::Match(Action::Deny, t.into());
    let allow = |t: &str| RuleFlag::Match(Action::Allow, t.into());
    assert_eq!(
        c.flags.rules,
        [
            deny("192.0.2.1"),
            allow("192.0.2.0/24"),
            RuleFlag::DenyFile("f".into()),
            deny("0.0.0.0/0"),
            allow("198.51.100.7:443/tcp"),
        ]
    );
    refused(
        "--tap t --allow exa$mple",
        &["--allow exa$mple", "no label", "CIDR or NAME"],
    );
    refused(
        "--tap t --deny 192.0.2.0/24:90-80",
        &["--deny 192.0.2.0/24:90-80"],
    );
}

#[test]
fn forwards_are_one_per_port_and_know_their_vm() {
    let c = config("--tap t --forward tcp:8080:80 --forward tcp:127.0.0.1:9000-9002:7000-7002 --forward udp:5353:53").unwrap();
    assert_eq!(c.forwards.len(), 5);
    assert_eq!(
        (
            c.forwards[0].protocol,
            c.forwards[0].host_port,
            c.forwards[0].guest_port
        ),
        (6, 8080, 80)
    );
    assert_eq!(c.forwards[0].host, Ipv4Addr::UNSPECIFIED);
    assert_eq!(
        (
            c.forwards[3].host,
            c.forwards[3].host_port,
            c.forwards[3].guest_port
        ),
        (Ipv4Addr::LOCALHOST.into(), 9002, 7002)
    );
    assert_eq!(c.forwards[4].protocol, 17);

    let two = "--vm name=a,tap=t0 --vm name=b,tap=t1";
    let c = config(&format!("{two} --forward b=tcp:8080:80")).unwrap();
    assert_eq!(c.forwards[0].vm, 1);
    refused(
        &format!("{two} --forward tcp:8080:80"),
        &["several VMs", "a=tcp:8080:80"],
    );
    refused(
        &format!("{two} --forward c=tcp:8080:80"),
        &["no VM \"c\"", "a, b"],
    );
    refused("--tap t --forward sctp:1:1", &["\"sctp\"", "tcp:8080:80"]);
    refused("--tap t --forward tcp:80", &["not PROTOCOL:"]);
    refused("--tap t --forward tcp:0:80", &["\"0\" is no port"]);
    refused("--tap t --forward tcp:70000:80", &["\"70000\""]);
    refused("--tap t --forward tcp:1-3:1-2", &["3 host ports lead to 2"]);
    refused(
        "--tap t --forward tcp:8080:80 --forward tcp:127.0.0.1:8080:81",
        &["8080", "already"],
    );
    refused("--tap t --forward tcp:61000:80", &["--nat-ports", "61000"]);
}

#[test]
fn the_rest_has_limits_too() {
    let c = config(
        "--tap t --dns 192.0.2.53 --dns 2001:db8::53 --dns [2001:db8::54]:5353 --nat-address 198.51.100.1",
    )
    .unwrap();
    let resolvers =
        ["192.0.2.53:53", "[2001:db8::53]:53", "[2001:db8::54]:5353"].map(|a| a.parse().unwrap());
    let asked = |flags: &str| config(flags).unwrap().flags.resolvers().unwrap();
    assert_eq!(
        c.flags.resolvers().unwrap(),
        Some(Asked::These(resolvers.into()))
    );
    assert_eq!(asked("--tap t"), None);
    assert_eq!(asked("--tap t --dns none"), Some(Asked::Nobody));
    refused(
        "--tap t --dns none --dns 192.0.2.53",
        &["--dns none", "alone"],
    );
    assert_eq!(c.nat_address, Some(Ipv4Addr::new(198, 51, 100, 1)));
    refused("--tap t --dns resolver", &["--dns resolver", "192.0.2.53"]);
    for of_a_link in ["fe80::1", "fe80::1%eth0", "[fe80::1%2]:53"] {
        let flags = format!("--tap t --dns {of_a_link}");
        refused(&flags, &[of_a_link, "of one link", "global"]);
    }
    refused(
        "--tap t --nat-ports 65000",
        &["--nat-ports 65000", "61000-65535"],
    );
    refused("--tap t --eim-ports 9-5", &["--eim-ports 9-5"]);
    refused(
        "--tap t --eim-ports 60000-61000",
        &[
            "--eim-ports 60000-61000",
            "overlaps --nat-ports 61000-65535",
        ],
    );
    refused(
        "--tap t --eim-ports 20000-20999 --forward tcp:20022:22",
        &["--eim-ports", "20022"],
    );
    refused("--tap t --nat-ports 9-5", &["--nat-ports 9-5"]);
    refused("--tap t --nat-address here", &["--nat-address here"]);
    refused(
        "--tap t --flow-table 1000",
        &["--flow-table 1000", "give 1024"],
    );
    refused(
        "--tap t --max-vms 65536",
        &["--max-vms 65536", "give 65535"],
    );
    refused("--tap t --max-vms 0", &["--max-vms 0", "give 1"]);
    refused(
        "--tap t --max-rules 300000",
        &["--max-rules 300000", "give 262144"],
    );
    refused("--tap t --max-rules 3", &["--max-rules 3", "give 16"]);
    refused(
        "--tap t --mode userspace",
        &["--mode userspace", "only `slipgate run`"],
    );
    refused("--tap t --mode fast", &["--mode", "fast", "hybrid"]);
    refused("--tap t --max-flows 0", &["--max-flows", "0"]);
}

#[test]
fn deny_files_are_read_and_compiled() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        &file,
        "192.0.2.0/24 # a comment\n\n198.51.100.0/24:443/tcp\n",
    )
    .unwrap();
    let rules = [RuleFlag::DenyFile(file.path().into())];
    let policies = LoadedPolicies::of(&by(&rules), None, &from_disk)
        .unwrap()
        .compile()
        .unwrap();
    let policy = policies.of(None);
    let to = |addr: &str, port| slipgate_policy::Destination {
        addr: addr.parse().unwrap(),
        port,
        protocol: slipgate_abi::Protocol::Tcp,
    };
    assert_eq!(policy.decide(to("192.0.2.7", 80)).line, Some(1));
    assert!(!policy.decide(to("198.51.100.7", 443)).is_allowed());
    assert!(policy.decide(to("198.51.100.7", 80)).is_allowed());

    std::fs::write(&file, "192.0.2.0/24\n192.0.2\n").unwrap();
    let error = LoadedPolicies::of(&by(&rules), None, &from_disk)
        .unwrap()
        .compile()
        .unwrap_err();
    let said = error.to_string();
    assert!(said.contains(":2: \"192.0.2\""), "{said}");
    assert_eq!(said.matches("is not an IPv4 address").count(), 1, "{said}");
    let missing = [RuleFlag::DenyFile("/nonexistent/deny".into())];
    let error = LoadedPolicies::of(&by(&missing), None, &from_disk).unwrap_err();
    assert!(
        format!("{error:#}").contains("--deny-file /nonexistent/deny"),
        "{error:#}"
    );
}

#[test]
fn the_flow_log_is_told_everything_or_what_was_asked_for() {
    let all = config("--tap tap0 --flow-log f").unwrap();
    assert_eq!(
        all.flow_log_events,
        [
            FlowLogEvent::FlowStart,
            FlowLogEvent::FlowEnd,
            FlowLogEvent::Dns,
            FlowLogEvent::Refused,
        ]
    );
    let some = config("--tap tap0 --flow-log f --flow-log-events dns,flow_end").unwrap();
    let wanted = [FlowLogEvent::Dns, FlowLogEvent::FlowEnd];
    assert_eq!(some.flow_log_events, wanted);
    let unknown = config("--tap tap0 --flow-log f --flow-log-events end").unwrap_err();
    assert!(unknown.contains("flow_end"), "{unknown}");
    let nowhere = config("--tap tap0 --flow-log-events dns").unwrap_err();
    assert!(nowhere.contains("--flow-log"), "{nowhere}");
}

#[test]
fn ipv6_is_off_unless_it_is_asked_for() {
    use slipgate_model::Ipv6Mode;
    let network = config("--tap t").unwrap().network;
    assert_eq!(network.ipv6, Ipv6Mode::Off);
    assert_eq!(network.ipv6_prefix.to_string(), "fd73:6c69:7067::/64");
    let network = config("--tap t --ipv6 nat --ipv6-prefix 2001:db8:7::/64")
        .unwrap()
        .network;
    assert_eq!(network.ipv6, Ipv6Mode::Nat);
    assert_eq!(network.ipv6_prefix.to_string(), "2001:db8:7::/64");
    assert_eq!(
        config("--tap t --ipv6 auto").unwrap().network.ipv6,
        Ipv6Mode::Auto
    );
    refused("--tap t --ipv6 on", &["--ipv6", "off", "nat", "auto"]);
    refused(
        "--tap t --ipv6-prefix fd00::/48",
        &["--ipv6-prefix", "fd00::/48", "64 bits"],
    );
    refused("--tap t --ipv6 nat --mtu 1279", &["--mtu", "1279", "1280"]);
    assert!(config("--tap t --ipv6 nat --mtu 1280").is_ok());
    // With `auto` such a link has none.
    assert!(config("--tap t --ipv6 auto --mtu 1000").is_ok());
}

#[test]
fn ipv6_prefixes_that_are_routed_are_shared_out() {
    use slipgate_model::Ipv6Mode;
    let prefixes = |line: &str| -> Vec<String> {
        let config = config(line).unwrap();
        assert_eq!(config.network.ipv6, Ipv6Mode::Routed);
        let vms = config.vms.iter();
        vms.map(|vm| vm.ipv6_prefix.unwrap().to_string()).collect()
    };
    let one = prefixes("--tap t --ipv6 routed:2001:db8:1::/64");
    assert_eq!(one, ["2001:db8:1::/64"]);
    let two = prefixes("--tap t --tap u --ipv6 routed:2001:db8::/62");
    let again = prefixes("--tap t --tap u --ipv6 routed:2001:db8::/62");
    assert_eq!(two, again);
    assert_ne!(two[0], two[1]);
    refused(
        "--tap t --tap u --ipv6 routed:2001:db8:1::/64",
        &[
            "routed:2001:db8:1::/64",
            "none is left for u",
            "shorter prefix",
        ],
    );
    refused("--tap t --ipv6 routed", &["--ipv6", "routed:PREFIX"]);
    let forwards = |one: &str| {
        let prefix = "--tap t --ipv6 routed:2001:db8:1::/64";
        format!("{prefix} --forward {one} --forward tcp:[2001:db8:1::9]:443:443")
    };
    refused(
        &forwards("tcp:own:443"),
        &[
            "2001:db8:1::9",
            "own address is open by tcp:own:443 already",
        ],
    );
    // The host's port is another one.
    let of_both = config(&forwards("tcp:443:80")).unwrap();
    assert_eq!(of_both.forwards.iter().filter(|f| f.is_own).count(), 1);
    let singles = prefixes("--tap t --tap u --ipv6 routed:2001:db8::8/126");
    assert_ne!(singles[0], singles[1]);
    for address in singles {
        assert!(["2001:db8::9/128", "2001:db8::a/128", "2001:db8::b/128"].contains(&&*address));
    }
    refused(
        "--tap t --tap u --ipv6 routed:2001:db8::9/128",
        &["routed:2001:db8::9/128", "address", "none is left for u"],
    );
    refused(
        "--tap t --ipv6 routed:2001:db8::/31",
        &["--ipv6", "32 bits or more"],
    );
    refused("--tap t --ipv6 routed:fe80::/64", &["--ipv6", "2000::/3"]);
    refused(
        "--tap t --ipv6 routed:2001:db8:1::/64 --mtu 1279",
        &["--mtu", "1279", "1280"],
    );
}

#[test]
fn a_directory_for_snapshots_is_absolute_and_text() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};
    let dir_of = |dir: &[u8]| {
        let words = ["slipgate", "serve", "--snapshot-dir"].map(OsStr::new);
        let words = words.into_iter().chain([OsStr::from_bytes(dir)]);
        let matches = CommandLine::command().try_get_matches_from(words).unwrap();
        let typed = CommandLine::from_arg_matches(&matches).unwrap();
        let Command::Serve(args) = typed.command else {
            panic!("not serve");
        };
        snapshot_dir(&args).map_err(|e| e.to_string())
    };
    assert_eq!(dir_of(b"/srv/s"), Ok(Some(PathBuf::from("/srv/s"))));
    for (dir, why) in [
        (&b"srv"[..], "no absolute path"),
        (b"/srv/\xff", "no UTF-8"),
    ] {
        let refused = dir_of(dir).unwrap_err();
        assert!(
            refused.contains("--snapshot-dir") && refused.contains(why),
            "{refused}"
        );
    }
}

#[test]
fn a_socket_of_the_api_is_a_daemons_or_user_modes() {
    refused(
        "--tap tap0 --api /run/a.sock",
        &["--api", "slipgate serve", "user mode"],
    );
    refused("--tap tap0 --api-read /run/a.sock", &["--api-read"]);
    let words = [
        "slipgate",
        "exec",
        "--api",
        "/run/a.sock,group=g",
        "--",
        "true",
    ];
    let matches = CommandLine::command().get_matches_from(words);
    let typed = CommandLine::from_arg_matches(&matches).unwrap();
    let Command::Exec(args) = typed.command else {
        panic!("not exec");
    };
    let sockets = exec(&args, Vec::new()).unwrap().nat.api;
    let shown = (sockets[0].group.as_deref(), sockets[0].may_change);
    assert_eq!(shown, (Some("g"), true));
}
