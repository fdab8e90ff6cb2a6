//! The sequence number: which interleavings of readers and writers leave a reader with fields that
//! do not go together, or an element with another one's.
extern crate std;

use core::sync::atomic::{AtomicBool, Ordering::Acquire};
use std::{
    thread,
    time::{Duration, Instant},
};

use super::*;

const OF_ONE: [u8; 6] = [2, 1, 1, 1, 1, 1];
const OF_ANOTHER: [u8; 6] = [2, 2, 2, 2, 2, 2];

fn element() -> NextHop {
    NextHop {
        sequence: 0,
        ifindex: 7,
        mtu: 1_500,
        flags: 0,
        neighbour_mac: [0; 6],
        uplink_mac: [0; 6],
        neighbour: Ip4 {
            octets: [192, 0, 2, 1],
        },
        owner: 1,
        route_mtu: 0,
        neighbour6: crate::Ip6::UNSPECIFIED,
        pad: [0; 8],
    }
}

fn set_mac(hop: NextHopRef, mac: [u8; 6]) {
    // SAFETY: a live element of the test's.
    unsafe { (&raw mut (*hop.as_ptr()).neighbour_mac).write_volatile(mac) };
}

fn set_uplink_mac(hop: NextHopRef, mac: [u8; 6]) {
    // SAFETY: as above.
    unsafe { (&raw mut (*hop.as_ptr()).uplink_mac).write_volatile(mac) };
}

/// Rewrites a next hop as the broker does.
fn rewrite(hop: NextHopRef, mac: [u8; 6]) {
    let withdrawn = hop.withdraw();
    set_mac(hop, mac);
    set_uplink_mac(hop, mac);
    assert!(hop.publish(withdrawn));
}

fn mac(hop: *const NextHop) -> [u8; 6] {
    // SAFETY: as above.
    unsafe { (&raw const (*hop).neighbour_mac).read_volatile() }
}

fn uplink_mac(hop: *const NextHop) -> [u8; 6] {
    // SAFETY: as above.
    unsafe { (&raw const (*hop).uplink_mac).read_volatile() }
}

#[test]
fn what_is_written_while_it_is_read_is_not_used() {
    let mut element = element();
    // SAFETY: it outlives the reference.
    let hop = unsafe { NextHopRef::new(&raw mut element) };
    assert_eq!(hop.read(mac), None, "never written");
    rewrite(hop, OF_ONE);
    assert_eq!(
        hop.read(|h| (mac(h), uplink_mac(h))),
        Some((OF_ONE, OF_ONE))
    );

    // Each number of whole rewrites between the two halves of a read: with two of them the element
    // is in use at both looks, and what was read does not go together.
    for rewrites in 1..=4 {
        rewrite(hop, OF_ONE);
        let torn = hop.read(|h| {
            let first = mac(h);
            for _ in 0..rewrites {
                rewrite(hop, OF_ANOTHER);
            }
            (first, uplink_mac(h))
        });
        assert_eq!(torn, None, "{rewrites}");
    }
    // And each step of one.
    rewrite(hop, OF_ONE);
    let mut withdrawn = 0;
    assert_eq!(hop.read(|_| withdrawn = hop.withdraw()), None);
    assert_eq!(hop.read(mac), None);
    set_mac(hop, OF_ANOTHER);
    assert_eq!(hop.read(mac), None);
    assert!(hop.publish(withdrawn));
    assert_eq!(hop.read(mac), Some(OF_ANOTHER));
}

#[test]
fn what_was_withdrawn_meanwhile_is_not_put_into_use() {
    let mut element = element();
    // SAFETY: it outlives the reference.
    let hop = unsafe { NextHopRef::new(&raw mut element) };
    rewrite(hop, OF_ONE);
    // The broker is at it; the engine gives it back and claims it for somebody else.
    let seen = hop.sequence().load(Acquire);
    let broker = hop.withdraw_from(seen).unwrap();
    let engine = hop.withdraw();
    assert!(!is_usable(engine) && engine != broker);
    set_mac(hop, OF_ONE);
    assert!(!hop.publish(broker));
    assert_eq!(hop.read(mac), None);
    // A writer that looked before does not even begin.
    assert_eq!(hop.withdraw_from(seen), None);
    assert!(hop.publish(engine));
    // Numbers do not come again; a wrap is a step like any.
    hop.sequence().store(u32::MAX, Relaxed);
    assert_eq!(hop.withdraw(), 0);
    assert!(hop.publish(0));
    assert_eq!(hop.sequence().load(Relaxed), 1);
}

#[test]
fn readers_beside_a_writer_see_whole_elements() {
    let mut element = element();
    // SAFETY: it outlives the threads.
    let hop = unsafe { NextHopRef::new(&raw mut element) };
    rewrite(hop, OF_ONE);
    let over = AtomicBool::new(false);
    let whole = thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Relaxed) {
                rewrite(hop, OF_ANOTHER);
                rewrite(hop, OF_ONE);
            }
        });
        // A writer that loses its CPU in the middle leaves nothing to be read for as long.
        let until = Instant::now() + Duration::from_secs(30);
        let (mut reads, mut whole) = (0, 0);
        while (reads < 200_000 || whole < 1_000) && Instant::now() < until {
            reads += 1;
            if let Some((neighbour, uplink)) = hop.read(|h| (mac(h), uplink_mac(h))) {
                assert_eq!(neighbour, uplink);
                whole += 1;
            } else {
                thread::yield_now();
            }
        }
        over.store(true, Relaxed);
        whole
    });
    assert!(whole >= 1_000, "{whole}");
}
