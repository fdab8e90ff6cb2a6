use super::*;

const fn bit(bit: u32) -> u64 {
    1 << bit
}

fn every() -> Offloads {
    Offloads::ALL
        .iter()
        .fold(Offloads::default(), |all, one| all.with(*one))
}

#[test]
fn a_tap_that_can_do_nothing_offers_no_offload() {
    let offered = Features::offered(Offloads::default(), 1);
    for (_, host, guest) in TABLE {
        assert!(!host.iter().chain(*guest).any(|bit| offered.has(*bit)));
    }
    assert!(!offered.has(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS));
    assert!(!offered.has(VIRTIO_NET_F_MQ));
    assert!(offered.mergeable());
    assert!(offered.has(VIRTIO_RING_F_EVENT_IDX) && offered.has(VIRTIO_RING_F_INDIRECT_DESC));
}

#[test]
fn each_offload_is_offered_both_ways() {
    let offered = Features::offered(every(), 2);
    assert!(offered.has(VIRTIO_NET_F_MQ) && offered.has(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS));
    for (_, host, guest) in TABLE {
        assert!(host.iter().chain(*guest).all(|bit| offered.has(*bit)));
    }
    assert_eq!(offered.guest_offloads(), every());
    let without_uso = Features::offered(Offloads(every().0 & !Offloads::USO.0), 2);
    assert!(!without_uso.has(VIRTIO_NET_F_HOST_USO) && !without_uso.has(VIRTIO_NET_F_GUEST_USO4));
}

#[test]
fn an_offload_without_what_it_depends_on_is_off() {
    let tso_alone = Features(bit(VIRTIO_NET_F_GUEST_TSO4));
    assert_eq!(tso_alone.guest_offloads(), Offloads::default());
    let ecn_alone = Features(bit(VIRTIO_NET_F_GUEST_CSUM) | bit(VIRTIO_NET_F_GUEST_ECN));
    assert_eq!(ecn_alone.guest_offloads(), Offloads::CSUM);
    let half_of_uso = Features(bit(VIRTIO_NET_F_GUEST_CSUM) | bit(VIRTIO_NET_F_GUEST_USO6));
    assert_eq!(half_of_uso.guest_offloads(), Offloads::CSUM);
}

#[test]
fn a_command_sets_what_was_negotiated_and_no_more() {
    let negotiated = Features(bit(VIRTIO_NET_F_GUEST_CSUM) | bit(VIRTIO_NET_F_GUEST_TSO4));
    let set = |bits| Offloads::from_command(bits, negotiated);
    assert_eq!(set(0), Some(Offloads::default()));
    assert_eq!(set(negotiated.0), Some(Offloads::CSUM.with(Offloads::TSO4)));
    assert_eq!(set(negotiated.0 | bit(VIRTIO_NET_F_GUEST_TSO6)), None);
    assert_eq!(set(bit(VIRTIO_NET_F_HOST_TSO4)), None);
    assert_eq!(set(1 << 63), None);
}
