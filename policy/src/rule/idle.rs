//! What does not count as activity of a VM.
use serde::{Deserialize, Serialize};

/// Packets that keep no VM busy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Idle {
    /// Whether TCP keep-alives and their answers do not count.
    pub ignores_keepalive: bool,
    /// Whether what the guest sends and is refused does not count.
    pub ignores_refused: bool,
}
