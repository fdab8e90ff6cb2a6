//! Drivers of a disk, ordinary and hostile ones.
use super::Seeds;
use crate::{disk::what, tape::with_length};

const READ: u8 = 0;
const WRITE: u8 = 1;
const FLUSH: u8 = 4;
const NAME: u8 = 8;
const DISCARD: u8 = 11;
const ZEROES: u8 = 13;

/// Where the header of a request is, its data, and its status, in eights.
const HEADER: u16 = 0x800;
const DATA: u16 = 0x900;
const STATUS: u16 = 0x880;

/// A buffer; `how` says what is behind it.
fn buffer(how: u8, at: u16, bytes: u16, rest: &[u8]) -> Vec<u8> {
    [&[how][..], &at.to_be_bytes(), &bytes.to_be_bytes(), rest].concat()
}

fn header(kind: u8, sector: u64) -> Vec<u8> {
    let rest = [&[kind][..], &sector.to_le_bytes()].concat();
    buffer(4, HEADER, 16, &rest)
}

fn status() -> Vec<u8> {
    buffer(1, STATUS, 1, &[])
}

/// Returns the step that offers these buffers; `shape` as the step has it, without their number.
fn waiting(queue: u8, shape: u8, buffers: &[Vec<u8>]) -> Vec<u8> {
    let shape = shape | (buffers.len() as u8 - 1);
    [&[what::CHAIN, queue, shape][..], &buffers.concat()].concat()
}

/// Returns the steps that offer these buffers and have them served, before the next request is
/// written in their place.
fn chain(queue: u8, shape: u8, buffers: &[Vec<u8>]) -> Vec<u8> {
    [waiting(queue, shape, buffers), vec![what::TURN, queue]].concat()
}

/// A discard, or zeroes.
fn range(kind: u8, sector: u64, sectors: u32, flags: u8) -> Vec<u8> {
    chain(0, 0, &range_buffers(kind, sector, sectors, flags))
}

fn range_buffers(kind: u8, sector: u64, sectors: u32, flags: u8) -> [Vec<u8>; 2] {
    let rest = [
        &[kind][..],
        &[0; 8],
        &sector.to_le_bytes(),
        &sectors.to_le_bytes(),
        &[flags],
    ]
    .concat();
    [buffer(12, HEADER, 32, &rest), status()]
}

pub(super) fn disk() -> Seeds {
    let begin = |features: u64, knobs: u8| [&features.to_le_bytes()[..], &[knobs]].concat();
    let all = || begin(u64::MAX, 0);
    let fill = [
        &[what::WRITE][..],
        &DATA.to_be_bytes(),
        &with_length(&[7; 1_024]),
    ]
    .concat();
    let reads = |sector| {
        let data = buffer(1, DATA, 1_024, &[]);
        chain(0, 0, &[header(READ, sector), data, status()])
    };
    let write_buffers = |sector| {
        let data = buffer(0, DATA, 1_024, &[]);
        [header(WRITE, sector), data, status()]
    };
    let writes = |sector| chain(0, 0, &write_buffers(sector));
    let plain = |kind| chain(0, 0, &[header(kind, 0), buffer(1, DATA, 20, &[]), status()]);
    let turn = vec![what::TURN, 0];
    let pause = vec![what::PAUSE, 0];
    // The header, the data and the status divided among other buffers, in a table of their own.
    let divided = |queue| {
        let rest = [&[WRITE][..], &3_u64.to_le_bytes()].concat();
        let buffers = [
            buffer(4, HEADER, 5, &rest),
            // What is left of the header, the first byte not at an eighth.
            [
                &[2][..],
                &(u64::from(HEADER) * 8 + 5).to_le_bytes(),
                &(11_u32).to_le_bytes(),
            ]
            .concat(),
            buffer(0, DATA, 500, &[]),
            buffer(0, DATA + 100, 12, &[]),
            status(),
        ];
        chain(queue, 0x80, &buffers)
    };
    // Into the ring of available chains.
    let over_the_rings = [
        header(READ, 0),
        buffer(1, 0x80, 512, &[]),
        buffer(1, 0x2ff8, 512, &[]),
        status(),
    ];
    // Past the page cache: a block of 4 KiB, and a part of one.
    let direct = |alignment: u8, at: u16| {
        let data = |how| buffer(how, at, 4_096, &[]);
        let write = chain(0, 0, &[header(WRITE, 8), data(0), status()]);
        let read = chain(0, 0, &[header(READ, 8), data(1), status()]);
        let knobs = begin(u64::MAX, 3 | alignment << 4);
        let rest = [reads(2), range(ZEROES, 8, 8, 0), plain(FLUSH)].concat();
        [knobs, fill.clone(), write, read, rest].concat()
    };
    vec![
        ("direct", direct(1, DATA)),
        ("direct-unaligned", direct(2, DATA + 1)),
        ("direct-blocks", direct(3, DATA)),
        (
            "written-and-read",
            [all(), fill.clone(), writes(2), reads(1), plain(FLUSH)].concat(),
        ),
        (
            "names",
            [all(), plain(NAME), plain(FLUSH), plain(77)].concat(),
        ),
        (
            "ranges",
            [
                all(),
                range(DISCARD, 1, 2, 0),
                range(ZEROES, 5, 3, 0),
                range(ZEROES, 9, 2, 1),
                range(DISCARD, 31, 2, 0),
                range(DISCARD, 3, 1, 1),
            ]
            .concat(),
        ),
        (
            "write-through",
            [
                begin(1 << 28, 1),
                fill.clone(),
                writes(30),
                range(ZEROES, 5, 3, 0),
                range(ZEROES, 9, 2, 1),
                plain(FLUSH),
            ]
            .concat(),
        ),
        (
            "read-only",
            [
                begin(u64::MAX, 4),
                reads(4),
                fill.clone(),
                writes(1),
                range(DISCARD, 1, 1, 0),
                range(ZEROES, 1, 1, 1),
            ]
            .concat(),
        ),
        (
            "divided",
            [begin(u64::MAX, 8), fill.clone(), divided(0), divided(1)].concat(),
        ),
        (
            "paused",
            [
                begin(0, 0),
                waiting(0, 0, &range_buffers(ZEROES, 5, 3, 0)),
                pause.clone(),
                turn.clone(),
                // The header of one that is paused becomes another.
                waiting(0, 0, &range_buffers(ZEROES, 9, 2, 1)),
                pause.clone(),
                waiting(0, 0, &write_buffers(3)),
                pause,
                turn,
                vec![what::RESET],
                reads(3),
            ]
            .concat(),
        ),
        (
            "over-the-rings",
            [all(), chain(0, 0, &over_the_rings), reads(1)].concat(),
        ),
        (
            "jump",
            [all(), reads(1), vec![what::OFFER, 0, 9, 200]].concat(),
        ),
    ]
}
