use std::io::Write as _;

use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::guest_buffers::fake::{LEN, MEMORY, byte, memory, pair};

/// Bytes of headers.
const AT: usize = 66;

fn space(
    memory: &Arc<GuestMemoryMmap>,
    buffers: &[(u64, u32)],
    most: usize,
) -> Result<Space, Parts> {
    let buffers = buffers.iter().map(|(at, len)| (GuestAddress(*at), *len));
    let parts = Parts {
        buffers: buffers.collect(),
        heads: vec![(7, 1)],
        from: 3,
        at: AT,
    };
    Space::new(memory, parts, most)
}

#[test]
fn bytes_come_behind_the_place_of_the_headers_and_no_others_change() {
    for skipped in [0, 10, 3_000] {
        let memory = memory();
        memory
            .write_slice(&[0xee; LEN], GuestAddress(MEMORY))
            .unwrap();
        // Headers end in the second of them.
        let buffers = [
            (MEMORY + 100, 60),
            (MEMORY + 1_000, 500),
            (MEMORY + 10_000, 5_000),
        ];
        let space = space(&memory, &buffers, 5_000).unwrap();
        let (ours, mut theirs) = pair();
        let sent: Vec<u8> = (0..skipped + 2_000).map(byte).collect();
        theirs.write_all(&sent).unwrap();
        let mut before = vec![0; skipped];
        let got = space.receive(&ours, &mut before, MsgFlags::MSG_DONTWAIT);
        assert_eq!(got, Ok(sent.len()));
        assert_eq!(before, sent[..skipped]);
        let mut payload = vec![0; 2_000];
        assert!(space.copy_to(&mut payload));
        assert_eq!(payload, sent[skipped..]);
        let mut expected = vec![0xee; LEN];
        let in_second = 500 - (AT - 60);
        expected[1_000 + AT - 60..1_500].copy_from_slice(&payload[..in_second]);
        expected[10_000..][..2_000 - in_second].copy_from_slice(&payload[in_second..]);
        let mut all = vec![0; LEN];
        memory.read_slice(&mut all, GuestAddress(MEMORY)).unwrap();
        assert!(all == expected, "others changed");
        assert!(!space.copy_to(&mut [0; 5_001]));
    }
}

#[test]
fn no_more_come_than_there_is_room_for() {
    let memory = memory();
    let space = space(&memory, &[(MEMORY, 9_000)], 1_000).unwrap();
    let (ours, mut theirs) = pair();
    theirs.write_all(&[1; 4_000]).unwrap();
    let flags = MsgFlags::MSG_DONTWAIT;
    assert_eq!(space.receive(&ours, &mut [], flags), Ok(1_000));
    assert_eq!(space.receive(&ours, &mut [0; 10], flags), Ok(1_010));
    let mut behind = [9; 1];
    let place = GuestAddress(MEMORY + (AT + 1_000) as u64);
    memory.read_slice(&mut behind, place).unwrap();
    assert_eq!(behind, [0]);
    space.receive(&ours, &mut [0; 3_000], flags).unwrap();
    let empty = space.receive(&ours, &mut [], flags);
    assert_eq!(empty, Err(Errno::EAGAIN));
    drop(theirs);
    assert_eq!(space.receive(&ours, &mut [], flags), Ok(0));
}

#[test]
fn what_is_not_in_memory_or_has_no_room_is_refused_with_its_lists() {
    let memory = memory();
    let end = MEMORY + 2 * LEN as u64;
    let refused = |buffers: &[(u64, u32)], most: usize| match space(&memory, buffers, most) {
        Ok(_) => false,
        Err(parts) => {
            assert_eq!(
                (parts.buffers.len(), parts.heads),
                (buffers.len(), vec![(7, 1)])
            );
            true
        }
    };
    assert!(!refused(&[(MEMORY, 66), (end - 100, 100)], 100));
    assert!(refused(&[(MEMORY, 66), (end - 100, 100)], 101));
    assert!(refused(&[(MEMORY, 66), (end - 100, 101)], 100));
    assert!(refused(&[(MEMORY - 1, 1_000)], 100));
    assert!(refused(&[(u64::MAX - 3, 1_000)], 100));
    assert!(refused(&[(MEMORY + LEN as u64 - 1, 1_000)], 100));
    assert!(!refused(&[(MEMORY, 100); MOST_BUFFERS], 1_000));
    assert!(refused(&[(MEMORY, 100); MOST_BUFFERS + 1], 1_000));
}

#[test]
fn the_memory_stays_as_long_as_the_space() {
    let memory = memory();
    let space = space(&memory, &[(MEMORY, 2_000)], 500).unwrap();
    drop(memory);
    let (ours, mut theirs) = pair();
    theirs.write_all(b"payload").unwrap();
    assert_eq!(space.receive(&ours, &mut [], MsgFlags::empty()), Ok(7));
    let mut got = [0; 7];
    assert!(space.copy_to(&mut got));
    assert_eq!(&got, b"payload");
    let parts = space.into_parts();
    assert_eq!((parts.heads, parts.from, parts.at), (vec![(7, 1)], 3, AT));
}
