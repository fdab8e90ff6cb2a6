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
//! # Budgets
//! A direction may have a budget: bytes that may pass in a day, or for as long as slipgate knows the VM.
//! What passes is added to one word. Once that has reached the budget the programs drop the rest, and
//! the engine refuses new flows, unless established flows may go on. So a VM goes beyond it by no more
//! than the frames that the CPUs are handling at that moment, one each. The broker does what else is to
//! be done at the end, and begins a new day.
//!
//! # Shaping
//! A limit of bytes polices, or shapes if it has a *pacer*: a device with a queueing discipline that
//! lets the VM's packets go at the rate. Both count alike, so the paid time is also the time at which
//! a packet leaves the pacer's queue: a packet that finds it [`paced_ahead_ns`] ahead is dropped here,
//! counted, and the queue itself drops nothing. A queueing discipline counts frames with their
//! Ethernet headers, at a rate that is larger by that of a full packet, and so does a limit that
//! shapes ([`paced_bytes`]): full packets pass at the exact rate, smaller ones at a little less.
use core::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Relaxed},
};

use crate::{
    Direction, DropReason,
    cell::{load32, load64, store32, store64},
    handle::handle,
    segment::Segments,
};

/// Burst: how far the paid time may lie ahead of the present, ns.
pub const BURST_NS: u64 = 100_000_000;

const SECOND_NS: u64 = 1_000_000_000;

/// Time's worth of the rate that a pacer lets pass at once after silence, ns.
pub const PACED_BURST_NS: u64 = 4_000_000;
/// Longest time that a packet waits in a pacer's queue, ns: what a full queue adds to the round trip.
const PACED_QUEUE_NS: u64 = 16_000_000;
/// Bytes that a pacer's queue holds however slow it is: a TCP sender needs some.
const PACED_QUEUE_BYTES: u64 = 32_768;

/// Length of an Ethernet header, bytes.
const ETHERNET_BYTES: u64 = 14;
/// Length of a full packet on an Ethernet link, L3 bytes.
const FULL_BYTES: u64 = 1_500;

/// L3 bytes that packets are charged for where the rate is shaped: as a queueing discipline counts
/// them, to the scale of full packets.
#[inline(always)]
pub const fn paced_bytes(segments: Segments) -> u64 {
    let frames = segments.bytes + ETHERNET_BYTES * segments.packets;
    (frames * FULL_BYTES).div_ceil(FULL_BYTES + ETHERNET_BYTES)
}

/// Rate of a pacer for a rate of L3 bytes: frames with their Ethernet headers, bytes per second. It
/// is faster by a thousandth, so that rounding never makes the queue the stricter of the two.
pub const fn pacer_rate(bytes_per_second: u64) -> u64 {
    let per_second = bytes_per_second as u128 * (FULL_BYTES + ETHERNET_BYTES) as u128;
    let per_second = per_second * 1_001 / (FULL_BYTES * 1_000) as u128 + 1;
    if per_second > u64::MAX as u128 {
        u64::MAX
    } else {
        per_second as u64
    }
}

/// Time by which the paid time of a limit that shapes may lie ahead, ns.
pub const fn paced_ahead_ns(bytes_per_second: u64) -> u64 {
    let least_ns = match (PACED_QUEUE_BYTES * SECOND_NS).checked_div(bytes_per_second) {
        Some(least_ns) => least_ns,
        None => 0,
    };
    let queue_ns = if least_ns > PACED_QUEUE_NS {
        least_ns
    } else {
        PACED_QUEUE_NS
    };
    PACED_BURST_NS + queue_ns
}

/// Major number of the handles of slipgate's queueing disciplines: "SG" in ASCII.
pub const PACING_HANDLE: u16 = 0x5347;

/// Handle of the class in which packets from the VM of this row wait at the pacing device.
#[inline(always)]
pub const fn pacing_class(row: u32) -> u32 {
    (PACING_HANDLE as u32) << 16 | (row & 0xffff)
}

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

/// What a VM's budgets of bytes are for, and what happens when one is spent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Budget {
    /// Whether it is a day's (UTC), and not for as long as slipgate knows the VM.
    pub per_day: bool,
    /// What happens when it is spent.
    pub at_end: AtEnd,
}

/// What happens when a budget is spent, besides that new flows are refused.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum AtEnd {
    /// The programs drop what would go beyond it, and flows are cut.
    #[default]
    Cut,
    /// Established flows go on, and go beyond it.
    Refuse,
    /// The programs drop what would go beyond it, and the VM is frozen.
    Freeze,
}

