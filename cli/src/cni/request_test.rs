use serde_json::json;

use super::*;
use crate::cni::answer::Address;

const CONFIG: &str = r#"{"cniVersion": "1.1.0", "name": "vms", "type": "slipgate"}"#;

fn read(variables: &[(&str, &str)], config: &str) -> Result<Request, (String, Failure)> {
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    Request::of(&variables.iter().map(owned).collect(), config)
}

fn add(container: &str, ifname: &str, args: &str) -> Result<Attachment, Failure> {
    let variables = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", container),
        ("CNI_IFNAME", ifname),
        ("CNI_ARGS", args),
    ];
    match read(&variables, CONFIG)
        .map_err(|(_, failure)| failure)?
        .command
    {
        Command::Add(attachment) => Ok(attachment),
        other => panic!("{other:?}"),
    }
}

#[test]
fn names_fit_and_differ_for_each_attachment() {
    let id = "a".repeat(64);
    let all = [
        ("web1", "eth0", "vms"),
        ("web1", "eth1", "vms"),
        ("web2", "eth0", "vms"),
        (&id, "eth0", "vms"),
        (&id, "eth1", "vms"),
        (&id, "eth0", "other"),
        ("web1", "eth+", "vms"),
    ];
    let mut names = Vec::new();
    for (container, ifname, network) in all {
        let attachment = add(container, ifname, "").unwrap();
        let (vm, tap) = (attachment.vm(network), attachment.tap(network));
        assert!(vm.len() <= MAX_NAME && tap.len() <= 15, "{vm} {tap}");
        slipgate_broker::config::check_tap("tap", &tap, &tap).unwrap();
        let mac = attachment.suggested_mac(network);
        slipgate_broker::config::parse_mac("mac", &mac, &mac).unwrap();
        assert!(!names.contains(&vm) && !names.contains(&tap) && !names.contains(&mac));
        names.extend([vm, tap, mac]);
    }
    assert_eq!(names[0], "web1.eth0");
}

#[test]
fn what_a_runtime_says_of_one_attachment_beats_the_networks() {
    let config = r#"{"cniVersion": "1.0.0", "name": "vms", "mac": "52:54:00:00:00:01",
        "ip": "10.0.2.20", "runtimeConfig": {"mac": "52:54:00:00:00:02", "ips": ["10.0.2.21/24"]}}"#;
    let config = read(&[("CNI_COMMAND", "STATUS")], config).unwrap().config;
    let plain = add("a", "eth0", "").unwrap();
    assert_eq!(plain.mac(&config).unwrap(), "52:54:00:00:00:02");
    assert_eq!(
        plain.ip(&config).unwrap(),
        Some(Ipv4Addr::new(10, 0, 2, 21))
    );
    let args = "IgnoreUnknown=1;MAC=52:54:00:00:00:03;IP=10.0.2.22;TC_REDIRECT_TAP_UID=123;\
                K8S_POD_NAME=web;X=y";
    let told = add("a", "eth0", args).unwrap();
    assert_eq!(told.mac(&config).unwrap(), "52:54:00:00:00:03");
    assert_eq!(told.ip(&config).unwrap(), Some(Ipv4Addr::new(10, 0, 2, 22)));
    assert_eq!(told.args.user, Some(123));
    assert_eq!(told.args.labels["k8s.pod"], "web");
}

