use super::*;
use crate::streams::hexadecimal;

#[test]
fn keys_and_mask_are_those_of_rfc_9001_appendix_a() {
    let keys = Keys::new(&[0x83, 0x94, 0xc8, 0xf0, 0x3e, 0x51, 0x57, 0x08]);
    assert_eq!(hexadecimal(&keys.key), "1f369613dd76d5467730efcbe3b1a22d");
    assert_eq!(hexadecimal(&keys.iv), "fa044b2f42a3fd3b46fb255c");
    assert_eq!(
        hexadecimal(&keys.header),
        "9f50449e04a0e810283a1e9933adedd2"
    );
    let sample = [
        0xd1, 0xb1, 0xc9, 0x8d, 0xd7, 0x68, 0x9f, 0xb8, 0xec, 0x11, 0xd2, 0x42, 0xb1, 0x23, 0xdc,
        0x9b,
    ];
    assert_eq!(hexadecimal(&keys.mask(sample)), "437b9aec36");
}

#[test]
fn a_datagram_is_as_long_as_it_must_be_and_its_length_says_so() {
    let initial = Initial {
        connection: [7; 8],
        number: 1,
        crypto: vec![(0, b"hello".to_vec())],
    };
    let datagram = initial.datagram();
    assert_eq!(datagram.len(), 1200);
    let rest = u16::from_be_bytes([datagram[16], datagram[17]]) & 0x3fff;
    assert_eq!(usize::from(rest), 1200 - 18);
    // The type of an Initial, and only the low bits are hidden.
    assert_eq!(datagram[0] & 0xf0, 0xc0);
}
