//! Drivers of a network card, ordinary and hostile ones.
use super::Seeds;
use crate::{tape::with_length, virtio_net::what as card};

/// Ring features, all device features that a socket has, and 64 entries.
pub(super) fn virtio_net() -> Seeds {
    let begin = |features: u64| [&features.to_le_bytes()[..], &[6]].concat();
    let all = begin(u64::MAX);
    let plain = begin(0);
    // One descriptor, and the chain that begins with it.
    let buffer = |queue: u8, index: u8, at: u16, bytes: u16, flags: u8| {
        let (at, bytes) = (at.to_be_bytes(), bytes.to_be_bytes());
        [
            &[card::DESCRIPTOR, queue, index, 0][..],
            &at,
            &bytes,
            &[flags, index + 1],
        ]
        .concat()
    };
    let offer = |queue: u8, head: u8| [card::OFFER, queue, head];
    let frame = |bytes: u16| [&[card::FRAME][..], &[0; 12], &bytes.to_be_bytes(), &[7]].concat();
    let write = |at: u16, bytes: &[u8]| {
        [
            &[card::WRITE][..],
            &(at / 8).to_be_bytes(),
            &with_length(bytes),
        ]
        .concat()
    };
    let posted: Vec<u8> = (0..20)
        .flat_map(|index| {
            let at = 0x2000 + u16::from(index) * 1_024;
            [buffer(0, index, at, 1_000, 2), offer(0, index).to_vec()].concat()
        })
        .collect();
    let mut gso = [0; 12];
    gso[..2].copy_from_slice(&[1, 1]);
    for (at, half) in [(2, 54_u16), (4, 1_448), (6, 34), (8, 16)] {
        gso[at..at + 2].copy_from_slice(&half.to_le_bytes());
    }
    // Written below the buffers' base, which the addresses above are relative to.
    let in_table = |index: u8, next: bool| {
        let flags = u8::from(next);
        [
            &[card::DESCRIPTOR, 1, index, 2, 0x20, 0, 0, 40][..],
            &[flags, index + 1],
        ]
        .concat()
    };
    let to_table = [
        &[card::DESCRIPTOR, 1, 0, 1][..],
        &0xf000_u64.to_le_bytes(),
        &32_u32.to_le_bytes(),
        &[4, 0],
    ]
    .concat();
    let command = |bytes: &[u8]| {
        let length = u16::try_from(bytes.len()).unwrap_or(0);
        [
            &buffer(2, 0, 0, length, 1)[..],
            &buffer(2, 1, 0x1000, 1, 2),
            // 0x1_0000 is where addresses begin: beyond what a write reaches, so as eighths.
            &[card::WRITE, 0x20, 0],
            &with_length(bytes),
            &offer(2, 0),
            &[card::COMMAND],
        ]
        .concat()
    };
    vec![
        (
            "send",
            [
                &all[..],
                &buffer(1, 0, 0, 1_526, 0),
                &offer(1, 0),
                &[card::PASS],
            ]
            .concat(),
        ),
        (
            "send-gso",
            [
                &all[..],
                &buffer(1, 0, 0, 12, 1),
                &buffer(1, 1, 64, 9_000, 0),
                &[card::WRITE, 0x20, 0],
                &with_length(&gso),
                &offer(1, 0),
                &[card::PASS],
            ]
            .concat(),
        ),
        (
            "send-indirect",
            [
                &all[..],
                &in_table(0, true),
                &in_table(1, false),
                &to_table,
                &offer(1, 0),
                &[card::PASS],
            ]
            .concat(),
        ),
        (
            "receive",
            [&plain[..], &posted, &frame(60), &frame(900), &[card::PASS]].concat(),
        ),
        (
            "receive-merged",
            [
                &all[..],
                &posted,
                &frame(60),
                &frame(9_000),
                &frame(60),
                &[card::PASS],
            ]
            .concat(),
        ),
        (
            "receive-later",
            [&all[..], &frame(60), &[card::PASS], &posted, &[card::PASS]].concat(),
        ),
        (
            "commands",
            [
                &all[..],
                &command(&[0, 0, 0]),
                &command(&[1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0x5e, 0, 0, 1]),
                &command(&[1, 1, 2, 0, 0, 0, 0, 3]),
                &command(&[5, 0, 2, 0, 0, 0, 0, 0, 0, 0]),
                &posted,
                &frame(60),
                &[card::PASS, card::RESET],
            ]
            .concat(),
        ),
        (
            "jump",
            [
                &all[..],
                &[card::INDEX, 1, 0, 70, card::PASS],
                &write(0, &[0xff; 64]),
            ]
            .concat(),
        ),
    ]
}
