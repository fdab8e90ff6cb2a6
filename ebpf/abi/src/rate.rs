//! Rate limits of a VM: packets and bytes per second in each direction.
//!
//! # Theory of operation
//! Each VM, direction and unit has a virtual scheduling algorithm (GCRA, ITU-T I.371). Its whole
//! state is one word: the time until which the packets that passed are paid for. A packet passes
//! while that time lies less than [`BURST_NS`] ahead, and moves it on by the packet's cost at the
//! rate. So a VM that was silent may send 100 ms worth of its rate at once, and a frame of any size
//! passes when the debt is small enough. As every packet is paid for, the rate is exact over time.
//!
//! CPUs change the word by atomics, so no two of them spend the same time, and without a loop,
//! which the verifier would walk for each caller. A packet is counted as if segmented
//! ([`crate::segment`]), and passes both limits or is charged to neither.
//!
//! The side that sends a packet charges it: programs charge packets that they translate, the engine
//! packets that it sends itself. A program only checks a packet that it hands over
//! ([`RateRef::look`]).
//!
//! A direction may also have a budget of bytes ([`budget`]). A limit of bytes polices, or shapes if it
//! has a pacer ([`pacing`]).
pub mod budget;
pub mod pacing;

use core::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Relaxed},
};

pub use budget::{AtEnd, Budget, BudgetBits};
pub use pacing::{
    PACED_BURST_NS, PACING_HANDLE, paced_ahead_ns, paced_bytes, pacer_rate, pacing_class,
};

use crate::{
    Direction, DropReason,
    cell::{load32, load64, store64},
    handle::handle,
    segment::Segments,
};

/// Burst: how far the paid time may lie ahead of the present, ns.
pub const BURST_NS: u64 = 100_000_000;

const SECOND_NS: u64 = 1_000_000_000;

/// Rate limits of one direction. A limit of 0 means none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Rate {
    /// Packets per second, counted as if segmented.
    pub packets_per_second: u64,
    /// L3 bytes per second, counted as if segmented.
    pub bytes_per_second: u64,
    /// L3 bytes in all, or in a day: see [`Budget`].
    pub budget_bytes: u64,
}

/// Rate limits of a VM in both directions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct VmRates {
    /// Limits of traffic from the guest.
    pub tx: Rate,
    /// Limits of traffic to the guest.
    pub rx: Rate,
    /// Terms of the budgets of both directions.
    pub budget: Budget,
}

impl VmRates {
    /// Whether any of the limits is set.
    pub fn is_limited(&self) -> bool {
        [self.tx, self.rx]
            .iter()
            .any(|rate| *rate != Rate::default())
    }

    /// Whether there is a budget.
    pub fn has_budget(&self) -> bool {
        self.tx.budget_bytes != 0 || self.rx.budget_bytes != 0
    }
}

/// One row of `RATES`: the limits of a VM and how much of them is used.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RateLimits {
    /// Limits of traffic from the guest.
    pub tx: DirectionLimits,
    /// Limits of traffic to the guest, in a cache line of their own.
    pub rx: DirectionLimits,
}

/// Limits of one direction and their use.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DirectionLimits {
    /// Limit in packets per second.
    pub packets: Limit,
    /// Limit in L3 bytes per second.
    pub bytes: Limit,
    /// Time by which the paid time of bytes may lie ahead if they are shaped, ns.
    pub paced_ahead_ns: u64,
    /// Ifindex of the device that shapes: slipgate's pacing device from the guest, the TAP to it.
    /// 0: the limit polices.
    pub pacer: u32,
    /// Terms and state of the budget: [`BudgetBits`].
    pub budget_bits: u32,
    /// L3 bytes that may pass in the period of the budget; 0: there is none.
    pub budget_bytes: u64,
    /// L3 bytes that have passed in it. The word outlives engines and brokers.
    pub budget_used: u64,
}

/// One limit and its use.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Limit {
    /// Units per second; 0 if there is no limit.
    pub per_second: u64,
    /// Time until which the packets that passed are paid for, ns.
    pub paid_until_ns: u64,
}

const _: () = assert!(size_of::<RateLimits>() == 128);

handle! {
    /// Handle to a live row of `RATES`, accessed by atomics only.
    RateRef(RateLimits);
    atomic {}
    constant {}
}

impl RateRef {
    /// Sets the limits. A limit that changes starts without debt.
    pub fn set(self, rates: VmRates) {
        for (direction, rate) in [(Direction::Tx, rates.tx), (Direction::Rx, rates.rx)] {
            let [packets, bytes] = self.limits(direction);
            packets.set(rate.packets_per_second);
            bytes.set(rate.bytes_per_second);
            self.set_budget(direction, rate.budget_bytes, rates.budget);
        }
    }

    /// The limits that are set.
    pub fn get(self) -> VmRates {
        let rate = |direction| {
            let [packets, bytes] = self.limits(direction);
            Rate {
                packets_per_second: load64(packets.per_second()),
                bytes_per_second: load64(bytes.per_second()),
                budget_bytes: load64(self.budget_bytes(direction)),
            }
        };
        let bits =
            load32(self.budget_bits(Direction::Tx)) | load32(self.budget_bits(Direction::Rx));
        let at_end = (bits & BudgetBits::AT_END) >> BudgetBits::AT_END_SHIFT;
        VmRates {
            budget: Budget {
                per_day: bits & BudgetBits::PER_DAY != 0,
                at_end: AtEnd::ALL.get(at_end as usize).copied().unwrap_or_default(),
            },
            tx: rate(Direction::Tx),
            rx: rate(Direction::Rx),
        }
    }

