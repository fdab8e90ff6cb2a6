//! Shares of a quota, and of a store that VMs use together.
pub use slipgate_policy::TokenBucket;

pub(crate) mod worlds_rate;

/// Returns how much of a VM's quota its forwards may use: all but a quarter, which peers can't take
/// from the guest. A quota of one is not divided.
pub const fn worlds_share(quota: u32) -> u32 {
    match quota {
        0 | 1 => quota,
        _ => quota - quota.div_ceil(4),
    }
}

/// Part of a common store that is kept so that no VM can use up the store for the others: a
/// quarter, divided into equal parts. A VM that holds a part's worth or more may only take while
/// more than the reserve is free. So a VM that holds less always finds room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reserve {
    part: usize,
    whole: usize,
}

impl Reserve {
    /// Creates the reserve of a store of `size` elements for `vms` VMs. With one VM nothing is
    /// kept.
    pub const fn new(size: usize, vms: usize) -> Self {
        let part = if vms < 2 { 0 } else { size / 4 / vms };
        Self {
            part,
            whole: part * vms,
        }
    }

    /// Returns how many elements are kept.
    pub const fn size(&self) -> usize {
        self.whole
    }

    /// Whether a VM may take one more element while `free` are free. `held` returns how many it
    /// has; it is called only when that matters.
    pub fn allows(&self, free: usize, held: impl FnOnce() -> usize) -> bool {
        free > self.whole || held() < self.part
    }
}

#[cfg(test)]
#[path = "quota_test.rs"]
mod tests;
