//! Entries of `FLOWS` that do not agree with their slot are misses.
use aya::maps::Map;
use slipgate_abi::{FlowRef, Handover, Protocol, Slot};

use crate::{datapath::*, frame::*, loaded};

/// Expects the guest's packet to be a miss, and the world's to be left to the host.
fn expect_miss(change: impl FnOnce(&mut Slot)) {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    datapath.slots.change(9, change);
    datapath.expect_handover(
        "guest_egress",
        &Frame::tx(Protocol::Udp).bytes(),
        Handover::Miss,
        0,
    );
    datapath.expect_unnoticed("uplink_ingress", &Frame::rx(Protocol::Udp).bytes());
}

#[test]
fn another_generation_is_a_miss() {
    expect_miss(|slot| slot.generation += 1);
}

#[test]
fn another_peer_is_a_miss() {
    expect_miss(|slot| slot.remote.octets[3] ^= 1);
    expect_miss(|slot| slot.remote_port ^= 1);
    expect_miss(|slot| slot.protocol = Protocol::Tcp);
}

#[test]
fn another_local_end_is_a_miss_on_its_link() {
    for (own, change) in [
        (true, (|slot| slot.guest_port ^= 1) as fn(&mut Slot)),
        (true, |slot| slot.vm += 1),
        (false, |slot| slot.nat_port ^= 1),
        (false, |slot| slot.nat.octets[3] ^= 1),
    ] {
        let mut datapath = loaded!();
        datapath.admit(Flow::new(Protocol::Udp));
        datapath.slots.change(9, change);
        if own {
            datapath.expect_handover(
                "guest_egress",
                &Frame::tx(Protocol::Udp).bytes(),
                Handover::Miss,
                0,
            );
        } else {
            datapath.expect_unnoticed("uplink_ingress", &Frame::rx(Protocol::Udp).bytes());
        }
    }
}

#[test]
fn a_slot_outside_the_table_is_a_miss() {
    let mut datapath = loaded!();
    let slot = datapath.admit(Flow::new(Protocol::Udp));
    let entry = FlowRef {
        slot: 1024,
        generation: 1,
    };
    datapath
        .flows()
        .insert(slot.guest_tuple(), entry, 0)
        .expect("replace");
    datapath.expect_handover(
        "guest_egress",
        &Frame::tx(Protocol::Udp).bytes(),
        Handover::Miss,
        0,
    );
}

#[test]
fn another_vms_flow_with_the_same_addresses_is_not_found() {
    let mut datapath = loaded!();
    datapath.admit(Flow::new(Protocol::Udp));
    // The same TAP, addresses and ports, but another VM's id.
    datapath.vms.change(ROW, |row| row.id = VM + 1);
    datapath.set_tap(TAP, VM + 1, ROW);
    let run = datapath.run("guest_egress", &Frame::tx(Protocol::Udp).bytes());
    let header = handed(&run.frame).0;
    assert_eq!((header.code, header.id), (Handover::Miss as u8, VM + 1));
}

/// Two processes share the programs: each would steal the other's events.
#[test]
fn no_map_is_a_queue_of_events() {
    let datapath = loaded!();
    let maps: Vec<_> = datapath.ebpf.maps().collect();
    assert!(maps.len() > 10);
    for (name, map) in maps {
        let is_queue = matches!(
            map,
            Map::RingBuf(_) | Map::PerfEventArray(_) | Map::Queue(_) | Map::Stack(_)
        );
        assert!(!is_queue, "{name}");
    }
}
