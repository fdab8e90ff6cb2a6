//! Packets and bytes per second of a VM, each way.
//!
//! # Theory of operation
//! A virtual scheduling algorithm (GCRA, ITU-T I.371) per VM, direction and unit, its whole state
//! one word: the time until which what has passed is paid for. A packet passes while that lies
//! less than [`BURST_NS`] ahead, and moves it on by what the packet costs at the rate. So a VM that
//! was silent may send 100 ms worth of its rate at once, a frame of any size passes when the debt is
//! small enough, and whatever passed is paid for: over time the rate holds to the packet.
//!
//! CPUs change the word by atomics, so no two of them spend the same time, and without a loop, which
//! the verifier would walk for each caller. A packet is counted as if segmented
//! ([`crate::segment`]), and passes both limits or is charged to neither.
//!
//! Whoever carries a packet charges it: the programs what they translate, the engine what it sends
//! on by itself. What a program hands over to be carried is only looked at ([`RateRef::look`]).
use core::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Relaxed},
};

use crate::{
    Direction, DropReason,
    cell::{load64, store64},
    segment::Segments,
};

/// How far ahead of time a VM may be.
pub const BURST_NS: u64 = 100_000_000;

const SECOND_NS: u64 = 1_000_000_000;

/// Most that may pass in one direction. 0: no limit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Rate {
    /// Packets per second, as if segmented.
    pub packets_per_second: u64,
    /// L3 bytes per second, as if segmented.
    pub bytes_per_second: u64,
}

/// Most that may pass from and to a VM.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct VmRates {
    /// From the guest.
    pub tx: Rate,
    /// To the guest.
    pub rx: Rate,
}

impl VmRates {
    /// Whether anything is limited.
    pub fn is_limited(&self) -> bool {
        *self != Self::default()
    }
}

/// One row of `RATES`.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RateLimits {
    /// From the guest.
    pub tx: DirectionLimits,
    /// To the guest. In a cache line of its own.
    pub rx: DirectionLimits,
}

/// The limits of one direction.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DirectionLimits {
    /// In packets.
    pub packets: Limit,
    /// In bytes.
    pub bytes: Limit,
}

/// One limit.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Limit {
    /// Units per second; 0: no limit.
    pub per_second: u64,
    /// What has passed is paid for until then.
    pub paid_until_ns: u64,
}

const _: () = assert!(size_of::<RateLimits>() == 128);

/// A live row, reached by atomics only.
#[derive(Clone, Copy, Debug)]
pub struct RateRef(*mut RateLimits);

// SAFETY: every access goes through atomics.
unsafe impl Send for RateRef {}
// SAFETY: as above.
unsafe impl Sync for RateRef {}

impl RateRef {
    /// # Safety
    /// `row` points to an element of `RATES` and stays mapped as long as the result is used.
    #[inline(always)]
    pub const unsafe fn new(row: *mut RateLimits) -> Self {
        Self(row)
    }

    /// Sets the rates. What was ahead of time is forgiven.
    pub fn set(self, rates: VmRates) {
        for (direction, rate) in [(Direction::Tx, rates.tx), (Direction::Rx, rates.rx)] {
            let [packets, bytes] = self.limits(direction);
            packets.set(rate.packets_per_second);
            bytes.set(rate.bytes_per_second);
        }
    }

    /// The rates.
    pub fn get(self) -> VmRates {
        let rate = |direction| {
            let [packets, bytes] = self.limits(direction);
            Rate {
                packets_per_second: load64(packets.per_second()),
                bytes_per_second: load64(bytes.per_second()),
            }
        };
        VmRates {
            tx: rate(Direction::Tx),
            rx: rate(Direction::Rx),
        }
    }

