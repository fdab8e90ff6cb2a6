//! Messages between broker and metrics process.
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::{
    descriptors::{carries_descriptors, carries_none, try_map_all},
    engine::EngineInventory,
};

/// From the broker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToMetrics<F = OwnedFd> {
    /// First: what to show.
    Start(MetricsStart<F>),
    /// The answer to [`FromMetrics::Inventory`].
    Inventory(EngineInventory),
}

/// What to show, and where.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MetricsStart<F = OwnedFd> {
    /// The maps, in the order of their layout.
    pub maps: Vec<F>,
    /// The listening socket.
    pub listener: F,
    /// Whose VMs: a row of `OWNERS`.
    pub owner_row: u32,
    /// Level of messages on stderr.
    pub log: String,
}

/// From the metrics process.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromMetrics {
    /// A page of what the engine knows by name. One question at a time.
    Inventory {
        /// Where the page begins: 0, or [`EngineInventory::next`] of the one before.
        from: u64,
    },
}

impl<F> ToMetrics<F> {
    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<ToMetrics<G>, E> {
        Ok(match self {
            Self::Start(start) => ToMetrics::Start(MetricsStart {
                maps: try_map_all(start.maps, f)?,
                listener: f(start.listener)?,
                owner_row: start.owner_row,
                log: start.log,
            }),
            Self::Inventory(page) => ToMetrics::Inventory(page),
        })
    }
}

carries_descriptors!(ToMetrics);
carries_none!(FromMetrics);
