//! Sequence numbers of a connection that the kernel takes over.
use slipgate_abi::{Sequences, sequence::SendSpace};

use crate::inspection::tcp::Session;

impl Session {
    /// Where the connection stands. Means something once it was
    /// [`crate::inspection::tcp::Outcome::Released`].
    pub fn sequences(&self, now_ns: u64) -> Sequences {
        let inspected_end = self.next_expected();
        let sent_end = self.passed_end.map_or(inspected_end, |end| {
            if end.wrapping_sub(inspected_end) as i32 > 0 {
                end
            } else {
                inspected_end
            }
        });
        let sent = SendSpace {
            acknowledged: inspected_end,
            end: sent_end,
            window: distance(inspected_end, self.server.window_end),
            window_scale: self.server.window_scale.into(),
            ..SendSpace::default()
        };
        let received = SendSpace {
            acknowledged: self.guest_ack,
            end: self.server.next,
            window: distance(self.guest_ack, self.guest_window_end),
            window_scale: self.guest_window_scale().into(),
            ..SendSpace::default()
        };
        Sequences::released(sent, received, self.server.first, now_ns)
    }
}

/// How far a place lies ahead of another, 0 when it lies behind.
fn distance(from: u32, to: u32) -> u32 {
    u32::try_from(to.wrapping_sub(from) as i32).unwrap_or(0)
}
