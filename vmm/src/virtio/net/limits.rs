//! The card's rate limits. Each is for the card, so its queue pairs share it.
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::virtio::rate::{Limiter, RateConfig};

/// Limits of both directions.
#[derive(Clone, Debug, Default)]
pub(super) struct Limits {
    pub(super) tx: Limit,
    pub(super) rx: Limit,
}

impl Limits {
    pub(super) fn new(rates: NetRates) -> Limits {
        Limits {
            tx: Limit::new(rates.tx),
            rx: Limit::new(rates.rx),
        }
    }
}

/// Rates of a card. Bytes are those of frames, from the Ethernet header on; operations are packets,
/// of which a GSO frame has as many as it will be segmented into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetRates {
    /// From the guest. What is more waits in the guest's ring.
    pub tx: RateConfig,
    /// To the guest. What is more waits in the TAP.
    pub rx: RateConfig,
}

/// Limit of one direction. Without one nothing is locked and no clock is read.
#[derive(Clone, Debug, Default)]
pub(super) struct Limit(Option<Arc<Mutex<Limiter>>>);

impl Limit {
    fn new(rate: RateConfig) -> Limit {
        let limiter = Limiter::new(rate, Instant::now());
        Limit(limiter.map(|limiter| Arc::new(Mutex::new(limiter))))
    }

    fn lock(&self) -> Option<MutexGuard<'_, Limiter>> {
        let limiter = self.0.as_ref()?;
        Some(limiter.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns whether there is a limit.
    pub(super) fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// Returns when frames pass again; `None`: they do.
    pub(super) fn closed_until(&self) -> Option<Instant> {
        self.lock()?.closed_until(Instant::now())
    }

    /// Returns how many frames of this length pass now: at least one.
    ///
    /// # Errors
    /// None pass before that time. It comes from the same look at the clock, so whoever sees the
    /// limit closed always has a time to wait for.
    pub(super) fn room(&self, bytes: usize) -> Result<usize, Instant> {
        let Some(mut limiter) = self.lock() else {
            return Ok(usize::MAX);
        };
        let room = limiter.room(bytes as u64, Instant::now())?;
        Ok(usize::try_from(room).unwrap_or(usize::MAX))
    }

    /// Takes the tokens of packets that have passed.
    pub(super) fn charge(&self, bytes: u64, packets: u64) {
        if let Some(mut limiter) = self.lock() {
            limiter.charge(bytes, packets);
        }
    }
}
