use std::io::Read as _;

use nix::sys::socket::{setsockopt, sockopt};
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::guest_buffers::fake::{LEN, MEMORY, byte, memory, pair};

/// A rest in buffers of these lengths, far from each other, whose bytes go on from `from`.
fn rest(memory: &Arc<GuestMemoryMmap>, from: usize, lens: &[usize]) -> Rest {
    let (mut at, mut address) = (from, MEMORY);
    let mut buffers = Vec::new();
    for len in lens {
        let bytes: Vec<u8> = (at..at + len).map(byte).collect();
        memory.write_slice(&bytes, GuestAddress(address)).unwrap();
        buffers.push((GuestAddress(address), *len as u32));
        at += len;
        address += 2 * *len as u64;
    }
    Rest::new(memory, buffers).unwrap()
}

#[test]
fn each_part_is_copied_and_sent_as_it_is() {
    let memory = memory();
    let here: Vec<u8> = (0..100).map(byte).collect();
    let rest = rest(&memory, 100, &[1, 500, 3, 4_000]);
    let payload = Payload::new(&here, Some(&rest));
    assert_eq!((payload.len(), payload.is_empty()), (4_604, false));
    let mut sent = 0;
    for (from, to) in [
        (0, 4_604),
        (0, 100),
        (0, 101),
        (50, 700),
        (100, 101),
        (101, 601),
        (300, 400),
        (604, 4_604),
        (4_604, 4_604),
    ] {
        let expected: Vec<u8> = (from..to).map(byte).collect();
        let part = payload.get(from..to).unwrap();
        assert_eq!(part.len(), to - from);
        assert_eq!(*part.to_box().unwrap(), expected, "{from}..{to}");
        // A part of a part.
        let less = part.get(part.len() / 2..part.len()).unwrap();
        assert_eq!(*less.to_box().unwrap(), expected[expected.len() / 2..]);
        let (ours, mut theirs) = pair();
        assert_eq!(part.send(&ours), Ok(expected.len()));
        let mut got = vec![0; 5_000];
        let len = if from == to {
            0
        } else {
            theirs.read(&mut got).unwrap()
        };
        assert_eq!(got[..len], expected, "{from}..{to}");
        sent += to - from.max(100).min(to);
        assert_eq!(rest.sent(), sent, "{from}..{to}");
    }
    assert!(payload.get(0..4_605).is_none());
    let mut whole = vec![0; rest.len()];
    assert!(rest.copy_to(&mut whole));
    assert_eq!(whole, (100..4_604).map(byte).collect::<Vec<_>>());
    assert!(!rest.copy_to(&mut whole[1..]));
}

#[test]
fn a_socket_takes_a_part_which_is_counted() {
    let memory = memory();
    let rest = rest(&memory, 0, &[60_000; 8]);
    let (ours, mut theirs) = pair();
    setsockopt(&ours, sockopt::SndBuf, &20_000).unwrap();
    let mut got = Vec::new();
    while got.len() < rest.len() {
        let payload = Payload::new(&[], Some(&rest));
        let left = payload.get(got.len()..payload.len()).unwrap();
        let taken = left.send(&ours).unwrap();
        assert!(taken > 0);
        let mut some = vec![0; taken];
        theirs.read_exact(&mut some).unwrap();
        got.extend(some);
        assert_eq!(rest.sent(), got.len());
    }
    assert!(got.iter().enumerate().all(|(at, it)| *it == byte(at)));
    drop(theirs);
    let gone = Payload::new(&[1], Some(&rest)).send(&ours);
    assert_eq!(gone, Err(Errno::EPIPE));
}

#[test]
fn buffers_out_of_memory_and_too_many_are_refused() {
    let memory = memory();
    let end = MEMORY + 2 * LEN as u64;
    let refused = |buffers: Vec<(u64, u32)>| {
        let buffers: Vec<Buffer> = buffers
            .into_iter()
            .map(|(address, len)| (GuestAddress(address), len))
            .collect();
        Rest::new(&memory, buffers.clone()).is_err_and(|unused| unused == buffers)
    };
    assert!(!refused(vec![(MEMORY, 1), (end - 1, 1)]));
    assert!(refused(vec![(MEMORY, 1), (end - 1, 2)]));
    assert!(refused(vec![(MEMORY - 1, 2)]));
    assert!(refused(vec![(u64::MAX, 1), (MEMORY, 1)]));
    assert!(refused(vec![(u64::MAX - 3, 100)]));
    assert!(refused(vec![(MEMORY, u32::MAX)]));
    // In two regions: it is copied.
    assert!(refused(vec![(MEMORY + LEN as u64 - 1, 2)]));
    assert!(!refused(vec![(MEMORY, 1); MOST_BUFFERS]));
    assert!(refused(vec![(MEMORY, 1); MOST_BUFFERS + 1]));
}

#[test]
fn the_memory_stays_as_long_as_the_rest() {
    let memory = memory();
    let rest = rest(&memory, 0, &[3_000]);
    drop(memory);
    let (ours, mut theirs) = pair();
    assert_eq!(Payload::new(&[], Some(&rest)).send(&ours), Ok(3_000));
    let mut got = [0; 3_000];
    theirs.read_exact(&mut got).unwrap();
    assert!(got.iter().enumerate().all(|(at, it)| *it == byte(at)));
}
