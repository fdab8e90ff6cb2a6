//! Puts the machine's PCI devices together.
use super::MachineError;
use crate::{
    layout::{self, Window},
    pci::{self, Windows},
};

/// The PCI root with all devices.
pub(super) fn root(mmio64: Option<Window>) -> Result<pci::Root, MachineError> {
    let range = |window: Window| window.start..window.end();
    let root = pci::Root::new(Windows {
        mmio32: range(layout::MMIO32),
        mmio64: mmio64.map_or(0..0, range),
    });
    Ok(root)
}
