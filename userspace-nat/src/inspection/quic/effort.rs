//! How much work a VM may have done for its Initial packets.
//!
//! # Theory of operation
//! Keys of an Initial are made of an id that whoever sends it chose, so each packet of a datagram can
//! ask for keys of its own: that is dear, and so is to try them on what they do not open. What a VM's
//! guest asks for is taken from an [`Allowance`], and what the servers of its flows ask for from
//! another, so that neither spends what is the other's. Time refills it. What it holds when it is
//! full is the most that is done in one turn of the engine, but for what time adds meanwhile.
//!
//! | | costs |
//! | --- | --- |
//! | keys that are made; a connection keeps its own | [`DERIVATION`] |
//! | a packet that keys are tried on | [`TRIAL`] |
//!
//! When nothing is left, a guest's packet is dropped and its client sends it again, and a server's goes
//! on unread. A client's Initials open: a flow whose own do not is ended when that has cost
//! [`MAX_WASTED`].
use crate::quota::TokenBucket;

/// What keys cost.
pub const DERIVATION: u32 = 8;
/// What it costs to try keys on a packet.
pub const TRIAL: u32 = 1;
/// What a VM may spend at once: on some hundred connections that begin together.
pub const MOST: u32 = 128 * (DERIVATION + TRIAL);
/// What it may spend in a second, in the long run.
const PER_SECOND: u32 = 4_096;
/// What a flow may spend on Initials that do not open.
pub const MAX_WASTED: u32 = 32 * (DERIVATION + TRIAL);

/// What a VM has left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowance(TokenBucket);

impl Default for Allowance {
    /// All of it.
    fn default() -> Self {
        Self(TokenBucket::new(PER_SECOND, MOST))
    }
}

/// Nothing is left for now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NothingLeft;

/// The work on a frame, and on whose account it is.
#[derive(Debug)]
pub struct Effort<'a> {
    allowance: &'a mut Allowance,
    now_ns: u64,
    spent: u32,
}

impl<'a> Effort<'a> {
    /// Nothing is done yet.
    pub fn new(allowance: &'a mut Allowance, now_ns: u64) -> Self {
        Self {
            allowance,
            now_ns,
            spent: 0,
        }
    }

    /// What was spent so far.
    pub(super) fn spent(&self) -> u32 {
        self.spent
    }

    /// Before keys are made.
    pub(super) fn derive(&mut self) -> Result<(), NothingLeft> {
        self.spend(DERIVATION)
    }

    /// Before keys are tried.
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
