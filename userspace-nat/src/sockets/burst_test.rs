use std::net::Ipv4Addr;

use super::{
    super::path_mtu::IfTooLong::{InFragments, Refused},
    *,
};

fn flow(port: u16) -> FlowTuple {
    FlowTuple {
        scope: FlowTuple::WORLD,
        local: Ipv4Addr::new(192, 0, 2, 1).into(),
        remote: Ipv4Addr::new(198, 51, 100, 7).into(),
        local_port: port,
        remote_port: 53,
        protocol: 17,
    }
}

fn of(lens: &[usize]) -> Burst {
    let mut burst = Burst::default();
    for &len in lens {
        assert!(
            burst.is_empty() || burst.takes(1, len, Refused),
            "{len} of {lens:?}"
        );
        burst.push(1, flow(1), &vec![len as u8; len], Refused);
    }
    burst
}

#[test]
fn datagrams_of_one_length_and_a_shorter_one_leave_together() {
    let burst = of(&[22, 22, 7]);
    let sent = burst.waiting().unwrap();
    assert_eq!((sent.key, sent.each, sent.payload.len()), (1, Some(22), 51));
    assert!(sent.payload[..44].iter().all(|byte| *byte == 22));
    assert_eq!(sent.payload[44..], [7; 7]);
    assert_eq!(of(&[22]).waiting().unwrap().each, None, "it is one");
}

#[test]
fn what_would_not_come_out_as_it_was_begins_the_next_burst() {
    assert!(!of(&[22]).takes(1, 23, Refused), "longer");
    assert!(!of(&[22, 7]).takes(1, 7, Refused), "behind a shorter one");
    assert!(!of(&[22]).takes(2, 22, Refused), "of another flow");
    assert!(
        !of(&[22]).takes(1, 22, InFragments),
        "what may be fragmented"
    );
    assert!(
        !of(&[22; MOST]).takes(1, 22, Refused),
        "more than the kernel takes"
    );
    let whole = MOST_BYTES / 1_472;
    assert!(
        !of(&vec![1_472; whole]).takes(1, 1_472, Refused),
        "too long in all"
    );
    for (version, longest) in [(Version::V4, 1_472), (Version::V6, 1_452)] {
        assert!(Burst::is_for(version, 1) && Burst::is_for(version, longest));
        assert!(!Burst::is_for(version, 0) && !Burst::is_for(version, longest + 1));
    }
}

#[test]
fn after_it_was_sent_nothing_waits() {
    let mut burst = of(&[22, 7]);
    burst.clear();
    assert!(burst.is_empty() && burst.waiting().is_none());
    burst.push(2, flow(2), &[1; 9], Refused);
    assert!(burst.takes(2, 9, Refused) && !burst.takes(1, 9, Refused));
}
