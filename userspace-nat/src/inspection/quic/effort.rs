//! Budget of a VM for the work on its Initial packets.
//!
//! # Theory of operation
//! The keys of an Initial derive from an id that its sender chose, so each packet of a datagram can
//! require keys of its own. Deriving keys is expensive, and so is a trial of keys that do not fit.
//! Work for the packets of a VM's guest is charged to one [`Allowance`], and work for those of its
//! servers to another, so that neither spends the other's. Time refills them. A full allowance
//! bounds the work in one turn of the engine, except for the refill in that turn.
//!
//! | | costs |
//! | --- | --- |
//! | keys that are made; a connection keeps its own | [`DERIVATION`] |
//! | a packet that keys are tried on | [`TRIAL`] |
//!
//! When the budget is spent, a guest's packet is dropped and its client retransmits it; a server's
//! is forwarded unread. A client's Initials open: a flow whose Initials do not is ended when they
//! have cost [`MAX_WASTED`].
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
    /// Returns a budget of which nothing is used.
    fn default() -> Self {
        Self(TokenBucket::new(PER_SECOND, MOST))
    }
}

/// Error: the budget is spent for now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OverBudget;

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
    pub(super) fn derive(&mut self) -> Result<(), OverBudget> {
        self.spend(DERIVATION)
    }

    /// Charges for a trial of keys.
    ///
    /// # Errors
    /// If the budget is spent.
    pub(super) fn attempt(&mut self) -> Result<(), OverBudget> {
        self.spend(TRIAL)
    }

    fn spend(&mut self, cost: u32) -> Result<(), OverBudget> {
        if !self.allowance.0.take_many(cost, self.now_ns) {
            return Err(OverBudget);
        }
        self.spent += cost;
        Ok(())
    }
}