impl AtEnd {
    /// Every end, by its number.
    pub const ALL: [Self; 3] = [Self::Cut, Self::Refuse, Self::Freeze];
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

/// Bits of [`DirectionLimits::budget_bits`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BudgetBits;

impl BudgetBits {
    /// The day of the period since 1970; 0 if it is not a day's.
    pub const DAY: u32 = 0xffff;
    /// The period is a day.
    pub const PER_DAY: u32 = 1 << 16;
    /// Place of the number of [`AtEnd`].
    pub const AT_END_SHIFT: u32 = 20;
    /// Mask of that number.
    pub const AT_END: u32 = 3 << Self::AT_END_SHIFT;
    /// The broker has said that the budget is spent, and done or noted what is to be done then.
    pub const TOLD: u32 = 1 << 24;
    /// It froze the VM for that.
    pub const FROZE: u32 = 1 << 25;
    /// The VM's flows are to be cut for that, and no engine has been told yet.
    pub const CUT_DUE: u32 = 1 << 26;
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
            let terms = match rate.budget_bytes {
                0 => 0,
                _ => {
                    let per_day = if rates.budget.per_day {
                        BudgetBits::PER_DAY
                    } else {
                        0
                    };
                    per_day | (rates.budget.at_end as u32) << BudgetBits::AT_END_SHIFT
                }
            };
            let bits = self.budget_bits(direction);
            let before = load32(bits);
            let had = load64(self.budget_bytes(direction)) != 0;
            // What passed before belongs to no day, but that of a day's budget that was taken away.
            if terms & !before & BudgetBits::PER_DAY != 0 && (had || before & BudgetBits::DAY == 0)
            {
                store64(self.used(direction), 0);
            }
            let mut kept = before & !(BudgetBits::PER_DAY | BudgetBits::AT_END);
            if rate.budget_bytes == 0 {
                // The next budget has an end of its own.
                kept &= !(BudgetBits::TOLD | BudgetBits::CUT_DUE);
            }
            store32(bits, kept | terms);
            store64(self.budget_bytes(direction), rate.budget_bytes);
        }
    }

    /// Forgets what was used of the budgets: the row is another VM's.
    pub fn clear_used(self) {
        for direction in [Direction::Tx, Direction::Rx] {
            store64(self.used(direction), 0);
            store32(self.budget_bits(direction), 0);
        }
    }

    /// Budget of a direction and what was used of it, L3 bytes; `None` if there is none.
    #[inline(always)]
    pub fn budget(self, direction: Direction) -> Option<(u64, u64)> {
        match load64(self.budget_bytes(direction)) {
            0 => None,
            bytes => Some((bytes, load64(self.used(direction)))),
        }
    }

    /// Whether a direction's budget is spent.
    #[inline(always)]
    pub fn is_spent(self, direction: Direction) -> bool {
        self.budget(direction)
            .is_some_and(|(bytes, used)| used >= bytes)
    }

    /// Whether packets of a direction are to be dropped for its budget.
    #[inline(always)]
    fn is_over_budget(self, direction: Direction) -> bool {
        const REFUSE: u32 = (AtEnd::Refuse as u32) << BudgetBits::AT_END_SHIFT;
        self.is_spent(direction)
            && load32(self.budget_bits(direction)) & BudgetBits::AT_END != REFUSE
    }

    /// Terms and state of a direction's budget, [`BudgetBits`].
    #[inline(always)]
    pub fn budget_bits<'a>(self, direction: Direction) -> &'a AtomicU32 {
        // SAFETY: part of a valid row; both sides use atomics on this field.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.of(direction)).budget_bits) }
    }

    /// What was used of a direction's budget, L3 bytes.
    #[inline(always)]
    pub fn used<'a>(self, direction: Direction) -> &'a AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.of(direction)).budget_used) }
    }

    #[inline(always)]
    fn budget_bytes<'a>(self, direction: Direction) -> &'a AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.of(direction)).budget_bytes) }
    }

    /// Has the limit of bytes of a direction shape by the queue of this device, or police if 0. The
    /// device has its queue before, and keeps it until afterwards.
    pub fn set_pacer(self, direction: Direction, ifindex: u32) {
        let [_, bytes] = self.limits(direction);
        let ahead_ns = paced_ahead_ns(load64(bytes.per_second()));
        store64(self.paced_ahead_ns(direction), ahead_ns);
        store32(self.pacer_word(direction), ifindex);
    }

    /// Ifindex of the device that shapes the bytes of a direction; 0 if they are policed.
    #[inline(always)]
    pub fn pacer(self, direction: Direction) -> u32 {
        load32(self.pacer_word(direction))
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
    fn paced_ahead_ns<'a>(self, direction: Direction) -> &'a AtomicU64 {
        // SAFETY: part of a valid row; both sides use atomics on this field.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.of(direction)).paced_ahead_ns) }
    }

    #[inline(always)]
    fn pacer_word<'a>(self, direction: Direction) -> &'a AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.of(direction)).pacer) }
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
