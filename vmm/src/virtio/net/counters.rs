//! Counters of the card, per queue pair.
//!
//! Each pair's counters have one writer, its worker, and lie on cache lines of their own.
use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use serde::Serialize;

use super::rings::Tally;

/// Number that one thread increments and any thread reads.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    /// Adds to the counter. Only its one writer may call this: it is no atomic addition.
    pub(super) fn add(&self, more: u64) {
        self.0
            .store(self.get().wrapping_add(more), Ordering::Relaxed);
    }

    /// Replaces the figure. Only its one writer may call this.
    pub(super) fn set(&self, figure: u64) {
        self.0.store(figure, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! drops {
    ($($(#[$doc:meta])* $reason:ident = $name:literal),+ $(,)?) => {
        /// Reason for which a frame was dropped. Each drop is counted under one reason.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum DropReason { $($(#[$doc])* $reason),+ }

        impl DropReason {
            /// Every reason, in the order of declaration.
            pub const ALL: &[DropReason] = &[$(DropReason::$reason),+];

            /// Returns the reason's name in reports.
            pub fn name(self) -> &'static str {
                match self { $(DropReason::$reason => $name),+ }
            }
        }
    };
}

drops! {
    /// From the guest: shorter than the virtio-net and Ethernet headers.
    TxShort = "tx_short",
    /// From the guest: longer than 65535 bytes behind the Ethernet header.
    TxLong = "tx_long",
    /// From the guest: in more pieces than one system call takes.
    TxPieces = "tx_pieces",
    /// From the guest: requests a checksum that was not negotiated, or that lies outside the frame.
    TxChecksum = "tx_checksum",
    /// From the guest: a GSO type that is unknown or was not negotiated.
    TxGsoType = "tx_gso_type",
    /// From the guest: a GSO frame without checksum offload, segment size, or room for its headers.
    TxGso = "tx_gso",
    /// From the guest: headers longer than the frame.
    TxHeaderLength = "tx_header_length",
    /// From the guest: the TAP refused the frame as malformed (EINVAL).
    TxRefused = "tx_refused",
    /// From the guest: the TAP is down (EIO).
    TxLinkDown = "tx_link_down",
    /// From the guest: the TAP is gone (EBADFD).
    TxDeviceGone = "tx_device_gone",
    /// From the guest: the host had no memory for the frame.
    TxNoMemory = "tx_no_memory",
    /// From the guest: the TAP returned another error.
    TxOther = "tx_other",
    /// To the guest: its buffer is smaller than the frame, and buffers may not be merged.
    RxBufferSize = "rx_buffer_size",
    /// To the guest: all the buffers it has are smaller than the frame.
    RxRingSize = "rx_ring_size",
    /// To the guest: its filters (RX mode, MAC table) reject the frame.
    RxFiltered = "rx_filtered",
    /// To the guest: the TAP returned less than the headers.
    RxShort = "rx_short",
    /// To the guest: longer than any frame of Ethernet (from a socket only).
    RxLong = "rx_long",
    /// To the guest: has an offload that its driver did not negotiate. The frame was in the TAP
    /// since the time of another driver that did.
    RxOffload = "rx_offload",
    /// To the guest: received but not delivered when the driver reset the device or turned the
    /// queue off.
    RxReset = "rx_reset",
}

/// Declares a pair's counters, and the figures that are read from them.
macro_rules! pair_counters {
    ($($(#[$doc:meta])+ $field:ident,)+) => {
        /// Counters of one queue pair. Traffic counts frames that arrived at the other end: the
        /// TAP, or the guest's buffers.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub(super) struct PairCounters {
            $(pub(super) $field: Counter,)+
            drops: [Counter; DropReason::ALL.len()],
        }

        /// A queue pair's counters at one time. Bytes are those of frames, Ethernet header
        /// included, virtio-net header not; a GSO frame is one frame.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct PairSnapshot {
            $($(#[$doc])+ pub $field: u64,)+
            /// Frames dropped, by [`DropReason::name`].
            pub drops: BTreeMap<&'static str, u64>,
        }

        impl PairCounters {
            fn snapshot(&self) -> PairSnapshot {
                let drops = DropReason::ALL
                    .iter()
                    .map(|reason| (reason.name(), self.drops[*reason as usize].get()));
                PairSnapshot {
                    $($field: self.$field.get(),)+
                    drops: drops.collect(),
                }
            }
        }
    };
}

pair_counters! {
    /// Frames that the TAP took.
    tx_frames,
    /// Bytes of the frames that the TAP took.
    tx_bytes,
    /// Bytes of payload that a socket of the engine took straight out of the guest's buffers, by one copy.
    tx_direct_bytes,
    /// Frames delivered to the guest.
    rx_frames,
    /// Bytes of the frames delivered to the guest.
    rx_bytes,
    /// Bytes of payload that went from a socket of the engine straight into the guest's buffers, by one copy.
    rx_direct_bytes,
    /// Descriptor chains that received frames took: above `rx_frames` when buffers were merged.
    rx_buffers,
    /// Wakeups by a notification of the driver.
    kicks,
    /// Interrupts sent to the driver.
    interrupts,
    /// Times that buffers were used and the driver wanted no interrupt.
    interrupts_suppressed,
    /// System calls of the worker, interrupts included.
    syscalls,
    /// Times that the worker slept and woke.
    wakeups,
    /// Times that frames were left in the TAP because the guest had no buffers.
    rx_waits,
    /// Times that frames were left in the ring because the TAP took no more.
    tx_waits,
    /// Times that frames were left in the ring because the card's limit was reached.
    tx_throttled,
    /// Times that frames were left in the TAP, if there were any, because the card's limit was reached.
    rx_throttled,
    /// Frames longer than expected, whose end the VMM copied once more. All other frames are copied
    /// once, by the kernel.
    rx_spilled_frames,
    /// Bytes that the VMM copied once more.
    rx_spilled_bytes,
    /// Times that a ring was found broken, which ends in DEVICE_NEEDS_RESET.
    broken_rings,
    /// Times that the host refused a resource that the worker needs, which ends in
    /// DEVICE_NEEDS_RESET.
    host_failures,
    /// 1 if frames go between the guest's buffers and the TAP by io_uring, 0 if by readv and writev or
    /// if another process serves the rings.
    uring,
}

impl PairCounters {
    pub(super) fn dropped(&self, reason: DropReason) {
        self.drops[reason as usize].add(1);
    }
}

/// Peer of a card: where its frames go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NetLink {
    /// The queues of a TAP.
    #[default]
    Tap,
    /// A socket to another process, a message for each frame.
    Socket,
    /// No frame passes the card: another process serves its rings.
    Rings,
}

/// All counters of a card. They are kept over resets.
#[derive(Debug)]
pub struct NetCounters {
    pub(super) pairs: Vec<Arc<PairCounters>>,
    pub(super) control: ControlCounters,
    pub(super) link: OnceLock<NetLink>,
    /// Counts of another process that serves the rings.
    pub(super) tally: OnceLock<Tally>,
}

/// Counters of the control queue.
#[derive(Debug, Default)]
pub(super) struct ControlCounters {
    pub(super) commands: Counter,
    pub(super) refused: Counter,
    pub(super) broken: Counter,
}

impl NetCounters {
    /// Returns counters at zero for a number of queue pairs.
    pub fn new(pairs: usize) -> Arc<NetCounters> {
        Arc::new(NetCounters {
            pairs: (0..pairs).map(|_| Arc::default()).collect(),
            control: ControlCounters::default(),
            link: OnceLock::new(),
            tally: OnceLock::new(),
        })
    }

    /// Returns the present figures.
    pub fn snapshot(&self) -> NetSnapshot {
        let mut pairs: Vec<_> = self.pairs.iter().map(|pair| pair.snapshot()).collect();
        if let (Some(tally), Some(first)) = (self.tally.get(), pairs.first_mut()) {
            tally.add_to(first);
        }
        NetSnapshot {
            link: self.link.get().copied().unwrap_or_default(),
            pairs,
            control_commands: self.control.commands.get(),
            control_refused: self.control.refused.get(),
            control_broken_rings: self.control.broken.get(),
        }
    }
}

/// The card's counters at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NetSnapshot {
    /// Peer that its frames go to.
    pub link: NetLink,
    /// Counters of each queue pair, in order.
    pub pairs: Vec<PairSnapshot>,
    /// Commands on the control queue.
    pub control_commands: u64,
    /// Commands refused with VIRTIO_NET_ERR.
    pub control_refused: u64,
    /// Times that the control queue's ring was found broken.
    pub control_broken_rings: u64,
}
