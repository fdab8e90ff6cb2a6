//! Drivers of a balloon.
use super::Seeds;

pub(super) fn balloon() -> Seeds {
    let begin = |chains: u8| [&[0; 8][..], &[chains]].concat();
    let buffer = |how: u8, address: u64, bytes: u32| {
        [&[how][..], &address.to_le_bytes(), &bytes.to_le_bytes()].concat()
    };
    let pages = |numbers: &[u32]| -> Vec<u8> {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
        bytes.collect()
    };
    let list = pages(&[0x40, 0x41, 0x50, u32::MAX, 0x42]);
    let inflate = [&[0, 0][..], &buffer(0, 0x1_0000, 20)].concat();
    let deflate = [&[1, 0][..], &buffer(0, 0x1_0000, 8)].concat();
    let report = [
        &[2, 1][..],
        &buffer(1, 0x4_0000, 0x2000),
        &buffer(1, 0x6_0000, 0x1000),
    ]
    .concat();
    let everything = [&[2, 0][..], &buffer(3, 0, u32::MAX)].concat();
    vec![
        ("given", [&begin(2)[..], &inflate, &deflate, &list].concat()),
        ("reported", [&begin(1)[..], &report].concat()),
        (
            "everything",
            [&begin(2)[..], &everything, &inflate, &list].concat(),
        ),
    ]
}
