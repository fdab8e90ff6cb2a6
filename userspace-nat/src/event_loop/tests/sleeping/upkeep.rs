//! By what a guest keeps its neighbours, address and lease: answered while it sleeps, too.
use slipgate_abi::{Handover, Ip4};

use super::{
    super::{rig::*, slaac},
    sequences_at_guest, sleep, told, wake,
};
use crate::{
    clock::SECOND_NS,
    dhcp,
    ndp::wire::{
        kind,
        tests::{message, solicitation},
    },
};

const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 2, 1];
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 1, 9];

/// Something by which a guest keeps its neighbours, address and lease, or is kept by a neighbour: how the
/// programs handled it, and what came in answer.
#[derive(PartialEq)]
struct Upkeep {
    what: &'static str,
    handling: Handling,
    answer: Vec<u8>,
}

impl Upkeep {
    /// Has VM 1 send what there is of it, and a neighbour on the uplink ask for it.
    fn of(rig: &mut Rig) -> Vec<Self> {
        const ROUTERS: &str = "ff02::2";
        let guest = GUEST6.to_string();
        let gateway = "fd00:0:0:2::1";
        let solicits = |from: &str, to: &str, target: &str, mac| {
            message(
                from,
                to,
                kind::NEIGHBOUR_SOLICITATION,
                &solicitation(target, mac),
            )
        };
        let arp = |target: Ip4| {
            let header = [0, 1, 8, 0, 6, 4, 0, 1];
            let rest = [&GUEST_MAC[..], &GUEST.octets, &[0; 6], &target.octets];
            [&header, &rest.concat()[..]].concat()
        };
        let mut all = Vec::new();
        let mut note = |rig: &mut Rig, what, handling| {
            rig.turn();
            let at_guest = rig.at_guest().into_iter().map(|(_, packet)| packet);
            let answers: Vec<_> = at_guest.chain(rig.at_world()).collect();
            let answer = answers.concat();
            all.push(Self {
                what,
                handling,
                answer,
            });
        };
        let resolver = Ip4 {
            octets: [10, 0, 2, 3],
        };
        for (what, target) in [("ARP, gateway", GATEWAY), ("ARP, resolver", resolver)] {
            let handling = rig.kernel.borrow_mut().guest_sends_arp(1, &arp(target));
            note(rig, what, handling);
        }
        let group = "ff02::1:ff00:1";
        for (what, mac) in [("NS", Some(GUEST_MAC)), ("NS without a MAC", None)] {
            let handling = slaac::send(rig, &solicits(&guest, group, gateway, mac));
            note(rig, what, handling);
        }
        let asked = message(
            slaac::LINK_LOCAL,
            ROUTERS,
            kind::ROUTER_SOLICITATION,
            &[0; 4],
        );
        let handling = slaac::send(rig, &asked);
        note(rig, "RS", handling);
        let handling = rig.guest(1, &udp((GUEST, 68), (GATEWAY, 67), &renewal()));
        note(rig, "DHCP", handling);
        let asked = [11, 1, 2, 3, 0, 6, 0, 2, 0, 23];
        let asked = slaac::udp6(slaac::LINK_LOCAL, 546, "ff02::1:2", 547, &asked);
        let handling = slaac::send(rig, &asked);
        note(rig, "DHCPv6", handling);
        let router = Some([2, 0, 0, 0, 1, 1]);
        let handling = rig.world(&solicits("2001:db8:1::77", &guest, &guest, router));
        note(rig, "NS of the uplink", handling);
        all
    }
}

/// A DHCPREQUEST of a guest that renews (RFC 2131 section 4.3.2).
fn renewal() -> Vec<u8> {
    let mut request = vec![0; 236];
    request[..8].copy_from_slice(&[1, 1, 6, 0, 1, 2, 3, 4]);
    request[12..16].copy_from_slice(&GUEST.octets);
    request[28..34].copy_from_slice(&GUEST_MAC);
    request.extend([99, 130, 83, 99, 53, 1, 3, 255]);
    request
}

/// What is under way when the guest is paused is answered, so that it finds its neighbours and its lease
/// when it runs again; and a router finds the guest.
#[test]
fn arp_ndp_and_leases_outlast_a_sleep() {
    let mut rig = Rig::with(Setup {
        ipv6: Some("fd00:0:0:2::/64".parse().unwrap()),
        is_routed: true,
        ..Setup::default()
    });
    {
        let mut kernel = rig.kernel.borrow_mut();
        let prefix = std::net::Ipv6Addr::new(0xfd00, 0, 0, 2, 0, 0, 0, 0);
        let icmpv6 = 58;
        kernel
            .forwards6
            .insert((prefix.into(), 0, icmpv6), (1, 101));
        kernel.vm6(1).set_proxy(Some((kernel.uplink, UPLINK_MAC)));
    }
    let nat = rig.connect(40_000, 7);
    Upkeep::of(&mut rig);
    let before = Upkeep::of(&mut rig);
    for upkeep in &before {
        let Upkeep {
            what,
            handling,
            answer,
        } = upkeep;
        assert!(!answer.is_empty(), "{what}: {handling:?}");
    }
    let by = |what| before.iter().find(|upkeep| upkeep.what == what).unwrap();
    for what in ["ARP, gateway", "NS", "NS of the uplink"] {
        assert_eq!(by(what).handling, Handling::Fast, "{what}");
    }
    let acknowledged = &by("DHCP").answer[28..];
    assert_eq!(acknowledged[16..20], GUEST.octets);
    let lease = [&[51, 4], &dhcp::LEASE_S.to_be_bytes()[..]].concat();
    assert!(acknowledged.windows(6).any(|option| option == lease));

    sleep(&mut rig);
    // A guest renews after that time.
    rig.pass(u64::from(dhcp::RENEW_S) * SECOND_NS);
    rig.at_guest();
    let changed = |rig: &mut Rig| {
        let now = Upkeep::of(rig);
        let pairs = before.iter().zip(now);
        let changed = pairs.filter(|(before, now)| *before != now);
        changed.map(|(before, _)| before.what).collect::<Vec<_>>()
    };
    assert_eq!(changed(&mut rig), [""; 0], "while it sleeps");
    assert_eq!(told(&rig), [], "its own upkeep wakes nobody");
    let held = Handling::Engine(Handover::Asleep);
    assert_eq!(rig.world(&ack(SERVER, nat, 0, 10, 8)), held);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [10]);
    assert_eq!(changed(&mut rig), [""; 0], "after it");
}
