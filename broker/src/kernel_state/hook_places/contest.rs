//! A place at a hook that others take from slipgate: when it is taken back, and when it is given up.
//!
//! The first time at once, then after waits that double. Another program that does the same would
//! otherwise change places with slipgate's for ever, and each change makes the kernel wait for all
//! CPUs. Peace of [`PEACE`] ends a contest.
use std::time::{Duration, Instant};

use slipgate_control::attach::chain::Standing;

/// Times that a place is taken back before it is given up.
pub(super) const MOST_MOVES: u32 = 6;
/// Wait after the first time; it doubles with each. Longer than the time between two looks, so that the
/// next look finds it to be waited for, and says so.
const FIRST_WAIT: Duration = Duration::from_secs(15);
/// Time as the first after which what was before is forgotten.
const PEACE: Duration = Duration::from_secs(600);

/// Reaction to a lost place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// It is taken back now.
    Move,
    /// Do nothing for now.
    Wait,
    /// It is left to the other. This is the only time that it is said.
    GiveUp,
}

/// The contest for one place.
#[derive(Debug, Default)]
pub(super) struct Contest {
    moves: u32,
    /// Before this time it is not taken back again.
    again_at: Option<Instant>,
    gave_up: bool,
    first_since: Option<Instant>,
    /// The place that was told last, while it is lost.
    told: Option<Standing>,
}

impl Contest {
    /// Whether this is another place than the one that was told last. It is the one told then.
    pub(super) fn is_news(&mut self, standing: &Standing) -> bool {
        let is_news = self.told.as_ref() != Some(standing);
        self.told = Some(standing.clone());
        is_news
    }

    /// Notes that the place is lost, and returns what to do about it.
    pub(super) fn lost(&mut self, now: Instant) -> Step {
        if self.is_over(now) {
            *self = Self {
                told: self.told.take(),
                ..Self::default()
            };
        }
        self.first_since = None;
        if self.moves >= MOST_MOVES {
            return match std::mem::replace(&mut self.gave_up, true) {
                true => Step::Wait,
                false => Step::GiveUp,
            };
        }
        if self.again_at.is_some_and(|at| now < at) {
            return Step::Wait;
        }
        self.again_at = Some(now + FIRST_WAIT * 2u32.pow(self.moves));
        self.moves += 1;
        Step::Move
    }

    /// Notes that the move that [`Contest::lost`] asked for was not tried.
    pub(super) fn postponed(&mut self) {
        self.moves = self.moves.saturating_sub(1);
        self.again_at = None;
    }

    /// Notes that slipgate's program is the first. Returns whether it was not before.
    pub(super) fn is_first(&mut self, now: Instant) -> bool {
        self.first_since.get_or_insert(now);
        self.told.take().is_some()
    }

    /// Whether the place is lost, as far as is known.
    pub(super) fn is_lost(&self) -> bool {
        self.told.is_some()
    }

    /// Whether nobody has contested the place for long.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        let is_long = |since: Instant| now.saturating_duration_since(since) >= PEACE;
        self.first_since.is_some_and(is_long)
    }
}

#[cfg(test)]
#[path = "contest_test.rs"]
mod tests;
