//! Budgets of bytes.
//!
//! # Theory of operation
//! A direction may have a budget: bytes that may pass in a day, or for as long as slipgate knows the VM.
//! What passes is added to one word. Once that has reached the budget the programs drop the rest, and
//! the engine refuses new flows, unless established flows may go on. So a VM goes beyond it by no more
//! than the frames that the CPUs are handling at that moment, one each. The broker does what else is to
//! be done at the end, and begins a new day.
use core::sync::atomic::{AtomicU32, AtomicU64};

use super::RateRef;
use crate::{
    Direction,
    cell::{load32, load64, store32, store64},
};

/// Terms of a VM's budgets of bytes: their period, and the consequence when one is spent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Budget {
    /// Whether it is a day's (UTC), and not for as long as slipgate knows the VM.
    pub per_day: bool,
    /// Consequence when it is spent.
    pub at_end: AtEnd,
}

/// Consequence of a spent budget, besides that new flows are refused.
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

/// Names of the bits in [`budget_bits`](super::DirectionLimits::budget_bits).
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

impl RateRef {
    /// Sets the budget of a direction, L3 bytes; 0: there is none.
    pub(super) fn set_budget(self, direction: Direction, bytes: u64, budget: Budget) {
        let terms = match bytes {
            0 => 0,
            _ => {
                let per_day = if budget.per_day {
                    BudgetBits::PER_DAY
                } else {
                    0
                };
                per_day | (budget.at_end as u32) << BudgetBits::AT_END_SHIFT
            }
        };
        let bits = self.budget_bits(direction);
        let before = load32(bits);
        let had = load64(self.budget_bytes(direction)) != 0;
        // What passed before belongs to no day, but that of a day's budget that was taken away.
        if terms & !before & BudgetBits::PER_DAY != 0 && (had || before & BudgetBits::DAY == 0) {
            store64(self.used(direction), 0);
        }
        let mut kept = before & !(BudgetBits::PER_DAY | BudgetBits::AT_END);
        if bytes == 0 {
            // The next budget has an end of its own.
            kept &= !(BudgetBits::TOLD | BudgetBits::CUT_DUE);
        }
        store32(bits, kept | terms);
        store64(self.budget_bytes(direction), bytes);
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
    pub(super) fn is_over_budget(self, direction: Direction) -> bool {
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

    /// Returns the counter of a direction's used budget, L3 bytes.
    #[inline(always)]
    pub fn used<'a>(self, direction: Direction) -> &'a AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.of(direction)).budget_used) }
    }

    #[inline(always)]
    pub(super) fn budget_bytes<'a>(self, direction: Direction) -> &'a AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.of(direction)).budget_bytes) }
    }
}

#[cfg(test)]
#[path = "budget_test.rs"]
mod tests;
