//! Datagrams larger than a packet: a Linux guest fragments them, and so does the server that answers.
use slipgate_testbed::require_root_and_tun;

use super::scene::*;

fn payload(len: u32) -> Vec<u8> {
    (0..len).map(|at| (at ^ at >> 8) as u8).collect()
}

#[test]
fn ipv6_datagrams_larger_than_a_packet_go_both_ways() {
    require_root_and_tun!();
    let stand = stand6(&[]);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    for len in [4_500, 1_460, 60_000] {
        let sent = payload(len);
        let came = datagram_to(&stand, server.address(), &sent);
        assert!(
            came.is_ok_and(|came| came == sent),
            "{len}: {}",
            stand.total()
        );
    }
    let sent = payload(4_000);
    assert_eq!(ping(&stand, SERVER6, &sent), Some(sent));
    assert_eq!(stand.dropped("fragment"), 0, "{}", stand.total());
    let flows = stand.slipgate.flows().unwrap();
    let udp = flows.iter().filter(|flow| flow.proto == "udp");
    let counts: Vec<_> = udp.map(|flow| (flow.tx_packets, flow.rx_packets)).collect();
    assert_eq!(counts, [(1, 1); 3], "a datagram is one packet: {flows:?}");
}

/// The uplink carries less than the guest's link: the guest learns it, and makes smaller fragments.
#[test]
fn ipv6_fragments_are_as_large_as_the_path_allows() {
    require_root_and_tun!();
    let stand = narrow6();
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let sent = payload(4_500);
    let came = datagram_to(&stand, server.address(), &sent);
    assert!(came.is_err(), "too large for the uplink");
    until("smaller fragments", || {
        datagram_to(&stand, server.address(), &sent).is_ok_and(|came| came == sent)
    });
}
