//! Bounds on the packets that are held for a VM while it sleeps.
use serde::{Deserialize, Serialize};

/// How much of what comes for a sleeping VM is held, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Sleep {
    /// Most frames that are held; one may be a train of segments.
    pub packets: u32,
    /// Most bytes of these, from the IP header on.
    pub bytes: u32,
    /// Time for which each is held, seconds.
    pub patience_s: u32,
}

impl Sleep {
    /// The most that may be configured: frames that a TAP's queue has room for, 16 MiB, an hour.
    pub const MOST: Self = Self {
        packets: 1_000,
        bytes: 16 << 20,
        patience_s: 3_600,
    };
}

impl Default for Sleep {
    /// A minute is about as long as Linux goes on asking for a connection that nobody answers.
    fn default() -> Self {
        Self {
            packets: 128,
            bytes: 256 << 10,
            patience_s: 60,
        }
    }
}