    /// Charges a packet that is about to be sent.
    ///
    /// # Errors
    /// The drop reason if a limit is exceeded. Neither limit is charged then.
    #[inline(always)]
    pub fn take(
        self,
        direction: Direction,
        segments: Segments,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let [packets, bytes] = self.limits(direction);
        if self.is_over_budget(direction) {
            return Err(DropReason::ByteBudget);
        }
        let (ahead_ns, charged_bytes) = match self.pacer(direction) {
            0 => (BURST_NS, segments.bytes),
            _ => (
                load64(self.paced_ahead_ns(direction)),
                paced_bytes(segments),
            ),
        };
        // Bytes are checked first, so that a packet they refuse is not charged to the packet limit
        // even for a moment, except in a race.
        if !bytes.allows(now_ns, ahead_ns) {
            return Err(DropReason::ByteRate);
        }
        let Some(charged) = packets.take(segments.packets, now_ns, BURST_NS) else {
            return Err(DropReason::PacketRate);
        };
        if bytes.take(charged_bytes, now_ns, ahead_ns).is_none() {
            packets.give_back(charged);
            return Err(DropReason::ByteRate);
        }
        if load64(self.budget_bytes(direction)) != 0 {
            self.used(direction).fetch_add(segments.bytes, Relaxed);
        }
        Ok(())
    }

    /// Checks, without charging, whether a packet that another side will send and charge would pass
    /// now.
    ///
    /// # Errors
    /// The drop reason if a limit is exceeded.
    #[inline(always)]
    pub fn look(self, direction: Direction, now_ns: u64) -> Result<(), DropReason> {
        let [packets, bytes] = self.limits(direction);
        if self.is_over_budget(direction) {
            return Err(DropReason::ByteBudget);
        }
        let ahead_ns = match self.pacer(direction) {
            0 => BURST_NS,
            _ => load64(self.paced_ahead_ns(direction)),
        };
        if !bytes.allows(now_ns, ahead_ns) {
            return Err(DropReason::ByteRate);
        }
        if !packets.allows(now_ns, BURST_NS) {
            return Err(DropReason::PacketRate);
        }
        Ok(())
    }

    /// Limit of bytes of a direction, L3 bytes per second; 0 if there is none.
    pub fn bytes_per_second(self, direction: Direction) -> u64 {
        let [_, bytes] = self.limits(direction);
        load64(bytes.per_second())
    }

    /// Debt of a direction's limit of bytes: the time that the bytes that passed will have taken, ns.
    pub fn byte_debt_ns(self, direction: Direction, now_ns: u64) -> u64 {
        let [_, bytes] = self.limits(direction);
        ahead_ns(load64(bytes.paid_until_ns()), now_ns).max(0) as u64
    }

    #[inline(always)]
    fn limits(self, direction: Direction) -> [LimitRef; 2] {
        let limits = self.of(direction);
        // SAFETY: `new` promised a valid row.
        unsafe {
            [
                LimitRef(&raw mut (*limits).packets),
                LimitRef(&raw mut (*limits).bytes),
            ]
        }
    }

    #[inline(always)]
    fn of(self, direction: Direction) -> *mut DirectionLimits {
        // SAFETY: `new` promised a valid row.
        unsafe {
            match direction {
                Direction::Tx => &raw mut (*self.0).tx,
                Direction::Rx => &raw mut (*self.0).rx,
            }
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
    fn allows(&self, now_ns: u64, most_ns: u64) -> bool {
        load64(self.per_second()) == 0 || !is_over(load64(self.paid_until_ns()), now_ns, most_ns)
    }

    /// Charges for this many units. Returns the charge in ns; `None` if the rate is exceeded.
    #[inline(always)]
    fn take(&self, units: u64, now_ns: u64, most_ns: u64) -> Option<u64> {
        let per_second = load64(self.per_second());
        if per_second == 0 {
            return Some(0);
        }
        // At most some 10^5 bytes, so no overflow. Rounded up: never faster than the rate.
        let cost_ns = (units * SECOND_NS).div_ceil(per_second);
        let word = self.paid_until_ns();
        let paid = load64(word);
        if is_over(paid, now_ns, most_ns) {
            return None;
        }
        // After silence the paid time starts now; the first CPU to store it succeeds.
        if ahead_ns(paid, now_ns) < 0
            && word
                .compare_exchange(paid, now_ns + cost_ns, Relaxed, Relaxed)
                .is_ok()
        {
            return Some(cost_ns);
        }
        // Not relaxed: LLVM 22 then takes the instruction that does not fetch.
        if is_over(word.fetch_add(cost_ns, AcqRel), now_ns, most_ns) {
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

/// Time by which the paid time lies ahead of the present, ns. It is signed: a word that was reset
/// may be given back a charge made before the reset, and then lies in the past, not centuries
/// ahead.
#[inline(always)]
fn ahead_ns(paid_until_ns: u64, now_ns: u64) -> i64 {
    paid_until_ns.wrapping_sub(now_ns) as i64
}

#[inline(always)]
fn is_over(paid_until_ns: u64, now_ns: u64, most_ns: u64) -> bool {
    ahead_ns(paid_until_ns, now_ns) >= most_ns as i64
}

#[cfg(test)]
#[path = "rate_test.rs"]
mod tests;
