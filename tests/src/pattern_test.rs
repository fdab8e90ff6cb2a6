use super::*;

#[test]
fn pieces_do_not_matter() {
    let mut whole = vec![0; 1000];
    Pattern::new(9).fill(&mut whole);
    let (mut pieces, mut out, mut check) = (Pattern::new(9), Vec::new(), Pattern::new(9));
    for len in [1, 7, 8, 9, 3, 500, 472] {
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
    let mut bytes = vec![0; 100];
    Pattern::new(1).fill(&mut bytes);
    let (head, tail) = bytes.split_at_mut(30);
    tail[11] ^= 1;
    let mut check = Pattern::new(1);
    check.check(head).unwrap();
    assert_eq!(check.check(tail), Err(41));
    bytes.remove(5);
    assert!(Pattern::new(1).check(&bytes).is_err(), "a lost byte");
}