#[test]
fn what_can_not_be_meant_is_refused_by_the_specifications_codes() {
    let of = |variables: &[(&str, &str)], config: &str| read(variables, config).unwrap_err().1;
    let status = [("CNI_COMMAND", "STATUS")];
    for (config, code) in [
        ("{", code::DECODE),
        (
            r#"{"cniVersion": "1.1.0", "polcy": "closed"}"#,
            code::DECODE,
        ),
        (r#"{"cniVersion": "2.0.0", "name": "vms"}"#, code::VERSION),
        (r#"{"name": "vms"}"#, code::VERSION),
        (
            r#"{"cniVersion": "1.1.0", "name": "vms", "ipam": {"type": "host-local"}}"#,
            code::CONFIG,
        ),
    ] {
        assert_eq!(of(&status, config).code, code, "{config}");
    }
    assert_eq!(of(&[], CONFIG).code, code::ENVIRONMENT);
    assert_eq!(
        of(&[("CNI_COMMAND", "FLY")], CONFIG).code,
        code::ENVIRONMENT
    );
    for (container, ifname, args) in [
        ("", "eth0", ""),
        ("../etc", "eth0", ""),
        ("a/b", "eth0", ""),
        ("a", "", ""),
        ("a", "eth0/1", ""),
        ("a", "a-name-of-16-byt", ""),
        ("a", "eth0", "MAC"),
        ("a", "eth0", "COLOUR=red"),
    ] {
        let failure = add(container, ifname, args).unwrap_err();
        assert_eq!(
            failure.code,
            code::ENVIRONMENT,
            "{container} {ifname} {args}"
        );
    }
    // The specification's own keys are taken.
    let all = r#"{"cniVersion": "1.1.0", "name": "vms", "type": "slipgate", "disableGC": true,
        "capabilities": {"mac": true}, "cni.dev/valid-attachments": [], "ipam": {}, "dns": {}}"#;
    assert_eq!(
        read(&[("CNI_COMMAND", "GC")], all)
            .unwrap()
            .valid_attachments(),
        Ok(vec![])
    );
}

#[test]
fn a_result_has_the_form_of_its_version() {
    let address = Address {
        tap: "sg0".into(),
        mac: "02:00:00:00:00:01".into(),
        ip: Ipv4Addr::new(10, 0, 2, 15),
        mtu: 1500,
        network: slipgate_ipc::client::GuestNetwork {
            guest: Ipv4Addr::new(10, 0, 2, 15),
            prefix_len: 24,
            gateway: Ipv4Addr::new(10, 0, 2, 2),
            dns: Ipv4Addr::new(10, 0, 2, 3),
            mtu: None,
        },
    };
    let result = address.to_result("1.1.0", "sg0", "web1", "/run/netns/a");
    let expected = json!({
        "cniVersion": "1.1.0",
        "interfaces": [
            {"name": "sg0", "mac": "02:00:00:00:00:01", "mtu": 1500, "sandbox": "web1"},
            {"name": "sg0", "mtu": 1500, "sandbox": "/run/netns/a"},
        ],
        "ips": [{"address": "10.0.2.15/24", "gateway": "10.0.2.2", "interface": 0}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.2.2"}],
        "dns": {"nameservers": ["10.0.2.3"]},
    });
    assert_eq!(result, expected);
    let older = address.to_result("0.4.0", "sg0", "web1", "/run/netns/a");
    assert_eq!(older["ips"][0]["version"], "4");
    assert!(older["interfaces"][0].get("mtu").is_none());
}

#[test]
fn a_networks_label_is_one_that_the_daemon_takes() {
    let long = "n".repeat(300);
    let names = ["pods", "pods-", "-", "\u{e9}", "a b", "", &long, "pods_"];
    let labels: Vec<String> = names.iter().map(|name| short(name)).collect();
    for (name, label) in names.iter().zip(&labels) {
        check_label("name", "network", label).unwrap_or_else(|e| panic!("{name:?}: {e}"));
    }
    assert_eq!(labels[0], "pods");
    let distinct: std::collections::BTreeSet<_> = labels.iter().collect();
    assert_eq!(distinct.len(), names.len(), "{labels:?}");
}

#[test]
fn port_mappings_are_forwards() {
    let forwards = |mappings: serde_json::Value| {
        let config = json!({
            "cniVersion": "1.1.0",
            "name": "vms",
            "runtimeConfig": { "portMappings": mappings },
        });
        let request = read(&[("CNI_COMMAND", "STATUS")], &config.to_string()).unwrap();
        request.config.forwards().map_err(|failure| failure.msg)
    };
    let mappings = json!([
        { "hostPort": 8080, "containerPort": 80, "protocol": "tcp" },
        { "hostPort": 5353, "containerPort": 53, "protocol": "UDP", "hostIP": "192.0.2.1" },
        { "hostPort": 8081, "containerPort": 81, "hostIP": "0.0.0.0" },
        { "hostPort": 8082, "containerPort": 82, "hostIP": "2001:db8::1" },
        { "hostPort": 0, "containerPort": 82, "protocol": "sctp" },
        // As containerd writes it.
        { "HostPort": 8083, "ContainerPort": 83, "Protocol": "tcp", "HostIP": "" },
    ]);
    assert_eq!(
        forwards(mappings).unwrap(),
        [
            "tcp:8080:80",
            "udp:192.0.2.1:5353:53",
            "tcp:8081:81",
            "tcp:[2001:db8::1]:8082:82",
            "tcp:8083:83"
        ]
    );
    assert!(forwards(serde_json::Value::Null).unwrap().is_empty());
    for (key, given) in [("protocol", "sctp"), ("hostIP", "fe80::1%eth0")] {
        let mut mapping = json!({ "hostPort": 1, "containerPort": 1 });
        mapping[key] = given.into();
        let error = forwards(json!([mapping])).unwrap_err();
        assert!(error.contains(key) && error.contains(given), "{error}");
    }
}
