//! Links of guests that lose frames: what is sent again.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Direction,
    clients::tcp,
    frame::Packet,
    pump::Fate,
    servers::{TcpServer, TcpService},
    turns,
};

use crate::{
    Cell, Stand, WAIT,
    matrix::{at, matrix},
};

matrix! {
    a_burst_that_the_guests_link_loses_is_sent_again_once: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "the server's own TCP repairs it";
}

const STREAMS: u16 = 7000;
/// Bytes of the download, and of these what the guest's link carries before it loses some.
const STREAM_BYTES: u64 = 8_000_000;
const RUNNING_BYTES: u32 = 1_000_000;
/// Consecutive segments that are lost.
const BURST: usize = 20;
/// Downloads until one is not held up.
const ATTEMPTS: u64 = 20;
/// Half of the shortest retransmission timer: a machine that has let either end wait for longer may have
/// let the timer run out, by which all is sent again.
const HELD_UP: Duration = Duration::from_millis(100);

/// A frame of the download on the guest's link.
struct Seen {
    at: Instant,
    direction: Direction,
    /// Place of its data in the stream, bytes; empty for an acknowledgement.
    first: u32,
    end: u32,
}

/// What a link has carried, and lost.
#[derive(Default)]
struct Link {
    /// Sequence number of the stream's first byte.
    initial: Option<u32>,
    seen: Vec<Seen>,
    lost: Vec<(u32, u32)>,
    /// Place behind all that was sent so far.
    sent: u32,
}

impl Link {
    /// Looks at a frame of the download from or to `server`.
    fn carry(&mut self, direction: Direction, server: SocketAddr, frame: &[u8]) -> Fate {
        let Some(packet) = Packet::of_ethernet(frame) else {
            return Fate::Pass;
        };
        let remote = match direction {
            Direction::In => packet.source,
            Direction::Out => packet.destination,
        };
        let Some((sequence, _)) = packet.tcp_numbers().filter(|_| remote == server) else {
            return Fate::Pass;
        };
        let len = match direction {
            Direction::In => packet.payload().len() as u32,
            Direction::Out => 0,
        };
        let first = match len {
            0 => 0,
            _ => sequence.wrapping_sub(*self.initial.get_or_insert(sequence)),
        };
        let end = first + len;
        if self.initial.is_some() {
            let at = Instant::now();
            self.seen.push(Seen {
                at,
                direction,
                first,
                end,
            });
        }
        let is_new = len > 0 && first == self.sent;
        self.sent = self.sent.max(end);
        if is_new && first >= RUNNING_BYTES && self.lost.len() < BURST {
            self.lost.push((first, end));
            return Fate::Lose;
        }
        Fate::Pass
    }

    /// The places of data that had been sent before, whether it was lost or not.
    fn sent_again(&self) -> Vec<(u32, u32)> {
        let mut sent = 0;
        let mut again = Vec::new();
        for seen in &self.seen {
            if seen.first < sent && seen.first < seen.end {
                again.push((seen.first, seen.end.min(sent)));
            }
            sent = sent.max(seen.end);
        }
        again
    }

    /// The longest time in which one end of the link sent nothing.
    fn longest_silence(&self) -> Duration {
        let of = |direction: Direction| {
            let seen = self.seen.iter().filter(|seen| seen.direction == direction);
            let times: Vec<_> = seen.map(|seen| seen.at).collect();
            times.windows(2).map(|pair| pair[1] - pair[0]).max()
        };
        let silences = [Direction::In, Direction::Out].map(of);
        silences.into_iter().flatten().max().unwrap_or_default()
    }
}

fn a_burst_that_the_guests_link_loses_is_sent_again_once(cell: Cell) {
    let _turn = turns::alone("a machine that is held up sends again by its timers");
    let stand = Stand::of(cell, &["--dns", "none"]);
    let server = at(cell.server(), STREAMS);
    let place = (cell.server(), STREAMS);
    let _streams = TcpServer::start(&stand.world.net, place, TcpService::Streams).unwrap();
    for attempt in 1..=ATTEMPTS {
        let link = Arc::new(Mutex::new(Link::default()));
        let watched = link.clone();
        let filter = move |direction, _: &_, frame: &[u8]| {
            let mut link = watched.lock().unwrap_or_else(PoisonError::into_inner);
            link.carry(direction, server, frame)
        };
        stand.guest.set_filter(Some(Box::new(filter))).unwrap();
        // Each byte of it is checked.
        let download = stand.run(|| tcp::download(server, STREAM_BYTES, attempt, WAIT));
        stand.guest.set_filter(None).unwrap();
        download.unwrap();
        let link = link.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(link.lost.len(), BURST);
        let silence = link.longest_silence();
        let again = link.sent_again();
        if silence > HELD_UP {
            continue;
        }
        let bytes = |ranges: &[(u32, u32)]| ranges.iter().map(|(first, end)| end - first).sum();
        let (lost, repeated): (u32, u32) = (bytes(&link.lost), bytes(&again));
        for (first, end) in &link.lost {
            let parts = again
                .iter()
                .map(|(from, to)| to.min(end).saturating_sub(*from.max(first)));
            assert_eq!(
                parts.sum::<u32>(),
                end - first,
                "{first} to {end} once: {again:?}"
            );
        }
        assert!(
            2 * repeated <= 3 * lost,
            "{repeated} bytes were sent again of {lost} lost ones"
        );
        return;
    }
    panic!("each of {ATTEMPTS} downloads was held up for more than {HELD_UP:?}");
}
