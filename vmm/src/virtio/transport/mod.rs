//! Virtio over PCI (OASIS virtio 1.2, section 4.1), modern only.
//!
//! # Theory of operation
//! A device is a PCI function with MSI-X and two BARs ([`layout`](self)). vCPU threads access its
//! registers, under the function's lock. The registers drive a state machine whose two main states,
//! stopped and active, are in `lifecycle.rs`; the status bits that a driver sees are in
//! `status.rs`.
//!
//! Once active, neither direction needs the lock. The driver's notification is an ioeventfd of the
//! queue, which the device's worker waits for. The device's interrupt goes from
//! [`Signals`](crate::virtio::Signals) by an atomic vector number to an atomic vector state
//! ([`Vectors`](crate::pci::Vectors)), then to an irqfd. ISR status is kept too, for drivers that
//! poll without MSI-X; there is no INTx.
//!
//! An error of the driver during its set-up is ignored and counted where the specification has the
//! driver read the value back (features, vectors, status). Where the driver can't see it (a queue
//! outside memory), the device goes to DEVICE_NEEDS_RESET.
//!
//! Bus mastering is the guest's switch for DMA and MSI. While it is off, vectors are held and a
//! device does not become active. When it is turned off, an active device is stopped and needs a
//! reset.
mod common;
mod counters;
mod doorbells;
mod layout;
mod lifecycle;
mod queue;
mod signals;
mod status;

use std::{io, sync::Arc};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub use self::counters::{TransportCounters, TransportSnapshot};
use self::{
    common::Selectors,
    counters::count,
    doorbells::Bells,
    layout::{MSIX_BAR, NOTIFY, NOTIFY_MULTIPLIER, Offsets, VIRTIO_BAR},
    lifecycle::Lifecycle,
    signals::Shared,
};
use crate::{
    GuestMemory,
    interrupt::{Doorbells, MsiFabric},
    pci::{
        Paused, PciDevice, Window,
        config::{ConfigSpace, Identity},
        msix::Msix,
    },
    snapshot::{FunctionState, SnapshotError, TransportState},
    virtio::{Signals, VirtioDevice},
};

/// PCI vendor id of virtio, and the first device id of the non-transitional devices.
const VENDOR: u16 = 0x1af4;
const FIRST_DEVICE: u16 = 0x1040;

/// A virtio device as a PCI function.
pub struct VirtioPci {
    config: ConfigSpace,
    offsets: Offsets,
    msix: Msix,
    selectors: Selectors,
    lifecycle: Lifecycle,
    bells: Bells,
    /// Guest address at which the root forwards the notification page; `None` if it does not.
    notify: Option<u64>,
}

/// Reason why a device can't be put behind PCI.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The device has too many queues, or an invalid queue size.
    #[error(
        "a virtio device with queues of sizes {0:?}: at most 1024 of them, each a power of two up to 32768"
    )]
    Queues(Vec<u16>),
    /// The host refused an eventfd or an interrupt line.
    #[error("{what} of a virtio device")]
    Host {
        /// Resource that was requested.
        what: &'static str,
        /// Error from the host.
        source: io::Error,
    },
}

