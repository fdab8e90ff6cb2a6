use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use slipgate_abi::segment::{self, Segments};

use super::*;
use crate::{fake, packet::build, port::single};

/// Gateway and guest, of either family.
const ENDS: [[IpAddr; 2]; 2] = [
    [
        IpAddr::V4(Ipv4Addr::new(10, 0, 2, 2)),
        IpAddr::V4(Ipv4Addr::new(10, 0, 2, 15)),
    ],
    [
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2)),
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x15)),
    ],
];
const RST: u8 = Flags::RST;

#[derive(Clone, Debug)]
struct Tcp {
    sequence: u32,
    acknowledgement: u32,
    window: u16,
    flags: u8,
    /// Options, a multiple of four bytes.
    options: Vec<u8>,
    payload: usize,
}

fn packet([gateway, guest]: [IpAddr; 2], tcp: &Tcp) -> Vec<u8> {
    let mut packet = Vec::new();
    build::ip(&mut packet, gateway, guest, 6, |out| {
        let begin = out.len();
        out.extend_from_slice(&[0, 80, 0x80, 0]);
        out.extend_from_slice(&tcp.sequence.to_be_bytes());
        out.extend_from_slice(&tcp.acknowledgement.to_be_bytes());
        let offset = 5 + tcp.options.len() as u8 / 4;
        out.extend_from_slice(&[offset << 4, tcp.flags]);
        out.extend_from_slice(&tcp.window.to_be_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&tcp.options);
        out.extend((0..tcp.payload).map(|at| (tcp.sequence as usize + at) as u8));
        let sum = Sum::default().pseudo(gateway, guest, 6, out.len() - begin);
        let sum = sum.bytes(&out[begin..]).finish();
        out[begin + 16..begin + 18].copy_from_slice(&sum.to_be_bytes());
    });
    packet
}

/// Passes each packet to `send`, with segments joined where possible, its offload header and its
/// count after segmentation. `buffer` holds joined frames.
fn join<'p>(
    packets: impl Iterator<Item = &'p [u8]>,
    buffer: &mut Vec<u8>,
    mut send: impl FnMut(VirtioNetHdr, &[u8], Segments),
) {
    let mut packets = packets.peekable();
    while let Some(first) = packets.next() {
        let mut run = Run::begin(first);
        buffer.clear();
        while let Some(next) = packets.next_if(|next| run.takes(next)) {
            if buffer.is_empty() {
                buffer.extend_from_slice(first);
            }
            buffer.extend_from_slice(&next[run.headers_len()..]);
            run.add(next);
        }
        if buffer.is_empty() {
            send(VirtioNetHdr::default(), first, single(first.len()));
            continue;
        }
        let offload = run.finish(buffer);
        let len = buffer.len() as u32;
        let counted = segment::count(len, run.headers_len() as u32, offload.gso_size.into());
        send(offload, buffer, counted);
    }
}

/// The frames: their offload headers, lengths and what they are cut into again.
fn joined(packets: &[Vec<u8>]) -> Vec<(VirtioNetHdr, usize, Vec<Vec<u8>>)> {
    let mut frames = Vec::new();
    let (mut buffer, mut counted) = (vec![7; 3], (0, 0));
    let all = packets.iter().map(Vec::as_slice);
    join(all, &mut buffer, |offload, frame, segments| {
        counted.0 += segments.packets;
        counted.1 += segments.bytes;
        frames.push((offload, frame.len(), fake::segments(offload, frame)));
    });
    let bytes: usize = packets.iter().map(Vec::len).sum();
    assert_eq!(counted, (packets.len() as u64, bytes as u64));
    frames
}

