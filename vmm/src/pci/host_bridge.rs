//! Device 0: the host bridge. It decodes nothing; operating systems probe for it before they use
//! PCI.
use super::{
    Paused, PciDevice, Window,
    config::{ConfigSpace, Identity},
};
use crate::snapshot::{FunctionState, SnapshotError};

/// Host bridge of the bus.
pub(super) struct HostBridge(ConfigSpace);

impl HostBridge {
    pub(super) fn new() -> Self {
        Self(ConfigSpace::new(Identity {
            // Red Hat's id for a PCI Express host bridge without registers of its own.
            vendor: 0x1b36,
            device: 0x0008,
            revision: 0,
            class: 0x06_00_00,
            subsystem_vendor: 0,
            subsystem: 0,
        }))
    }
}

impl PciDevice for HostBridge {
    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        self.0.read(offset, into);
    }

    fn config_write(&mut self, offset: u16, bytes: &[u8]) {
        self.0.write(offset, bytes);
    }

    fn windows(&self) -> Vec<Window> {
        Vec::new()
    }

    fn forwarded(&mut self, _windows: &[Window]) {}

    fn bar_read(&mut self, _bar: u8, _offset: u64, into: &mut [u8]) {
        into.fill(0xff);
    }

    fn bar_write(&mut self, _bar: u8, _offset: u64, _bytes: &[u8]) {}
}

impl Paused for HostBridge {
    fn state(&self) -> FunctionState {
        FunctionState {
            config: self.0.state(),
            transport: None,
        }
    }

    fn restore(&mut self, state: &FunctionState) -> Result<(), SnapshotError> {
        self.0.restore(&state.config)
    }
}
