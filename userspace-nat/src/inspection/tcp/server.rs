//! State of an inspected connection's server.
use crate::inspection::tcp::{Options, Received, advance, is_after};

/// Smaller is taken for this (RFC 9293 section 3.7.1 has 536 where nothing is said).
const MIN_MSS: u16 = 64;
const DEFAULT_MSS: u16 = 536;

/// State of the server, from its segments.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Server {
    /// Sequence number of its first byte.
    pub(super) first: u32,
    /// Sequence number after the last byte that it sent.
    pub(super) next: u32,
    /// Sequence number at which its window ends.
    pub(super) window_end: u32,
    pub(super) window_scale: u8,
    /// Whether both sides scale their windows.
    pub(super) scales: bool,
    pub(super) mss: u16,
    /// Whether both sides use timestamps.
    pub(super) has_time: bool,
    /// Newest timestamp of the server.
    pub(super) time: u32,
}

impl Server {
    /// Creates the state from the server's SYN-ACK and the options of the guest's SYN.
    pub(super) fn opens(segment: &Received<'_>, guest: &Options) -> Self {
        let options = segment.options;
        // RFC 7323: both must have offered.
        let window_scale = guest.window_scale.and(options.window_scale);
        let time = guest.time.and(options.time);
        Self {
            first: segment.sequence.wrapping_add(1),
            next: segment
                .sequence
                .wrapping_add(1 + segment.payload.len() as u32),
            window_end: segment
                .acknowledgement
                .wrapping_add(u32::from(segment.window)),
            window_scale: window_scale.unwrap_or(0),
            scales: window_scale.is_some(),
            mss: options.mss.unwrap_or(DEFAULT_MSS).max(MIN_MSS),
            has_time: time.is_some(),
            time: time.map_or(0, |(value, _)| value),
        }
    }

    /// Takes in where it is: of a segment in the guest's window only.
    pub(super) fn note(&mut self, segment: &Received<'_>) {
        let next = segment.sequence.wrapping_add(segment.sequence_len());
        advance(&mut self.next, next);
        if let Some((value, _)) = segment.options.time {
            advance(&mut self.time, value);
        }
    }

    /// Takes the window of a segment that is no older than the last.
    pub(super) fn note_window(&mut self, segment: &Received<'_>) {
        let scale = if segment.is_syn() {
            0
        } else {
            self.window_scale
        };
        let window = u32::from(segment.window) << scale;
        let end = segment.acknowledgement.wrapping_add(window);
        if is_after(end, self.window_end) || window == 0 {
            self.window_end = end;
        }
    }
}
