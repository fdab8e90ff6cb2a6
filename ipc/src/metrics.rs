//! Messages between broker and metrics process.
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::{
    descriptors::{carries_descriptors, carries_none, maps_descriptors},
    engine::EngineInventory,
};

/// Message from the broker to the metrics process.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToMetrics<F = OwnedFd> {
    /// First message: maps, socket and settings.
    Start(MetricsStart<F>),
    /// Answer to [`FromMetrics::Inventory`]: all engines' inventories in one.
    Inventory(EngineInventory),
}

/// Settings that the metrics process starts with.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MetricsStart<F = OwnedFd> {
    /// The maps, in the order of their layout.
    pub maps: Vec<F>,
    /// Listening socket for HTTP.
    pub listener: F,
    /// Row in `OWNERS` whose VMs are shown.
    pub owner_rows: Vec<u32>,
    /// Keys of the VMs' labels that are shown.
    pub label_keys: Vec<String>,
    /// Level of messages on stderr.
    pub log: String,
}

/// Message from the metrics process to the broker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromMetrics {
    /// Request for a page of the engine's inventory, one at a time.
    Inventory {
        /// Where the page begins: 0, or [`EngineInventory::next`] of the one before.
        from: u64,
    },
}

maps_descriptors!(struct MetricsStart { maps: all, listener: fd, owner_rows, label_keys, log });
maps_descriptors!(enum ToMetrics { Start(start: nested), Inventory(page) });
carries_descriptors!(ToMetrics);
carries_none!(FromMetrics);
