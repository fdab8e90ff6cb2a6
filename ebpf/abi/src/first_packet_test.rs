use super::*;

fn published(number: u64, len: u16) -> FirstPacket {
    FirstPacket {
        number: number + 1,
        at_ns: 7,
        len,
        pad: [0; 4],
        frame: [0xab; FRAME_LEN],
    }
}

#[test]
fn a_place_is_read_by_its_number_alone() {
    let mut element = published(600, 40);
    // SAFETY: it points to the element here, which outlives it.
    let place = unsafe { FirstPacketRef::new(&raw mut element) };
    let mut buffer = [0; 64];
    for other in [88, 599, 601, 600 + u64::from(RING_LEN)] {
        assert_eq!(place.read(other, &mut buffer), None);
    }
    assert_eq!(place.read(600, &mut buffer), Some((40, 7)));
    assert_eq!((&buffer[..40], buffer[40]), (&[0xab; 40][..], 0));
}

#[test]
fn a_length_beyond_the_place_is_cut() {
    let mut element = published(0, u16::MAX);
    // SAFETY: as above.
    let place = unsafe { FirstPacketRef::new(&raw mut element) };
    let read = place.read(0, &mut [0; 1_024]);
    assert_eq!(read, Some((FRAME_LEN, 7)));
    assert_eq!(place.read(0, &mut [0; 64]), None);
}

#[test]
fn rings_of_two_owners_share_no_place() {
    let of = |row: u32| (0..u64::from(RING_LEN)).map(move |number| place(row, number));
    assert!(of(0).all(|place| place < RING_LEN));
    assert!(of(1).all(|place| (RING_LEN..2 * RING_LEN).contains(&place)));
    assert_eq!(place(1, u64::from(RING_LEN)), place(1, 0));
}
