//! TCP options that a session must know.
use crate::packet::transport::{OPTION_MSS, OPTION_TIMESTAMPS, tcp_options};

/// Option kind of the window scale (RFC 7323 section 2).
const OPTION_WINDOW_SCALE: u8 = 3;
/// RFC 7323 section 2.3.
const MAX_WINDOW_SCALE: u8 = 14;

/// Options of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// Maximum segment size.
    pub mss: Option<u16>,
    /// Window scale.
    pub window_scale: Option<u8>,
    /// Timestamp value and echo reply.
    pub time: Option<(u32, u32)>,
}

impl Options {
    /// Those of a TCP header.
    pub fn parse(header: &[u8]) -> Self {
        let mut options = Self::default();
        for (kind, at, len) in tcp_options(header) {
            let word = |at: usize| {
                header
                    .get(at..at + 4)
                    .and_then(|b| b.first_chunk())
                    .map_or(0, |b| u32::from_be_bytes(*b))
            };
            match (kind, len) {
                (OPTION_MSS, 4) => {
                    options.mss = Some(u16::from_be_bytes([header[at + 2], header[at + 3]]));
                }
                (OPTION_WINDOW_SCALE, 3) => {
                    options.window_scale = Some(header[at + 2].min(MAX_WINDOW_SCALE));
                }
                (OPTION_TIMESTAMPS, 10) => options.time = Some((word(at + 2), word(at + 6))),
                _ => {}
            }
        }
        options
    }
}
