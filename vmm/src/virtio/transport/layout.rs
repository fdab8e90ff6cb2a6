//! Layout of the device's structures in its BARs, and the capabilities that describe it (section
//! 4.1.4).
//!
//! BAR 0, 32 bits: the MSI-X table, and on pages of its own the pending bits. BAR 2, 64 bits: a
//! page each for the common configuration, the ISR status, the device's configuration, and the
//! notification addresses, 4 bytes for each queue.
use super::common;
use crate::pci::{
    config::{BarKind, ConfigSpace},
    msix::Msix,
};

pub(super) const MSIX_BAR: u8 = 0;
pub(super) const VIRTIO_BAR: u8 = 2;

const PAGE: u64 = 4096;
pub(super) const COMMON: u64 = 0;
pub(super) const ISR: u64 = PAGE;
pub(super) const DEVICE: u64 = 2 * PAGE;
pub(super) const NOTIFY: u64 = 3 * PAGE;
const VIRTIO_BAR_LEN: u64 = 4 * PAGE;
/// Distance between the notification addresses of two queues, bytes.
pub(super) const NOTIFY_MULTIPLIER: u64 = 4;
/// Largest number of queues: as many as fit the notification page.
pub(super) const MAX_QUEUES: usize = (PAGE / NOTIFY_MULTIPLIER) as usize;

const VENDOR_SPECIFIC: u8 = 0x09;
const ADVANCED_FEATURES: u8 = 0x13;

/// Values of `cfg_type` in a virtio capability.
#[derive(Clone, Copy)]
enum Structure {
    Common = 1,
    Notify = 2,
    Isr = 3,
    Device = 4,
    PciAccess = 5,
}

/// Offsets of the registers whose access has an effect.
pub(super) struct Offsets {
    /// Offset of the access capability's registers: BAR, offset and length of an access by
    /// configuration space, then its data.
    pub(super) access: usize,
    /// Offset of the advanced features' control register, which starts a function level reset.
    pub(super) reset: usize,
    /// Offset of the pending bits in the MSI-X BAR.
    pub(super) pba: u64,
}

/// Adds the BARs and all capabilities. Returns the offsets of the special registers.
pub(super) fn lay_out(config: &mut ConfigSpace, msix: &mut Msix, queues: usize) -> Offsets {
    let pba = msix.table_len().next_multiple_of(PAGE);
    let bar_len = (pba + msix.pba_len())
        .next_multiple_of(PAGE)
        .next_power_of_two();
    config.add_bar(MSIX_BAR, BarKind::Memory32, bar_len);
    config.add_bar(VIRTIO_BAR, BarKind::Memory64, VIRTIO_BAR_LEN);
    msix.add_capability(
        config,
        MSIX_BAR,
        0,
        u32::try_from(pba).expect("at most 32 KiB"),
    );
    let notify_len = queues as u64 * NOTIFY_MULTIPLIER;
    let multiplier = (NOTIFY_MULTIPLIER as u32).to_le_bytes();
    add(config, Structure::Common, COMMON, common::LEN as u64, &[]);
    add(config, Structure::Notify, NOTIFY, notify_len, &multiplier);
    add(config, Structure::Isr, ISR, 1, &[]);
    add(config, Structure::Device, DEVICE, PAGE, &[]);
    let access = add(config, Structure::PciAccess, 0, 0, &[0; 4]);
    // Advanced features (PCI ECN of 2006): transactions pending, which reads as none, and function
    // level reset.
    let reset = config.add_capability(ADVANCED_FEATURES, &[6, 0b11, 0, 0], &[0, 0, 1, 0]);
    Offsets {
        access: access + 4,
        reset: reset + 4,
        pba,
    }
}

fn add(config: &mut ConfigSpace, what: Structure, offset: u64, len: u64, more: &[u8]) -> usize {
    let narrow = |n: u64| u32::try_from(n).expect("within a BAR").to_le_bytes();
    let is_access = matches!(what, Structure::PciAccess);
    let bar = if is_access { 0 } else { VIRTIO_BAR };
    let cap_len = u8::try_from(16 + more.len()).expect("short");
    // cap_len, cfg_type, bar, id, padding; offset; length.
    let body = [
        &[cap_len, what as u8, bar, 0, 0, 0],
        &narrow(offset)[..],
        &narrow(len),
        more,
    ]
    .concat();
    let mut writable = vec![0; body.len()];
    if is_access {
        writable[2] = 0xff;
        writable[6..].fill(0xff);
    }
    config.add_capability(VENDOR_SPECIFIC, &body, &writable)
}
