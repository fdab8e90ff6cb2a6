//! Forwards: flows that the world opens.
use slipgate_abi::{DropReason, Ip6, Protocol, Refusal, RuleIndex, VmRow};

use super::*;
use crate::{clock::SECOND_NS, datapath::Tables as _, ndp, state::Forward};

const PORT: u16 = 8_080;

/// A rig whose host's port leads to VM 1, by either family.
pub(super) fn with_forwards() -> Rig {
    let forward = |host: IpAddr, protocol| Forward {
        protocol,
        host,
        host_port: PORT,
        vm: VmId::new(101),
        vm_row: VmRow::new(1),
        guest_port: 80,
        rule: RuleIndex::new(12),
        is_own: false,
    };
    let any = families().map(|family| match family.version {
        Version::V4 => IpAddr::from([0; 4]),
        Version::V6 => IpAddr::from([0; 16]),
    });
    let forwards = any
        .into_iter()
        .flat_map(|host| [Protocol::Tcp, Protocol::Udp].map(|protocol| forward(host, protocol)));
    let rig = Rig::with(Setup {
        forwards: forwards.collect(),
        ..setup()
    });
    {
        let mut kernel = rig.kernel.borrow_mut();
        for protocol in [6, 17] {
            kernel.forwards.insert((NAT, PORT, protocol), (1, 101));
            let key = (Ip6::from(NAT6), PORT, protocol);
            kernel.forwards6.insert(key, (1, 101));
        }
    }
    rig
}

#[test]
fn a_client_opens_a_flow_that_the_kernel_translates() {
    for family in families() {
        let mut rig = with_forwards();
        let (client, host, guest) = (
            (family.peer, 50_000),
            (family.nat, PORT),
            (family.guest, 80),
        );
        for opener in [syn(client, host, 5), udp(client, host, b"x")] {
            rig.world(&opener);
            let (vm, came) = rig.at_guest().pop().expect("it comes in");
            let came = read(&came);
            assert_eq!(
                (vm, came.ip.source, came.ip.destination),
                (101, family.peer, family.guest),
                "{family:?}"
            );
            assert_eq!(came.transport.ports(), Some((50_000, 80)));
        }
        assert_eq!(
            rig.guest(1, &syn_ack(guest, client, 700, 6)),
            Handling::Fast
        );
        let sent = rig.at_world().pop().expect("the answer goes out");
        assert_eq!(read(&sent).ip.source, family.nat);
        assert_eq!(rig.world(&udp(client, host, b"y")), Handling::Fast);
        assert_eq!(rig.flows(), 2);
        rig.assert_paired();
        // A SYN of the guest's to the client is a connection of its own.
        rig.guest(1, &syn(guest, client, 9));
        let own = rig.at_world().pop().expect("it is let out");
        assert_ne!(read(&own).transport.ports().unwrap().0, PORT);
        rig.pass(8_000 * SECOND_NS);
        rig.assert_empty();
    }
}

#[test]
fn whom_a_forward_lets_in_is_judged_by_the_same_spaces() {
    for family in families() {
        let mut rig = with_forwards();
        let own = match family.version {
            Version::V4 => "10.0.2.77".parse().unwrap(),
            Version::V6 => "fd00:0:0:2::77".parse().unwrap(),
        };
        for from in [own, family.nat] {
            rig.world(&syn((from, 50_000), (family.nat, PORT), 5));
        }
        assert_eq!(rig.refused(1, Refusal::Protected), 2, "{family:?}");
        // A host that is not the forward's.
        rig.world(&syn((family.peer, 50_000), (family.peer, PORT), 5));
        assert_eq!(rig.flows(), 0);
        assert!(rig.at_guest().is_empty());
    }
}

#[test]
fn a_flood_of_forged_openers_leaves_the_guest_its_own_part() {
    for family in families() {
        let mut rig = with_forwards();
        for port in 0..20_000 {
            rig.world(&syn((family.peer, 1_000 + port), (family.nat, PORT), 5));
        }
        rig.at_guest();
        assert!(
            rig.refused(1, Refusal::FlowRate) + rig.refused(1, Refusal::FlowCap) > 0
                || rig.dropped(1, DropReason::NoCredit) > 0,
            "{family:?}"
        );
        rig.guest(1, &syn((family.guest, 40_000), family.server(), 7));
        assert_eq!(rig.at_world().len(), 1, "{family:?}: the guest's own");
    }
}

#[test]
fn by_ipv6_a_flow_leads_to_the_address_that_the_guest_used_last() {
    let [_, family] = families();
    let mut rig = with_forwards();
    let (client, host) = ((family.peer, 50_000), (family.nat, PORT));
    let row = rig.engine.core.nat.datapath.vm6(VmRow::new(1)).unwrap();
    let second = "fd00:0:0:2::99".parse().unwrap();
    let now_ns = rig.kernel.borrow().now_ns;
    ndp::addresses::bind(row, second, now_ns + 1);
    rig.world(&udp(client, host, b"x"));
    let (_, came) = rig.at_guest().pop().unwrap();
    assert_eq!(read(&came).ip.destination, IpAddr::from(second));
    // A live flow stays where it is.
    ndp::addresses::bind(row, GUEST6, now_ns + 2);
    rig.world(&udp(client, host, b"y"));
    let (_, came) = rig.at_guest().pop().unwrap();
    assert_eq!(read(&came).ip.destination, IpAddr::from(second));
    rig.world(&udp((family.peer, 50_001), host, b"x"));
    let (_, came) = rig.at_guest().pop().unwrap();
    assert_eq!(read(&came).ip.destination, family.guest);
}

#[test]
fn while_no_address_is_bound_a_client_by_ipv6_is_refused_and_counted() {
    let [_, family] = families();
    let mut rig = with_forwards();
    let row = rig.engine.core.nat.datapath.vm6(VmRow::new(1)).unwrap();
    for place in 0..slipgate_abi::vm6::GUEST_ADDRESSES {
        row.bind(place, Ip6::UNSPECIFIED, 0);
    }
    rig.world(&syn((family.peer, 50_000), (family.nat, PORT), 5));
    assert_eq!(rig.refused(1, Refusal::NoAddress), 1);
    assert_eq!(rig.flows(), 0);
    assert!(rig.at_guest().is_empty() && rig.at_world().is_empty());
}
