//! How much work a VM may have done for its Initial packets.
//!
//! # Theory of operation
//! Keys of an Initial are made of an id that whoever sends it chose, so each packet of a datagram
//! can ask for keys of its own: that is dear, and so is to try them on what they do not open. What
//! a VM's guest asks for is taken from an [`Allowance`], and what the servers of its flows ask for
//! from another, so that neither spends what is the other's. Time refills it. What it holds when it
//! is full is the most that is done in one turn of the engine, but for what time adds meanwhile.
//!
//! | | costs |
//! | --- | --- |
//! | keys that are made; a connection keeps its own | [`DERIVATION`] |
//! | a packet that keys are tried on | [`TRIAL`] |
//!
//! When nothing is left, a guest's packet is dropped and its client sends it again, and a server's
//! goes on unread. A client's Initials open: a flow whose own do not is ended when that has cost
//! [`MAX_WASTED`].
use crate::quota::TokenBucket;

/// Cost of deriving keys.
pub const DERIVATION: u32 = 8;
/// Cost of trying keys on a packet.
pub const TRIAL: u32 = 1;
/// Most that a VM may spend at once: enough for some hundred connections that begin together.
pub const MOST: u32 = 128 * (DERIVATION + TRIAL);
/// Long-term rate at which a VM may spend, per second.
const PER_SECOND: u32 = 4_096;
/// Most that a flow may spend on Initials that do not open.
pub const MAX_WASTED: u32 = 32 * (DERIVATION + TRIAL);

/// Budget of a VM that is left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowance(TokenBucket);

impl Default for Allowance {
    /// A full budget.
    fn default() -> Self {
        Self(TokenBucket::new(PER_SECOND, MOST))
    }
}

/// Error: the budget is spent for now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NothingLeft;

/// Work on a frame, and the budget that it is charged to.
#[derive(Debug)]
pub struct Effort<'a> {
    allowance: &'a mut Allowance,
    now_ns: u64,
    spent: u32,
}

impl<'a> Effort<'a> {
    /// Work that has not begun yet.
    pub fn new(allowance: &'a mut Allowance, now_ns: u64) -> Self {
        Self {
            allowance,
            now_ns,
            spent: 0,
        }
    }

    /// Cost that was spent so far.
    pub(super) fn spent(&self) -> u32 {
        self.spent
    }

    /// Charges for a derivation of keys.
    ///
    /// # Errors
    /// If the budget is spent.
    pub(super) fn derive(&mut self) -> Result<(), NothingLeft> {
        self.spend(DERIVATION)
    }

    /// Charges for a trial of keys.
    ///
    /// # Errors
    /// If the budget is spent.
    pub(super) fn attempt(&mut self) -> Result<(), NothingLeft> {
        self.spend(TRIAL)
    }

    fn spend(&mut self, cost: u32) -> Result<(), NothingLeft> {
        if !self.allowance.0.take_many(cost, self.now_ns) {
            return Err(NothingLeft);
        }
        self.spent += cost;
        Ok(())
    }
}
