use std::net::UdpSocket;

use slipgate_abi::IfIndex;
use slipgate_control::netlink::Link;

use super::*;

#[test]
fn a_report_says_what_is_missing_and_what_to_do() {
    let findings = [
        Finding::ok("kernel", "6.18"),
        Finding::ok("uplink", "none").with(State::Missing, "add a default route"),
        Finding::ok("firewall", "inet filter forward").with(State::Note, "use --deny"),
    ];
    let text = report(&findings);
    assert!(text.contains("ok       kernel    6.18\n"), "{text}");
    assert!(text.contains("MISSING  uplink    none\n"), "{text}");
    assert!(text.contains("-> add a default route\n"), "{text}");
    assert!(text.contains("can't run here yet"), "{text}");
    assert!(report(&findings[..1]).contains("can run here."));
    assert!(!text.contains("User mode can"), "{text}");
    let user_mode = Finding::ok(user_mode::WHAT, "it can serve VMs");
    let text = report(&[&findings[..], &[user_mode]].concat());
    assert!(text.contains("User mode can"), "{text}");
}

#[test]
fn what_the_binary_was_built_without_is_told() {
    let real: Option<String> = None;
    assert_eq!(stub_found("BPF programs", State::Missing, real), None);
    let stub = Some("built without".to_owned());
    let finding = stub_found("BPF programs", State::Missing, stub).unwrap();
    assert_eq!(finding.state, State::Missing);
    assert_eq!(finding.found, "built without");
}

#[test]
fn an_uplink_that_is_not_there_is_named() {
    let finding = &network_found(Some("nosuchdev0"), |_| Vec::new())[0];
    assert_eq!(finding.state, State::Missing);
    assert!(finding.found.contains("nosuchdev0"));
}

#[test]
fn an_uplink_s_offloads_are_told() {
    // Loopback always has it.
    let finding = offloads("lo");
    assert_eq!(finding.what, "offloads");
    assert_eq!(finding.state, State::Ok, "{finding:?}");
}

#[test]
fn kvm_is_looked_at_for_those_who_run_vms() {
    let gone = KvmUnavailable {
        why: std::io::ErrorKind::NotFound.into(),
        remedy: "load the module",
    };
    let missing = kvm_found(Err(gone));
    // NAT for others' VMs needs none.
    assert_eq!(missing.state, State::Note);
    assert!(missing.remedy.unwrap().ends_with("load the module"));
    let another = fs::File::open("/dev/null").unwrap();
    let another = kvm_found(Ok(another.into()));
    assert_eq!(another.state, State::Note);
    assert!(another.found.contains("is it /dev/kvm?"), "{another:?}");
    if let Ok(kvm) = kvm::open() {
        assert_eq!(kvm_found(Ok(kvm.into())).state, State::Ok);
    }
}

#[test]
fn without_a_resolver_that_can_be_asked_dns_is_named() {
    // An address of its own: another test may get the port at the usual one.
    let unused = UdpSocket::bind("127.81.0.1:0").unwrap();
    let address = unused.local_addr().unwrap();
    assert_eq!(resolvers_found(&[address]).state, State::Ok);
    drop(unused);
    for resolvers in [&[address][..], &[]] {
        let finding = resolvers_found(resolvers);
        assert_eq!(finding.state, State::Note, "{finding:?}");
        assert!(finding.remedy.unwrap().contains("--dns"));
    }
}

#[test]
fn the_loopback_is_no_uplink() {
    let findings = network_found(Some("lo"), |_| Vec::new());
    assert_eq!(findings[0].state, State::Missing, "{findings:?}");
}

#[test]
fn taps_are_told_with_who_can_open_them_and_engine_ports_are_not() {
    let mut network = Network::default();
    for (index, name) in [(5, "tap0"), (6, "sgport1")] {
        let link = Link {
            kind: Some("tun".into()),
            is_multi_queue_tap: Some(true),
            ..Link::ethernet(IfIndex::new(index), name)
        };
        network.links.insert(link);
    }
    let found: Vec<_> = taps_found(&network).collect();
    assert_eq!(found.len(), 1);
    assert!(found[0].found.starts_with("tap0: made with multi_queue"));
    assert_eq!(found[0].state, State::Ok);
}

#[test]
fn the_room_is_told_and_advice_comes_when_little_is_left() {
    let sizes = Sizes {
        slots: 1_024,
        vms: 80,
        rules: 90,
    };
    let roomy = room(sizes, 3, 12, 7);
    assert_eq!(
        roomy.found,
        "3 of 80 VMs, 12 of 90 places for rules used so far, 7 of 1024 flows"
    );
    assert_eq!(roomy.state, State::Ok);
    let remedy = |vms, flows| room(sizes, vms, 90, flows).remedy.unwrap_or_default();
    assert!(remedy(75, 7).contains("give --max-vms more"));
    assert!(remedy(3, 1_000).contains("give --flow-table more"));
    assert!(remedy(80, 1_024).contains("--max-vms and --flow-table"));
    assert_eq!(remedy(69, 800), "");
}
