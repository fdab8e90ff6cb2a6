use super::*;

fn tuple(local: &str, remote: &str, protocol: u8) -> FlowTuple {
    FlowTuple {
        scope: 7,
        local: local.parse().unwrap(),
        remote: remote.parse().unwrap(),
        local_port: 1,
        remote_port: 2,
        protocol,
    }
}

#[test]
fn a_tuple_survives_its_key_in_either_family() {
    let v4 = tuple("10.0.2.15", "198.51.100.7", 6);
    let v6 = tuple("fd00::5", "2001:db8::7", 6);
    match (v4.key(), v6.key()) {
        (Some(TupleKey::V4(four)), Some(TupleKey::V6(six))) => {
            assert_eq!((FlowTuple::from(four), FlowTuple::from(six)), (v4, v6));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(tuple("10.0.2.15", "2001:db8::7", 6).key(), None);
}

#[test]
fn each_family_has_its_own_icmp() {
    let protocol = |local, protocol| tuple(local, local, protocol).protocol();
    for (local, other, own) in [("10.0.2.15", 58, 1), ("fd00::5", 1, 58)] {
        assert_eq!(protocol(local, own), Some(Protocol::Icmp));
        assert_eq!(protocol(local, other), None, "{local}");
        assert_eq!(protocol(local, 6), Some(Protocol::Tcp));
        let number = FlowTuple::number(local.parse().unwrap(), Protocol::Icmp);
        assert_eq!(number, own);
    }
}
