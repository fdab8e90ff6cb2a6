//! Fragments and the path's MTU: a Linux guest fragments, and learns how.
use slipgate_testbed::require_root_and_tun;

use super::scene::*;

fn payload(len: u32) -> Vec<u8> {
    (0..len).map(|at| (at ^ at >> 8) as u8).collect()
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
