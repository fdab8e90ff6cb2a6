use slipgate_abi::IfIndex;
use slipgate_control::{host::SourceNat, netlink::Link};

use super::*;

fn args(nat_ports: Option<&str>, eim_ports: Option<&str>) -> DoctorArgs {
    DoctorArgs {
        uplink: None,
        nat_ports: nat_ports.map(Into::into),
        eim_ports: eim_ports.map(Into::into),
        nat_address: None,
        json: false,
        pin_dir: "/nonexistent".into(),
    }
}

fn network() -> Network {
    let mut network = Network::default();
    network
        .links
        .insert(Link::ethernet(IfIndex::new(2), "eth0"));
    network
}

/// A host that masquerades to these ports.
fn facts(first: u16, last: u16) -> HostFacts {
    let rule = SourceNat {
        table: "own".into(),
        chain: "out".into(),
        sees: [true, true],
        device: None,
        addresses: slipgate_control::host::Addresses::OfDevice,
        ports: Some(first..=last),
    };
    HostFacts {
        source_nat: Some(vec![rule]),
        ..HostFacts::default()
    }
}

#[test]
fn the_ports_are_those_of_the_flags_or_of_who_serves_or_the_default() {
    let network = network();
    // What is served is asked about without one.
    let uplink_of = |statuses: &[HostNatStatus]| statuses.is_empty().then_some("eth0");
    let seen = |args: &DoctorArgs, statuses: &[HostNatStatus], facts: &HostFacts| {
        let planned = Planned::parse(args).unwrap();
        let [found] = found(&planned, statuses, facts, (&network, uplink_of(statuses)))
            .try_into()
            .unwrap();
        found
    };
    let (default, other) = (
        args(None, None),
        args(Some("40000-49999"), Some("50000-50999")),
    );
    let at = |first, last| facts(first, last);
    assert_eq!(seen(&default, &[], &at(1_024, 60_999)).state, State::Ok);
    let met = seen(&default, &[], &at(61_000, 61_000));
    assert_eq!(met.state, State::Note, "{met:?}");
    assert!(met.remedy.unwrap().contains("a start is refused"));
    // Both ranges of the flags count, and the default does not.
    for (first, state) in [
        (40_000, State::Note),
        (50_999, State::Note),
        (51_000, State::Ok),
        (61_000, State::Ok),
    ] {
        let met = seen(&other, &[], &at(first, first));
        assert_eq!(met.state, state, "{first}: {met:?}");
    }
    // Who serves says it of its own ports, whatever the default ones meet.
    let serves = |shared: &[&str]| HostNatStatus {
        uplink: "eth1".into(),
        ports: vec![(20_000, 20_999)],
        is_known: true,
        shared: shared.iter().map(|it| (*it).to_owned()).collect(),
        further_uplinks: vec!["wg0".into()],
        left_alone: 12,
    };
    let found = seen(&default, &[serves(&[])], &at(61_000, 61_000));
    assert_eq!(found.state, State::Ok);
    assert!(found.found.contains("20000-20999") && found.found.contains("eth1"));
    let found = seen(&default, &[serves(&["the chain own out"])], &at(1, 1));
    assert_eq!(found.state, State::Note);
    assert!(found.found.contains("own out"), "{found:?}");
    assert!(found.remedy.unwrap().contains("leave 12 ports"));
    // Of another uplink, who serves says it if VMs leave by it.
    let asked = |uplink, shared: &[&str]| {
        let planned = Planned::parse(&default).unwrap();
        let (statuses, none) = (
            [serves(shared)],
            HostFacts {
                source_nat: Some(vec![]),
                ..HostFacts::default()
            },
        );
        let [found] = super::found(&planned, &statuses, &none, (&network, Some(uplink)))
            .try_into()
            .unwrap();
        found
    };
    let by_wg0 = asked("wg0", &[]).found;
    assert!(by_wg0.contains("20000-20999") && by_wg0.contains("serves by wg0"));
    let of_a_start = asked("eth0", &["the chain own out"]);
    assert_eq!(of_a_start.state, State::Ok);
    assert!(
        of_a_start.found.contains("61000-65535 at eth0"),
        "{of_a_start:?}"
    );
    assert!(of_a_start.found.contains("serves here leaves by eth1"));
    // Flags are about a start that is planned.
    let found = {
        let (planned, statuses) = (
            Planned::parse(&other).unwrap(),
            [serves(&["the chain own out"])],
        );
        let [found] = super::found(&planned, &statuses, &at(1, 1), (&network, Some("eth0")))
            .try_into()
            .unwrap();
        found
    };
    assert_eq!(found.state, State::Ok, "{found:?}");
    assert!(
        found.found.contains("40000-49999, 50000-50999"),
        "{found:?}"
    );
}

#[test]
fn ports_and_addresses_that_are_none_are_refused() {
    for (flag, args) in [
        ("--nat-ports", args(Some("70000"), None)),
        ("--eim-ports", args(None, Some("5-1"))),
        (
            "--nat-address",
            DoctorArgs {
                nat_address: Some("eth0".into()),
                ..args(None, None)
            },
        ),
    ] {
        let error = Planned::parse(&args).unwrap_err().to_string();
        assert!(error.contains(flag), "{error}");
    }
}
