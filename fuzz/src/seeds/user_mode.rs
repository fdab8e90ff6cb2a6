//! Seeds of the targets of the user-mode engine: connections as guests have them, and drivers.
use slipgate_abi::tcp::Flags;

use super::Seeds;

/// What every connection begins with: a guest that scales, its SYN, and the host's connection.
fn opened() -> Vec<u8> {
    let (theirs, ours) = (0xffff_ff00_u32, 0x7fff_ff00_u32);
    let mut input = [theirs.to_be_bytes(), ours.to_be_bytes()].concat();
    // MSS 1460, a shift of 7, a window of 64,240; then room for 60,000 bytes.
    input.extend([3, 0x05, 0xb4, 7, 0xfa, 0xf0]);
    input.extend([5, 0xea, 0x60]);
    input.extend(acknowledged());
    input
}

/// The guest acknowledges all.
fn acknowledged() -> [u8; 5] {
    [4, 0xff, 0xff, 0x20, 0]
}

/// So much payload of the guest's, next in order, which the socket takes.
fn payload(len: u16, fin: bool) -> Vec<u8> {
    let mut step = vec![0];
    step.extend(len.to_be_bytes());
    step.extend([u8::from(fin), 1]);
    step
}

pub(super) fn tcp() -> Seeds {
    let opened = opened();
    let with = |steps: &[&[u8]]| [&opened[..], &steps.concat()].concat();
    let (serves, ends, sends) = ([6, 0x20, 0], [7], [8, 0xff, 0xff, 0]);
    let acknowledges = [9, 0xff, 0xff, 2];
    let waits = [11, 0xff, 0xff, 20];
    let reset = [&[1, 0, 0, 1, 0, 0, Flags::RST][..], &[0; 4]].concat();
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
                &sends,
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
                &sends,
                &acknowledged(),
            ]),
        ),
        (
            "both-end",
            with(&[&ends, &sends, &payload(0, true), &acknowledged(), &waits]),
        ),
        (
            "lost",
            with(&[&serves, &sends, &waits, &sends, &waits, &waits]),
        ),
        (
            "reset",
            with(&[&payload(1, false), &reset, &payload(1, false)]),
        ),
        ("silent", opened[..opened.len() - 5].to_vec()),
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