    /// Lets a packet pass and charges it, or says why not.
    #[inline(always)]
    pub fn take(
        self,
        direction: Direction,
        segments: Segments,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let [packets, bytes] = self.limits(direction);
        // Looked at first, so that what the bytes refuse is, but for a race, not charged to the
        // packets even for a moment.
        if !bytes.allows(now_ns) {
            return Err(DropReason::ByteRate);
        }
        let Some(charged) = packets.take(segments.packets, now_ns) else {
            return Err(DropReason::PacketRate);
        };
        if bytes.take(segments.bytes, now_ns).is_none() {
            packets.give_back(charged);
            return Err(DropReason::ByteRate);
        }
        Ok(())
    }

    /// Whether a packet would pass, or why not, for one that somebody else is to carry and charge.
    #[inline(always)]
    pub fn look(self, direction: Direction, now_ns: u64) -> Result<(), DropReason> {
        let [packets, bytes] = self.limits(direction);
        if !bytes.allows(now_ns) {
            return Err(DropReason::ByteRate);
        }
        if !packets.allows(now_ns) {
            return Err(DropReason::PacketRate);
        }
        Ok(())
    }

    #[inline(always)]
    fn limits(self, direction: Direction) -> [LimitRef; 2] {
        // SAFETY: `new` promised a valid row.
        unsafe {
            let limits = match direction {
                Direction::Tx => &raw mut (*self.0).tx,
                Direction::Rx => &raw mut (*self.0).rx,
            };
            [
                LimitRef(&raw mut (*limits).packets),
                LimitRef(&raw mut (*limits).bytes),
            ]
        }
    }
}

#[derive(Clone, Copy)]
struct LimitRef(*mut Limit);

impl LimitRef {
    #[inline(always)]
    fn per_second(&self) -> &AtomicU64 {
        // SAFETY: part of a valid row; both sides use atomics on this field.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.0).per_second) }
    }

    #[inline(always)]
    fn paid_until_ns(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.0).paid_until_ns) }
    }

    fn set(&self, per_second: u64) {
        if load64(self.per_second()) != per_second {
            store64(self.per_second(), per_second);
            store64(self.paid_until_ns(), 0);
        }
    }

    #[inline(always)]
    fn allows(&self, now_ns: u64) -> bool {
        load64(self.per_second()) == 0 || !is_over(load64(self.paid_until_ns()), now_ns)
    }

    /// Charges for so many units; what was charged, ns. `None`: over the rate.
    #[inline(always)]
    fn take(&self, units: u64, now_ns: u64) -> Option<u64> {
        let per_second = load64(self.per_second());
        if per_second == 0 {
            return Some(0);
        }
        // At most some 10^5 bytes, so no overflow. Rounded up: never faster than the rate.
        let cost_ns = (units * SECOND_NS).div_ceil(per_second);
        let word = self.paid_until_ns();
        let paid = load64(word);
        if is_over(paid, now_ns) {
            return None;
        }
        // After silence, time begins now, for whoever is first.
        if ahead_ns(paid, now_ns) < 0
            && word
                .compare_exchange(paid, now_ns + cost_ns, Relaxed, Relaxed)
                .is_ok()
        {
            return Some(cost_ns);
        }
        // Not relaxed: LLVM 22 then takes the instruction that does not fetch.
        if is_over(word.fetch_add(cost_ns, AcqRel), now_ns) {
            // Another CPU was here between our look and now.
            self.give_back(cost_ns);
            return None;
        }
        Some(cost_ns)
    }

    #[inline(always)]
    fn give_back(&self, cost_ns: u64) {
        if cost_ns != 0 {
            self.paid_until_ns().fetch_sub(cost_ns, Relaxed);
        }
    }
}

/// How far a word lies ahead of a time. Signed: one that was set anew may be paid back what the word
/// before it was charged, and lies behind then, not centuries ahead.
#[inline(always)]
fn ahead_ns(paid_until_ns: u64, now_ns: u64) -> i64 {
    paid_until_ns.wrapping_sub(now_ns) as i64
}

#[inline(always)]
fn is_over(paid_until_ns: u64, now_ns: u64) -> bool {
    ahead_ns(paid_until_ns, now_ns) >= BURST_NS as i64
}

#[cfg(test)]
#[path = "rate_test.rs"]
mod tests;
