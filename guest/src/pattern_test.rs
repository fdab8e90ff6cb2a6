use alloc::{vec, vec::Vec};

use super::*;

#[test]
fn the_testbeds_servers_make_the_same() {
    let (mut theirs, mut ours) = (vec![0; 1000], vec![0; 1000]);
    slipgate_testbed::pattern::Pattern::new(7).fill(&mut theirs);
    Pattern::new(7).fill(&mut ours);
    assert_eq!(ours, theirs);
}

#[test]
fn pieces_do_not_matter() {
    let mut whole = vec![0; 1000];
    Pattern::new(9).fill(&mut whole);
    let (mut pieces, mut out, mut check) = (Pattern::new(9), Vec::new(), Pattern::new(9));
    for len in [1, 7, 8, 9, 3, 0, 2, 498, 472] {
        let mut piece = vec![0; len];
        pieces.fill(&mut piece);
        check.check(&piece).unwrap();
        out.extend(piece);
    }
    assert_eq!(out, whole);
    assert_eq!(check.position(), 1000);
}

#[test]
fn the_first_wrong_byte_is_named() {
    for wrong in 0..40 {
        let mut bytes = vec![0; 45];
        Pattern::new(1).fill(&mut bytes);
        let (head, tail) = bytes.split_at_mut(5);
        tail[wrong] ^= 1;
        let mut check = Pattern::new(1);
        check.check(head).unwrap();
        assert_eq!(check.check(tail), Err(5 + wrong as u64));
    }
    let mut bytes = vec![0; 100];
    Pattern::new(1).fill(&mut bytes);
    bytes.remove(5);
    assert!(Pattern::new(1).check(&bytes).is_err(), "a lost byte");
}