#[test]
fn a_full_window_goes_in_frames_as_long_as_they_may_be() {
    for ends in ENDS {
        let segment = |nth: u32| Tcp {
            // Over the end of the sequence space.
            sequence: 0xffff_0000_u32.wrapping_add(nth * 1_440),
            acknowledgement: 5,
            window: 1_000,
            flags: Flags::ACK,
            options: Vec::new(),
            payload: 1_440,
        };
        let mut packets: Vec<_> = (0..60).map(|nth| packet(ends, &segment(nth))).collect();
        let last = Tcp {
            payload: 17,
            flags: Flags::ACK | PSH | Flags::FIN,
            ..segment(60)
        };
        packets.push(packet(ends, &last));
        let frames = joined(&packets);
        let lengths: Vec<_> = frames.iter().map(|(_, len, _)| *len).collect();
        let headers_len = Version::of(ends[0]).header_len() + 20;
        let longest = headers_len + 45 * 1_440;
        assert_eq!(lengths, [longest, headers_len + 15 * 1_440 + 17]);
        assert!((MAX_LEN - 1_440 + 1..=MAX_LEN).contains(&longest));
        assert!(frames.iter().all(|(offload, ..)| offload.gso_size == 1_440));
        let cut: Vec<_> = frames.into_iter().flat_map(|(.., cut)| cut).collect();
        assert_eq!(cut, packets);
    }
}

#[test]
fn segments_with_timestamps_of_one_tick_go_together() {
    for ends in ENDS {
        let segment = |nth: u32, tick: u8| {
            let tcp = Tcp {
                sequence: nth * 1_428,
                acknowledgement: 5,
                window: 1_000,
                flags: Flags::ACK,
                options: vec![1, 1, 8, 10, 0, 0, 0, tick, 0, 0, 0, 9],
                payload: 1_428,
            };
            packet(ends, &tcp)
        };
        let packets: Vec<_> = [1, 1, 1, 2, 2]
            .into_iter()
            .zip(0..)
            .map(|(tick, nth)| segment(nth, tick))
            .collect();
        let frames = joined(&packets);
        let headers_len = Version::of(ends[0]).header_len() + 32;
        let lengths: Vec<_> = frames.iter().map(|(_, len, _)| *len).collect();
        assert_eq!(lengths, [3, 2].map(|count| headers_len + count * 1_428));
        assert!(
            frames
                .iter()
                .all(|(offload, ..)| usize::from(offload.hdr_len) == 14 + headers_len)
        );
        let cut: Vec<_> = frames.into_iter().flat_map(|(.., cut)| cut).collect();
        assert_eq!(cut, packets);
    }
}

/// Difference of a segment from a plain continuation of the one before.
#[derive(Clone, Copy, Debug)]
enum Next {
    Goes,
    Gap,
    Acknowledges,
    Window,
    /// Another timestamp.
    Tick,
    Flags(u8),
}

proptest! {
    /// Joined and segmented again, any packets stay the same, in the same order.
    #[test]
    fn what_is_joined_is_cut_into_what_it_was(
        ends in prop::sample::select(&ENDS[..]),
        first in any::<u32>(),
        options in prop_oneof![
            Just(Vec::new()),
            Just([1, 1, 8, 10].into_iter().chain(0..8).collect::<Vec<u8>>()),
        ],
        run in prop::collection::vec((prop_oneof![
            12 => Just(Next::Goes),
            1 => Just(Next::Gap),
            1 => Just(Next::Acknowledges),
            1 => Just(Next::Window),
            1 => Just(Next::Tick),
            1 => prop::sample::select(vec![
                Flags::ACK | PSH, Flags::ACK | Flags::FIN, Flags::ACK | RST, RST, Flags::SYN, 0,
            ]).prop_map(Next::Flags),
        ], prop_oneof![8 => Just(100_usize), 1 => 0_usize..100, 1 => 101_usize..1_460]), 1..80),
    ) {
        let mut tcp = Tcp {
            sequence: first,
            acknowledgement: 5,
            window: 1_000,
            flags: Flags::ACK,
            options,
            payload: 0,
        };
        let mut packets = Vec::new();
        for (next, payload) in run {
            tcp.sequence = tcp.sequence.wrapping_add(tcp.payload as u32);
            tcp.payload = payload;
            tcp.flags = Flags::ACK;
            match next {
                Next::Goes => {}
                Next::Gap => tcp.sequence = tcp.sequence.wrapping_add(1),
                Next::Acknowledges => tcp.acknowledgement += 1,
                Next::Window => tcp.window += 1,
                Next::Tick => {
                    if let Some(last) = tcp.options.last_mut() {
                        *last = last.wrapping_add(1);
                    }
                }
                Next::Flags(flags) => tcp.flags = flags,
            }
            packets.push(packet(ends, &tcp));
        }
        let cut: Vec<_> = joined(&packets).into_iter().flat_map(|(.., cut)| cut).collect();
        prop_assert_eq!(cut, packets);
    }
}
