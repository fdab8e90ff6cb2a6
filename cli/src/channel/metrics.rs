//! What broker and metrics process say to each other.
use serde::{Deserialize, Serialize};
use userspace_nat::control::NamesPage;

/// From the broker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum ToMetrics {
    /// First. Descriptors: the maps, and the listening socket.
    Start(MetricsStart),
    /// The answer to [`FromMetrics::Names`].
    Names { page: NamesPage },
}

/// What to show.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct MetricsStart {
    /// Whose VMs: a row of `OWNERS`.
    pub(crate) owner_row: u32,
    /// Level of messages on stderr.
    pub(crate) log: String,
}

/// From the metrics process.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum FromMetrics {
    /// What is known by name, from this place. One question at a time.
    Names { from: u64 },
}
