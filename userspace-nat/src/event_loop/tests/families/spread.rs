//! Flows by a route with several next hops.
use std::{collections::BTreeMap, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{Protocol, SlotIndex, VmRow};
use slipgate_model::{HopShare, NetworkView};
use slipgate_policy::Destination;

use super::*;
use crate::{clock::SECOND_NS, datapath::Tables as _};

const FLOWS: u16 = 40;

/// A default route of each family with the first two of these next hops, or fewer.
fn with_hops(count: usize) -> NetworkView {
    let mut network = network_of_both();
    let defaults = std::mem::take(&mut network.routes.routes);
    for (default, others) in defaults.into_iter().zip(["192.0.2.253", "fe80::2"]) {
        network.routes.routes.push(default);
        if count > 1 {
            let mut further = default;
            further.gateway = Some(others.parse().unwrap());
            further.share = HopShare {
                weight: 1,
                is_further: true,
            };
            network.routes.routes.push(further);
        }
    }
    network
}

/// The neighbours by which the flows leave.
fn neighbours(rig: &Rig) -> BTreeMap<SlotIndex, IpAddr> {
    let datapath = &rig.engine.core.nat.datapath;
    let slots = rig.kernel.borrow().slots_in_use();
    let neighbour = |slot: SlotIndex| {
        let hop = datapath.slot(slot).next_hop().load(Relaxed);
        datapath.next_hop(hop).unwrap().claim().1
    };
    slots
        .into_iter()
        .map(|slot| (slot, neighbour(slot)))
        .collect()
}

#[test]
fn flows_are_spread_over_next_hops_and_change_over_when_theirs_dies() {
    for family in families() {
        let routers = match family.version {
            Version::V4 => ["192.0.2.254", "192.0.2.253"],
            Version::V6 => ["fe80::1", "fe80::2"],
        };
        let routers = routers.map(|router| router.parse::<IpAddr>().unwrap());
        let mut rig = Rig::with(setup());
        rig.follow(with_hops(2));
        for port in 0..FLOWS {
            rig.guest(1, &udp((family.guest, 5_000 + port), family.server(), b"x"));
        }
        let spread = neighbours(&rig);
        let by = |flows: &BTreeMap<SlotIndex, IpAddr>, router: IpAddr| {
            flows.values().filter(|by| **by == router).count()
        };
        assert_eq!(spread.len(), usize::from(FLOWS));
        assert!(
            routers.iter().all(|router| by(&spread, *router) > 8),
            "{spread:?}"
        );
        rig.follow(with_hops(1));
        rig.pass(SECOND_NS / 10);
        assert_eq!(by(&neighbours(&rig), routers[0]), usize::from(FLOWS));
        // It comes again: it gets new flows, and none of those that live.
        rig.follow(with_hops(2));
        rig.pass(SECOND_NS / 10);
        assert_eq!(by(&neighbours(&rig), routers[0]), usize::from(FLOWS));
        // Another engine finds them where they are, whatever their tuples would choose.
        let mut rig = rig.restart_in_steps(&setup());
        rig.engine.set_network(&with_hops(2));
        rig.engine.finish_adoption().unwrap();
        rig.pass(SECOND_NS / 10);
        assert_eq!(by(&neighbours(&rig), routers[0]), usize::from(FLOWS));
        for port in 0..FLOWS {
            rig.guest(1, &udp((family.guest, 6_000 + port), family.server(), b"x"));
        }
        assert!(by(&neighbours(&rig), routers[1]) > 8, "{family:?}");
    }
}

#[test]
fn why_names_all_next_hops() {
    for (family, hops) in families().into_iter().zip([
        "192.0.2.254 on ifindex 2 (weight 1), 192.0.2.253 on ifindex 2 (weight 1)",
        "fe80::1 on ifindex 2 (weight 1), fe80::2 on ifindex 2 (weight 1)",
    ]) {
        let hops = hops.replace("ifindex 2", &format!("ifindex {UPLINK}"));
        let mut rig = Rig::with(setup());
        for count in [1, 2] {
            rig.follow(with_hops(count));
            let to = Destination {
                addr: family.peer,
                port: 443,
                protocol: Protocol::Tcp,
            };
            let told = rig.tell(move |engine| engine.why(VmRow::new(1), to, None));
            assert_eq!(told.explanation.contains(&hops), count == 2, "{told:?}");
            assert_eq!(told.explanation.contains("The next hop"), count == 2);
        }
    }
}
