//! What is changed in a TCP header on its way back to the kernel.
use crate::{
    inspection::tcp::keep_known,
    mss,
    packet::{Transport, checksum::Sum, transport::tcp_options},
    packet_path::Job,
    port::L3_AT,
};

/// What is changed in a TCP header on its way back to the kernel.
pub(crate) struct Change {
    /// The header within the frame.
    tcp: std::ops::Range<usize>,
    partial: bool,
    what: Changed,
}

pub(crate) enum Changed {
    /// A SYN's MSS is clamped to this.
    Mss(u16),
    /// Only what a connection needs stays of an inspected one's; a SYN's MSS is clamped to this.
    Known { mss: Option<u16> },
    /// It acknowledges and offers what an inspected connection's session does.
    Receiver { acknowledgement: u32, window: u16 },
}

impl Change {
    pub(crate) fn new(job: &Job<'_>, what: Changed) -> Option<Self> {
        let Transport::Tcp(tcp) = job.packet.transport else {
            return None;
        };
        let begin = L3_AT + job.packet.ip.header_len;
        Some(Self {
            tcp: begin..begin + tcp.header_len,
            partial: job.frame.vnet.needs_csum(),
            what,
        })
    }

    pub(crate) fn receiver(job: &Job<'_>, acknowledgement: u32, window: u16) -> Option<Self> {
        Self::new(
            job,
            Changed::Receiver {
                acknowledgement,
                window,
            },
        )
    }

    pub(crate) fn apply(self, frame: &mut [u8]) {
        let tcp = &mut frame[self.tcp];
        match self.what {
            Changed::Mss(most) => {
                mss::clamp(tcp, most, self.partial);
            }
            Changed::Known { mss } => {
                keep_known(tcp, self.partial);
                if let Some(most) = mss {
                    mss::clamp(tcp, most, self.partial);
                }
            }
            Changed::Receiver {
                acknowledgement,
                window,
            } => receive_as(tcp, acknowledgement, window, self.partial),
        }
    }
}

/// Puts another acknowledgement and window into a TCP header, and takes out what the server says of
/// gaps (RFC 2018): they are none of the guest's.
fn receive_as(tcp: &mut [u8], acknowledgement: u32, window: u16, partial: bool) {
    const OPTION_SACK: u8 = 5;
    const NO_OPERATION: u8 = 1;
    let Some(field) = tcp.get(16..18).map(|f| u16::from_be_bytes([f[0], f[1]])) else {
        return;
    };
    let before = Sum::default().bytes(tcp).folded();
    tcp[8..12].copy_from_slice(&acknowledgement.to_be_bytes());
    tcp[14..16].copy_from_slice(&window.to_be_bytes());
    let sack = tcp_options(tcp).find(|(kind, ..)| *kind == OPTION_SACK);
    if let Some((_, at, len)) = sack {
        tcp[at..at + len].fill(NO_OPERATION);
    }
    if !partial {
        let after = Sum::default().bytes(tcp).folded();
        let field = slipgate_abi::checksum::update16(field, before, after);
        tcp[16..18].copy_from_slice(&field.to_be_bytes());
    }
}
