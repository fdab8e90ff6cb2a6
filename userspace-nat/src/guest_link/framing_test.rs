use proptest::prelude::*;

use super::*;

fn stream_of(frames: &[Vec<u8>]) -> Vec<u8> {
    let mut queue = FrameQueue::default();
    for frame in frames {
        queue.push(frame, &[]);
    }
    queue.unsent().to_vec()
}

/// Passes a stream in pieces of these lengths, again and again, and returns the frames.
fn read(mut stream: &[u8], pieces: &[usize]) -> Result<Vec<Vec<u8>>, TooLong> {
    let mut reader = FrameReader::default();
    let mut frames = Vec::new();
    let mut pieces = pieces.iter().cycle();
    while !stream.is_empty() {
        let room = reader.room();
        assert!(!room.is_empty());
        let len = stream.len().min(room.len()).min(*pieces.next().unwrap());
        room[..len].copy_from_slice(&stream[..len]);
        reader.filled(len);
        stream = &stream[len..];
        loop {
            let said = reader.has_whole();
            let frame = reader.next_frame();
            assert_eq!(said, !matches!(frame, Ok(None)));
            match frame? {
                Some(frame) => frames.push(frame.to_vec()),
                None => break,
            }
        }
    }
    Ok(frames)
}

proptest! {
    #[test]
    fn however_a_stream_is_cut_its_frames_are_the_same(
        lengths in prop::collection::vec(prop_oneof![0..80usize, 1_400..1_600usize, Just(MOST_FRAME)], 1..20),
        pieces in prop::collection::vec(prop_oneof![1..9usize, 1..READ_LEN], 1..10),
    ) {
        let frames = lengths.iter().enumerate();
        let frames: Vec<_> = frames.map(|(nth, len)| vec![nth as u8; *len]).collect();
        let mut stream = Vec::new();
        for frame in &frames {
            stream.extend_from_slice(&(frame.len() as u32).to_be_bytes());
            stream.extend_from_slice(frame);
        }
        prop_assert_eq!(read(&stream, &pieces), Ok(frames));
    }
}

#[test]
fn a_byte_at_a_time() {
    let frames = [vec![1; 60], vec![], vec![2; MOST_FRAME]];
    let stream = stream_of(&frames);
    assert_eq!(read(&stream, &[1]).unwrap(), frames);
}

#[test]
fn a_length_that_no_frame_has_ends_it_after_the_frames_before() {
    for announced in [MOST_FRAME as u32 + 1, 1 << 31, u32::MAX] {
        let mut reader = FrameReader::default();
        let stream = [&stream_of(&[vec![7; 60]])[..], &announced.to_be_bytes()].concat();
        reader.room()[..stream.len()].copy_from_slice(&stream);
        reader.filled(stream.len());
        assert_eq!(reader.next_frame(), Ok(Some(&[7; 60][..])));
        assert!(reader.has_whole());
        assert_eq!(reader.next_frame(), Err(TooLong(announced)));
    }
}

#[test]
fn a_queue_takes_so_much_and_gives_room_back_as_it_is_sent() {
    let mut queue = FrameQueue::default();
    let frame = [5; 1_514];
    let mut pushed = 0;
    while queue.has_room(1, frame.len()) {
        queue.push(&frame[..54], &frame[54..]);
        pushed += 1;
    }
    let each = PREFIX_LEN + frame.len();
    assert_eq!(pushed, MOST_QUEUED / each);
    assert!(!queue.has_room(usize::MAX, usize::MAX));
    // Sent in pieces that end anywhere, with more behind: nothing grows, nothing is lost.
    let mut sent = Vec::new();
    for _ in 0..1_000 {
        let len = queue.unsent().len().min(10_007);
        sent.extend_from_slice(&queue.unsent()[..len]);
        queue.sent(len);
        while queue.has_room(1, frame.len()) {
            queue.push(&frame, &[]);
        }
        assert!(queue.bytes.len() <= MOST_QUEUED + COMPACT_AT);
    }
    let frames = read(&sent, &[4_096]).unwrap();
    assert_eq!(frames.len(), sent.len() / each);
    assert!(frames.iter().all(|it| *it == frame));
}
