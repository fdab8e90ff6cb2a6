use proptest::prelude::*;

use super::*;

const IDENTITY: Identity = Identity {
    vendor: 0x1af4,
    device: 0x1041,
    revision: 1,
    class: 0x02_00_00,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1041,
};

fn space() -> ConfigSpace {
    let mut space = ConfigSpace::new(IDENTITY);
    space.add_bar(0, BarKind::Memory32, 0x2000);
    space.add_bar(2, BarKind::Memory64, 0x4000);
    space
}

fn read<const N: usize>(space: &ConfigSpace, at: u16) -> [u8; N] {
    let mut bytes = [0xaa; N];
    space.read(at, &mut bytes);
    bytes
}

#[test]
fn identity_is_read_only() {
    let mut space = space();
    space.write(0, &[0xff; 4]);
    space.write(8, &[0xff; 4]);
    assert_eq!(read(&space, 0), [0xf4, 0x1a, 0x41, 0x10]);
    assert_eq!(read(&space, 8), [1, 0, 0, 2]);
}

#[test]
fn bars_are_sized_by_writing_ones() {
    let mut space = space();
    space.write(0x10, &[0xff; 4]);
    space.write(0x14, &[0xff; 4]);
    space.write(0x18, &[0xff; 4]);
    space.write(0x1c, &[0xff; 4]);
    assert_eq!(read(&space, 0x10), 0xffff_e000_u32.to_le_bytes());
    assert_eq!(read(&space, 0x14), [0; 4], "no BAR 1");
    assert_eq!(read(&space, 0x18), 0xffff_c004_u32.to_le_bytes());
    assert_eq!(read(&space, 0x1c), [0xff; 4]);
}

#[test]
fn windows_need_memory_decoding() {
    let mut space = space();
    space.write(0x10, &0xc000_1234_u32.to_le_bytes());
    space.write(0x18, &0x8000_u32.to_le_bytes());
    space.write(0x1c, &0x12_u32.to_le_bytes());
    assert_eq!(space.windows(), []);
    space.write(4, &[2]);
    let low = Window {
        bar: 0,
        start: 0xc000_0000,
        len: 0x2000,
    };
    let high = Window {
        bar: 2,
        start: 0x12_0000_8000,
        len: 0x4000,
    };
    assert_eq!(space.windows(), [low, high]);
}

#[test]
fn a_window_that_wraps_is_none() {
    let mut space = space();
    space.write(4, &[2]);
    space.write(0x18, &[0xff; 8]);
    let bars: Vec<u8> = space.windows().iter().map(|window| window.bar).collect();
    assert_eq!(bars, [0]);
}

#[test]
fn capabilities_are_a_list() {
    let mut space = space();
    assert_eq!(read(&space, 0x34), [0]);
    let first = space.add_capability(0x11, &[1; 10], &[0; 10]);
    let second = space.add_capability(9, &[2; 5], &[0xf0; 5]);
    assert_eq!(
        read(&space, 6),
        [0x10, 0],
        "status says that there is a list"
    );
    assert_eq!([first, second], [0x40, 0x4c]);
    assert_eq!(read(&space, 0x34), [0x40]);
    assert_eq!(read(&space, 0x40), [0x11, 0x4c, 1]);
    assert_eq!(read(&space, 0x4c), [9, 0, 2]);
    space.write(0x4c, &[0xff; 8]);
    assert_eq!(read(&space, 0x4c), [9, 0, 0xf2, 0xf2, 0xf2, 0xf2, 0xf2, 0]);
}

#[test]
fn reads_past_the_end_are_zero() {
    let mut space = space();
    space.write(0xff, &[1, 2, 3]);
    space.write(0xfff, &[1, 2, 3]);
    assert_eq!(read(&space, 0xfe), [0; 8]);
    assert_eq!(read(&space, 0xfff), [0; 8]);
}

#[test]
fn reset_forgets_what_was_written() {
    let mut space = space();
    let fresh = space.bytes;
    space.write(0, &[0xff; 256]);
    assert_ne!(space.bytes, fresh);
    space.reset();
    assert_eq!(space.bytes, fresh);
}

proptest! {
    #[test]
    fn only_writable_bits_change(writes in prop::collection::vec(
        (0..0x200_u16, prop::collection::vec(any::<u8>(), 0..9)), 0..40)
    ) {
        let mut space = space();
        space.add_capability(0x11, &[0x55; 10], &[0x80; 10]);
        let fresh = space.bytes;
        for (at, bytes) in writes {
            space.write(at, &bytes);
            let fixed = |bytes: &[u8; SIZE]| -> Vec<u8> {
                bytes.iter().zip(&space.writable).map(|(byte, mask)| byte & !mask).collect()
            };
            prop_assert_eq!(fixed(&space.bytes), fixed(&fresh));
            for window in space.windows() {
                prop_assert_eq!(window.start % window.len, 0);
                prop_assert!(window.start.checked_add(window.len).is_some());
            }
        }
    }
}
