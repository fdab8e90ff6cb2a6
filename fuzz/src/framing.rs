//! Ethernet frames on a stream, each preceded by its length, and what is made of TCP segments that
//! follow each other.
//!
//! Input: `cuts (1) | cut (2) … | stream …`: how many bytes come at a time, again and again.
use userspace_nat::{
    guest_link::{
        framing::{FrameQueue, FrameReader, MOST_FRAME, TooLong},
        joining, segmentation,
    },
    port::{VNET_LEN, VirtioNetHdr},
};

use crate::tape::Tape;

/// Frames of a stream, and the length that ended it, if one did.
type Read = (Vec<Vec<u8>>, Option<TooLong>);

/// Passes a stream, whole and in pieces.
pub fn framing(input: &[u8]) {
    let mut tape = Tape::new(input);
    let cuts: Vec<_> = (0..tape.u8() % 16).map(|_| tape.u16()).collect();
    let stream = tape.rest();
    let whole = read(stream, &[u16::MAX]);
    let cut = read(stream, &cuts);
    assert_eq!(whole, cut, "however it is cut");

    // What is queued and sent in pieces comes out again.
    let mut queue = FrameQueue::default();
    let mut sent = Vec::new();
    for frame in &whole.0 {
        while !queue.has_room(1, frame.len()) {
            send(&mut queue, &cuts, &mut sent);
        }
        queue.push(frame, &[]);
    }
    while !queue.unsent().is_empty() {
        send(&mut queue, &cuts, &mut sent);
    }
    assert_eq!(read(&sent, &[u16::MAX]).0, whole.0);
    // What one buffer holds.
    if sent.len() <= MOST_FRAME {
        joined_and_segmented(&sent, &whole.0);
    }
}

/// Joins what can be, and segments it again: the same frames, but for checksums and what has no meaning
/// (identification, urgent pointer).
fn joined_and_segmented(stream: &[u8], frames: &[Vec<u8>]) {
    let mut queue = FrameQueue::default();
    let mut into = vec![0; VNET_LEN + MOST_FRAME];
    let mut reader = FrameReader::default();
    reader.room()[..stream.len()].copy_from_slice(stream);
    reader.filled(stream.len());
    while let Ok(Some(frame)) = reader.next_frame() {
        let len = VNET_LEN + frame.len();
        into[VNET_LEN..len].copy_from_slice(frame);
        let end = joining::join(&mut reader, &mut into, len);
        let (vnet, frame) = into[..end].split_first_chunk().expect("a header");
        let vnet = VirtioNetHdr::decode(vnet);
        assert!(segmentation::push(&mut queue, vnet, frame));
    }
    let again = read(queue.unsent(), &[u16::MAX]).0;
    assert_eq!(again.len(), frames.len());
    for (again, frame) in again.iter().zip(frames) {
        assert_eq!(comparable(again), comparable(frame));
    }
}

/// A frame without what joining may change.
fn comparable(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    for place in [18..20, 24..26, 50..54] {
        if let Some(bytes) = frame.get_mut(place) {
            bytes.fill(0);
        }
    }
    frame
}

fn send(queue: &mut FrameQueue, cuts: &[u16], sent: &mut Vec<u8>) {
    let len = cuts.iter().copied().max().unwrap_or(u16::MAX).max(1_000);
    let len = queue.unsent().len().min(len.into());
    sent.extend_from_slice(&queue.unsent()[..len]);
    queue.sent(len);
}

fn read(mut stream: &[u8], cuts: &[u16]) -> Read {
    let mut reader = FrameReader::default();
    let mut frames = Vec::new();
    let mut cuts = cuts.iter().cycle();
    while !stream.is_empty() {
        let len = cuts
            .next()
            .map_or(usize::MAX, |cut| usize::from(*cut).max(1));
        let room = reader.room();
        assert!(!room.is_empty(), "no whole frame, so there is room");
        let len = len.min(stream.len()).min(room.len());
        room[..len].copy_from_slice(&stream[..len]);
        reader.filled(len);
        stream = &stream[len..];
        loop {
            match reader.next_frame() {
                Ok(None) => break,
                Ok(Some(frame)) => {
                    assert!(frame.len() <= MOST_FRAME);
                    frames.push(frame.to_vec());
                }
                Err(too_long) => {
                    assert!(too_long.0 as usize > MOST_FRAME);
                    return (frames, Some(too_long));
                }
            }
        }
    }
    (frames, None)
}
