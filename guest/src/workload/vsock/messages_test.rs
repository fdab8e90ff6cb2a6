use super::*;

fn made(seed: u64, count: u64) -> Vec<u8> {
    let (mut messages, mut bytes) = (Messages::new(seed), Vec::new());
    while messages.number < count {
        bytes.extend(messages.take(usize::MAX >> 1));
    }
    bytes
}

#[test]
fn messages_are_checked_in_whatever_pieces_they_come() {
    let bytes = made(7, 100);
    for piece in [1, 7, 8, 100, 4052] {
        let mut messages = Messages::new(7);
        for part in bytes.chunks(piece) {
            messages.check(part).unwrap();
        }
        assert!(messages.are(100));
    }
    let mut messages = Messages::new(7);
    messages.check(&bytes[..bytes.len() - 1]).unwrap();
    assert!(!messages.are(99) && !messages.are(100));
}

#[test]
fn a_byte_that_is_wrong_lost_or_doubled_is_named() {
    let bytes = made(7, 3);
    // Messages of 8, 39 and 70 bytes.
    assert_eq!(bytes.len(), 8 + 39 + 70);
    let mut wrong = bytes.clone();
    wrong[8 + 10] ^= 1;
    let lost = [&bytes[..8], &bytes[47..]].concat();
    let doubled = [&bytes[..47], &bytes[8..]].concat();
    for (bytes, why) in [
        (wrong, "byte 10 of message 1 is wrong"),
        (lost, "byte 0 of message 1 is wrong"),
        (doubled, "byte 0 of message 2 is wrong"),
    ] {
        assert_eq!(Messages::new(7).check(&bytes).unwrap_err(), why);
    }
}
