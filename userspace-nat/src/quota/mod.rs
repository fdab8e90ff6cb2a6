//! Shares of a quota, and of a store that VMs have in common.
pub use slipgate_policy::TokenBucket;

pub(crate) mod worlds_rate;

/// How much of a VM's quota its forwards may use: all but a quarter, which nobody outside can take
/// from it. One is not shared.
pub const fn worlds_share(quota: u32) -> u32 {
    match quota {
        0 | 1 => quota,
        _ => quota - quota.div_ceil(4),
    }
}

/// What of a common store is kept so that no VM can use it up for the others: a quarter, in equal
/// parts. Whoever has a part's worth or more may only take while more than the reserve is free, so
/// whoever has less always finds something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reserve {
    part: usize,
    whole: usize,
}

impl Reserve {
    /// Of a store of `size`, among so many VMs. One alone shares with nobody.
    pub const fn new(size: usize, vms: usize) -> Self {
        let part = if vms < 2 { 0 } else { size / 4 / vms };
        Self {
            part,
            whole: part * vms,
        }
    }

    /// How much is kept.
    pub const fn size(&self) -> usize {
        self.whole
    }

    /// Whether a VM may take one more, while so much is free. `held`: what it has; asked only when
    /// it matters.
    pub fn allows(&self, free: usize, held: impl FnOnce() -> usize) -> bool {
        free > self.whole || held() < self.part
    }
}

#[cfg(test)]
#[path = "quota_test.rs"]
mod tests;
