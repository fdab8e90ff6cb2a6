use std::{
    cell::Cell,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use slipgate_abi::IfIndex;

use super::{PLACES, Question, Recent, place_of};
use crate::route::Route;

fn v4(bits: u32) -> IpAddr {
    Ipv4Addr::from_bits(bits).into()
}

fn by_link(link: u32) -> Route {
    Route::OtherUplink {
        ifindex: IfIndex::new(link),
    }
}

/// Asks, and returns the answer and whether it had to be looked up.
fn ask(recent: &Recent, question: Question, answer: Route) -> (Route, bool) {
    let asked = Cell::new(false);
    let route = recent.answer(question, || {
        asked.set(true);
        (answer, true)
    });
    (route, asked.get())
}

#[test]
fn the_same_question_is_looked_up_once() {
    let recent = Recent::new();
    let question = (v4(1), Some(IfIndex::new(2)), None);
    assert_eq!(ask(&recent, question, by_link(3)), (by_link(3), true));
    assert_eq!(ask(&recent, question, by_link(4)), (by_link(3), false));
}

#[test]
fn each_part_of_a_question_counts() {
    let recent = Recent::new();
    let question = (v4(1), Some(IfIndex::new(2)), None);
    ask(&recent, question, by_link(3));
    let others = [
        (v4(1), Some(IfIndex::new(9)), None),
        (v4(1), None, None),
        (v4(1), Some(IfIndex::new(2)), Some(v4(7))),
    ];
    for other in others {
        assert_eq!(ask(&recent, other, by_link(5)), (by_link(5), true));
    }
}

#[test]
fn addresses_that_share_a_place_are_told_apart() {
    let recent = Recent::new();
    let one = v4(1);
    let other = (2..).map(v4).find(|addr| place_of(*addr) == place_of(one));
    let (one, other) = ((one, None, None), (other.unwrap(), None, None));
    assert_eq!(ask(&recent, one, by_link(1)), (by_link(1), true));
    assert_eq!(ask(&recent, other, by_link(2)), (by_link(2), true));
    assert_eq!(ask(&recent, other, by_link(3)), (by_link(2), false));
    assert_eq!(ask(&recent, one, by_link(4)), (by_link(4), true));
}

#[test]
fn neighbours_have_places_of_their_own() {
    let distinct = |addresses: [IpAddr; 16]| {
        let mut places = addresses.map(place_of).to_vec();
        places.sort_unstable();
        places.dedup();
        assert!(places.iter().all(|place| *place < PLACES));
        places.len()
    };
    assert!(distinct(std::array::from_fn(|i| v4(0x0a00_0001 + i as u32))) > 8);
    let v6 = |i: usize| Ipv6Addr::from_bits((0x2001_0db8 << 96) + i as u128).into();
    assert!(distinct(std::array::from_fn(v6)) > 8);
}

#[test]
fn a_default_keeps_nothing() {
    let recent = Recent::default();
    let question = (v4(1), None, None);
    ask(&recent, question, by_link(1));
    assert_eq!(ask(&recent, question, by_link(2)), (by_link(2), true));
}

#[test]
fn an_answer_that_holds_for_one_flow_is_not_kept() {
    let recent = Recent::new();
    let question = (v4(1), None, None);
    let of_one = recent.answer(question, || (by_link(3), false));
    assert_eq!(of_one, by_link(3));
    assert_eq!(ask(&recent, question, by_link(4)), (by_link(4), true));
    assert_eq!(ask(&recent, question, by_link(5)), (by_link(4), false));
}
