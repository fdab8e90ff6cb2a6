//! Seeds of the targets of the user-mode engine: connections as guests have them, and drivers.
use slipgate_abi::tcp::Flags;

use super::Seeds;

/// Returns the steps that open a connection: a guest that scales, its SYN, and the host's
/// connection.
fn opened() -> Vec<u8> {
    let (theirs, ours) = (0xffff_ff00_u32, 0x7fff_ff00_u32);
    let mut input = [theirs.to_be_bytes(), ours.to_be_bytes()].concat();
    // MSS 1460, a shift of 7, a window of 64,240; then room for 60,000 bytes.
    input.extend([3, 0x05, 0xb4, 7, 0xfa, 0xf0]);
    input.extend([5, 0xea, 0x60]);
    input.extend(acknowledged());
    input
}

/// The same of a guest with timestamps, and that takes and sends selective acknowledgements.
fn opened_with_options() -> Vec<u8> {
    let mut input = opened();
    let behind = input.split_off(8);
    input.push(behind[0] | 4 | 8);
    input.extend(&behind[1..4]);
    input.extend(1_000_u32.to_be_bytes());
    input.extend(&behind[4..9]);
    input.extend(acknowledged_with_options(0xffff, &[]));
    input
}

/// The guest acknowledges all, without selective acknowledgements.
fn acknowledged() -> [u8; 6] {
    [4, 0xff, 0xff, 0x20, 0, 0]
}

/// The guest acknowledges so much, a tick later, and says that it has these blocks: each from so many
/// bytes behind that on, and its length.
fn acknowledged_with_options(bytes: u16, blocks: &[(u16, u16)]) -> Vec<u8> {
    let mut step = vec![4];
    step.extend(bytes.to_be_bytes());
    step.extend([0x20, 0, 0, 1, 0, blocks.len() as u8]);
    for (from, len) in blocks {
        step.extend((from + 16).to_be_bytes());
        step.extend(len.to_be_bytes());
    }
    step
}

/// So much payload of the guest's, next in order, which the socket takes.
fn payload(len: u16, fin: bool) -> Vec<u8> {
    let mut step = vec![0];
    step.extend(len.to_be_bytes());
    step.extend([u8::from(fin), 0, 1]);
    step
}

pub(super) fn tcp() -> Seeds {
    let opened = opened();
    let with = |steps: &[&[u8]]| [&opened[..], &steps.concat()].concat();
    let (serves, ends, sends) = ([6, 0x20, 0], [7], [8, 0xff, 0xff, 0]);
    let sends_fin = [8, 0xff, 0xff];
    let acknowledges = [9, 0xff, 0xff, 2];
    let waits = [11, 0xff, 0xff, 20];
    let reset = [&[1, 0, 0, 1, 0, 0, Flags::RST][..], &[0; 5]].concat();
    let told = acknowledged_with_options(0, &[(1_448, 4_344)]);
    vec![
        (
            "request",
            with(&[
                &payload(500, false),
                &acknowledges,
                &serves,
                &sends,
                &acknowledged(),
            ]),
        ),
        (
            "server-ends",
            with(&[
                &serves,
                &sends,
                &ends,
                &sends_fin,
                &acknowledged(),
                &payload(0, true),
                &waits,
            ]),
        ),
        (
            "guest-ends",
            with(&[
                &payload(9, true),
                &serves,
                &sends,
                &ends,
                &sends_fin,
                &acknowledged(),
            ]),
        ),
        (
            "both-end",
            with(&[
                &ends,
                &sends_fin,
                &payload(0, true),
                &acknowledged(),
                &waits,
            ]),
        ),
        (
            "lost",
            with(&[&serves, &sends, &waits, &sends, &waits, &waits]),
        ),
        (
            "reset",
            with(&[&payload(1, false), &reset, &payload(1, false)]),
        ),
        (
            "gap",
            [
                &opened_with_options()[..],
                &serves,
                &sends,
                &told,
                &sends,
                &acknowledged_with_options(0xffff, &[]),
            ]
            .concat(),
        ),
        (
            "silent",
            opened[..opened.len() - acknowledged().len()].to_vec(),
        ),
    ]
}

pub(super) fn vhost_user() -> Seeds {
    let all = u64::MAX.to_be_bytes();
    let with = |steps: &[&[u8]]| [&all[..], &steps.concat()].concat();
    // Chains of one buffer, behind the rings: for the guest, and of it.
    let at = [0x10, 0x40, 4];
    let chain = |ring: u8, len: u16| {
        let mut step = vec![2, ring, 0, 1, 0, 1];
        step.extend(at);
        step.extend(len.to_be_bytes());
        step
    };
    let frame_for_guest = [&[5][..], &[0; 10], &[0x05, 0xdc]].concat();
    let answer = [1, 1, 0, 0, 0];
    vec![
        ("sends", with(&[&chain(1, 1_514), &chain(1, 60)])),
        (
            "receives",
            with(&[&chain(0, 4_096), &frame_for_guest, &frame_for_guest]),
        ),
        ("waits", with(&[&frame_for_guest, &chain(0, 4_096)])),
        (
            "receives_straight",
            with(&[
                &chain(0, 0x8000),
                &chain(0, 0x8000),
                &[6, 0xea, 0x60, 0x75, 0x30, 1],
                &[6, 0x10, 0x00, 0x75, 0x30, 8],
                &[6, 0x10, 0x00, 0x75, 0x30, 1],
            ]),
        ),
        (
            "asks",
            with(&[&answer, &[1, 11, 0, 0, 8, 1, 0, 0, 0, 0, 0, 0, 0]]),
        ),
        (
            "cut",
            with(&[&[0, 0, 5, 1, 0, 0, 0, 1], &[0, 0, 7, 0, 0, 0, 0, 0, 0, 0]]),
        ),
        (
            "writes",
            with(&[
                &chain(1, 100),
                &[3, 0x40, 0x40, 0, 0, 4, 1, 2, 3, 4],
                &[4, 1],
            ]),
        ),
    ]
}