impl VirtioPci {
    /// Puts `device` behind PCI, with a vector for each of its queues and one for its
    /// configuration.
    ///
    /// # Errors
    /// The device's queues are invalid, or the host refuses a resource.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: Arc<GuestMemory>,
        msi: Arc<dyn MsiFabric>,
        doorbells: Arc<dyn Doorbells>,
    ) -> Result<Self, TransportError> {
        let host = |what| move |source| TransportError::Host { what, source };
        let sizes = device.queue_sizes();
        let possible = |size: &u16| size.is_power_of_two() && *size <= 32768;
        if sizes.len() > layout::MAX_QUEUES || !sizes.iter().all(possible) {
            return Err(TransportError::Queues(sizes.to_vec()));
        }
        let queues = sizes.len();
        let count = u16::try_from(queues + 1).expect("at most 1025");
        let mut msix = Msix::new(count, msi).map_err(host("the MSI-X vectors"))?;
        if device.is_signalled_by_others() {
            msix.share().map_err(host("the MSI-X vectors"))?;
        }
        let mut config = ConfigSpace::new(Identity {
            vendor: VENDOR,
            device: FIRST_DEVICE + device.device_id(),
            revision: 1,
            class: device.pci_class(),
            subsystem_vendor: VENDOR,
            subsystem: FIRST_DEVICE + device.device_id(),
        });
        let offsets = layout::lay_out(&mut config, &mut msix, queues);
        let counters = TransportCounters::new(msix.vectors().clone(), msix.refused().clone());
        let counters = Arc::new(counters);
        let shared = Shared::new(queues, msix.vectors().clone(), counters.clone());
        let kicks: io::Result<Vec<_>> = (0..queues).map(|_| EventFd::new(EFD_NONBLOCK)).collect();
        let kicks = kicks.map_err(host("the notification eventfds"))?;
        Ok(Self {
            config,
            offsets,
            msix,
            selectors: Selectors::default(),
            lifecycle: Lifecycle::new(device, memory, Arc::new(shared), counters.clone(), kicks),
            bells: Bells::new(doorbells, counters, queues),
            notify: None,
        })
    }

    /// Returns the transport's counters. They outlive the device.
    pub fn counters(&self) -> Arc<TransportCounters> {
        self.lifecycle.counters.clone()
    }

    fn virtio_read(&mut self, offset: u64, into: &mut [u8]) {
        into.fill(0);
        match offset {
            ..layout::ISR => self
                .selectors
                .read(&self.lifecycle, offset - layout::COMMON, into),
            layout::ISR => {
                if let Some(isr) = into.first_mut() {
                    *isr = self.lifecycle.shared.take_isr();
                }
            }
            layout::DEVICE..NOTIFY => {
                let at = (offset - layout::DEVICE) as usize;
                self.lifecycle.device.read_config(at, into);
            }
            // The rest of the ISR page, and the notification page, which is write-only.
            _ => {}
        }
    }

    fn virtio_write(&mut self, offset: u64, bytes: &[u8]) {
        match offset {
            ..layout::ISR => {
                let before = self.lifecycle.shared.status();
                let bus_master = self.config.is_bus_master();
                self.selectors.write(
                    &mut self.lifecycle,
                    offset - layout::COMMON,
                    bytes,
                    bus_master,
                );
                if before != 0 && self.lifecycle.shared.status() == 0 {
                    self.msix.forget_pending();
                }
                self.follow_bells();
            }
            layout::DEVICE..NOTIFY => {
                let at = (offset - layout::DEVICE) as usize;
                self.lifecycle.device.write_config(at, bytes);
            }
            NOTIFY.. => self.notify(offset - NOTIFY),
            _ => count(&self.lifecycle.counters.writes_ignored),
        }
    }

    /// Handles a notification that no ioeventfd handled. The value written is the queue's number,
    /// which the address gives already.
    fn notify(&self, offset: u64) {
        let index = usize::try_from(offset / NOTIFY_MULTIPLIER).unwrap_or(usize::MAX);
        match self.lifecycle.queues.get(index) {
            Some(queue) if offset.is_multiple_of(NOTIFY_MULTIPLIER) => {
                count(&self.lifecycle.counters.notify_exits);
                // The write fails only if 2^64 - 2 notifications wait: then the queue is signalled
                // already.
                let _ = queue.kick.write(1);
            }
            _ => count(&self.lifecycle.counters.writes_ignored),
        }
    }

    fn follow_bells(&mut self) {
        let base = self.notify.filter(|_| self.lifecycle.is_active());
        self.bells.follow(base, &self.lifecycle.queues);
    }

    /// Returns the access that the PCI configuration access capability describes (section 4.1.4.9):
    /// BAR, offset, length; `None` if it is invalid.
    fn window_access(&self) -> Option<(u8, u64, usize)> {
        let [bar] = self.config.array(self.offsets.access);
        let offset = u32::from_le_bytes(self.config.array(self.offsets.access + 4));
        let len = u32::from_le_bytes(self.config.array(self.offsets.access + 8));
        let fits = self.config.bar_len(bar)? >= u64::from(offset) + u64::from(len);
        let possible = matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len) && fits;
        possible.then_some((bar, offset.into(), len as usize))
    }

    /// Returns whether an access to configuration space touches the data register of that
    /// capability.
    fn touches_data(&self, offset: u16, len: usize) -> bool {
        let data = self.offsets.access + 12;
        let offset = usize::from(offset);
        offset < data + 4 && offset + len > data
    }

    fn reset_all(&mut self) {
        self.lifecycle.reset();
        self.selectors.reset();
        self.config.reset();
        self.msix.reset(&self.config);
    }

    /// Applies the effects of a write to configuration space, beyond its bytes.
    fn follow_config(&mut self) {
        if self.config.array(self.offsets.reset) == [1] {
            self.reset_all();
        }
        self.msix.follow(&self.config);
        if !self.config.is_bus_master() && self.lifecycle.is_active() {
            self.lifecycle.stop();
            self.lifecycle.shared.needs_reset();
        }
        self.follow_bells();
    }
}

