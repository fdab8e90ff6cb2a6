//! TCP options that a session must know.
use slipgate_abi::{checksum::update16, tcp::Flags};

use crate::packet::{
    checksum::Sum,
    transport::{OPTION_MSS, OPTION_TIMESTAMPS, TCP_HEADER_LEN, tcp_options},
};

const NO_OPERATION: u8 = 1;
/// Option kind of SACK-permitted (RFC 2018); `OPTION_SACK` is that of SACK.
const OPTION_SACK_PERMITTED: u8 = 4;
const OPTION_SACK: u8 = 5;

/// Option kind of the window scale (RFC 7323 section 2).
const OPTION_WINDOW_SCALE: u8 = 3;
/// Largest window scale (RFC 7323 section 2.3).
const MAX_WINDOW_SCALE: u8 = 14;

/// Removes from a guest's header everything that its connection does not need. The rest would reach
/// the server unread: other options (of MPTCP, TCP Fast Open, unknown ones), what lies behind their
/// end, the urgent pointer, reserved bits. `partial`: the checksum field holds the pseudo-header's
/// sum.
pub(crate) fn keep_known(header: &mut [u8], partial: bool) {
    let mut kept = [NO_OPERATION; 40];
    let (Some(flags), Some(len)) = (
        header.get(13).copied(),
        header.len().checked_sub(TCP_HEADER_LEN),
    ) else {
        return;
    };
    let before = Sum::default().bytes(header).folded();
    let is_syn = flags & Flags::SYN != 0;
    for (kind, at, len) in tcp_options(header) {
        let is_kept = match (kind, len) {
            (OPTION_MSS, 4) | (OPTION_WINDOW_SCALE, 3) | (OPTION_SACK_PERMITTED, 2) => is_syn,
            (OPTION_SACK, _) => !is_syn && len >= 10 && len % 8 == 2,
            (OPTION_TIMESTAMPS, 10) => true,
            _ => false,
        };
        let to = at - TCP_HEADER_LEN;
        if is_kept
            && let (Some(to), Some(from)) = (kept.get_mut(to..to + len), header.get(at..at + len))
        {
            to.copy_from_slice(from);
        }
    }
    let Some(kept) = kept.get(..len) else {
        return;
    };
    header[TCP_HEADER_LEN..].copy_from_slice(kept);
    header[12] &= 0xf0;
    header[18..20].fill(0);
    if !partial {
        let field = u16::from_be_bytes([header[16], header[17]]);
        let after = Sum::default().bytes(header).folded();
        let field = update16(field, before, after);
        header[16..18].copy_from_slice(&field.to_be_bytes());
    }
}

/// A SYN's header with its options one each, in one order, as most senders have them; nothing is
/// echoed by a SYN (RFC 7323 section 3.2).
pub(super) fn rebuild_syn(tcp_header: &[u8]) -> Option<Box<[u8]>> {
    let options = Options::parse(tcp_header);
    let mut header = tcp_header.get(..TCP_HEADER_LEN)?.to_vec();
    if let Some(mss) = options.mss {
        header.extend_from_slice(&[OPTION_MSS, 4]);
        header.extend_from_slice(&mss.to_be_bytes());
    }
    match options.sack_permitted {
        true => header.extend_from_slice(&[OPTION_SACK_PERMITTED, 2]),
        false if options.time.is_some() => header.extend_from_slice(&[NO_OPERATION; 2]),
        false => {}
    }
    if let Some((value, _)) = options.time {
        header.extend_from_slice(&[OPTION_TIMESTAMPS, 10]);
        header.extend_from_slice(&value.to_be_bytes());
        header.extend_from_slice(&[0; 4]);
    } else if options.sack_permitted {
        header.extend_from_slice(&[NO_OPERATION; 2]);
    }
    if let Some(scale) = options.window_scale {
        header.extend_from_slice(&[NO_OPERATION, OPTION_WINDOW_SCALE, 3, scale]);
    }
    header[8..12].fill(0);
    header[12] = (header.len() as u8 / 4) << 4;
    header[18..20].fill(0);
    Some(header.into())
}

/// TCP options of a segment that a session uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// Maximum segment size, bytes.
    pub mss: Option<u16>,
    /// Shift count of the window scale.
    pub window_scale: Option<u8>,
    /// Whether selective acknowledgements are permitted.
    pub sack_permitted: bool,
    /// Timestamp value and echo reply.
    pub time: Option<(u32, u32)>,
}

impl Options {
    /// Parses the options of a TCP header.
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
                (OPTION_SACK_PERMITTED, 2) => options.sack_permitted = true,
                (OPTION_TIMESTAMPS, 10) => options.time = Some((word(at + 2), word(at + 6))),
                _ => {}
            }
        }
        options
    }
}