impl PciDevice for VirtioPci {
    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        if self.touches_data(offset, into.len())
            && let Some((bar, at, len)) = self.window_access()
        {
            let mut data = [0; 4];
            self.bar_read(bar, at, &mut data[..len]);
            self.config.set(self.offsets.access + 12, &data[..len]);
        }
        self.config.read(offset, into);
    }

    fn config_write(&mut self, offset: u16, bytes: &[u8]) {
        self.config.write(offset, bytes);
        if self.touches_data(offset, bytes.len())
            && let Some((bar, at, len)) = self.window_access()
        {
            let data: [u8; 4] = self.config.array(self.offsets.access + 12);
            self.bar_write(bar, at, &data[..len]);
        }
        self.follow_config();
    }

    fn windows(&self) -> Vec<Window> {
        self.config.windows()
    }

    fn forwarded(&mut self, windows: &[Window]) {
        let virtio = windows.iter().find(|window| window.bar == VIRTIO_BAR);
        self.notify = virtio.map(|window| window.start + NOTIFY);
        self.follow_bells();
    }

    fn bar_read(&mut self, bar: u8, offset: u64, into: &mut [u8]) {
        match bar {
            MSIX_BAR if offset >= self.offsets.pba => {
                self.msix.pba_read(offset - self.offsets.pba, into);
            }
            MSIX_BAR => self.msix.table_read(offset, into),
            _ => self.virtio_read(offset, into),
        }
    }

    fn bar_write(&mut self, bar: u8, offset: u64, bytes: &[u8]) {
        match bar {
            MSIX_BAR if offset < self.offsets.pba => self.msix.table_write(offset, bytes),
            // The pending bits are read-only.
            MSIX_BAR => {}
            _ => self.virtio_write(offset, bytes),
        }
    }
}

impl Paused for VirtioPci {
    fn suspend(&mut self) {
        self.lifecycle.suspend();
    }

    fn resume(&mut self) {
        self.lifecycle.resume();
        self.follow_bells();
    }

    fn reset(&mut self) {
        self.reset_all();
        self.follow_bells();
    }

    fn signal_again(&mut self) {
        if self.lifecycle.is_active() {
            self.lifecycle.shared.signal_all();
        }
    }

    fn state(&self) -> FunctionState {
        let mut transport = TransportState {
            msix: self.msix.state(),
            selectors: self.selectors.state(),
            ..TransportState::default()
        };
        self.lifecycle.save(&mut transport);
        FunctionState {
            config: self.config.state(),
            transport: Some(transport),
        }
    }

    fn restore(&mut self, state: &FunctionState) -> Result<(), SnapshotError> {
        let Some(transport) = &state.transport else {
            let why = "a function without a virtio device in the place of one with it".to_owned();
            return Err(SnapshotError::Mismatch(why));
        };
        self.config.restore(&state.config)?;
        self.selectors.restore(transport.selectors);
        let bus_master = self.config.is_bus_master();
        self.lifecycle.restore(transport, bus_master)?;
        self.msix.restore(&transport.msix, &self.config)
    }
}

impl Drop for VirtioPci {
    fn drop(&mut self) {
        self.lifecycle.stop();
        self.follow_bells();
    }
}

#[cfg(test)]
#[path = "hostile_test.rs"]
mod hostile_tests;
#[cfg(test)]
#[path = "restored_test.rs"]
mod restored_tests;
#[cfg(test)]
#[path = "transport_test.rs"]
mod tests;
