//! A VM's limits of bytes: how they are kept, and what is left of budgets.
use serde::Serialize;
use slipgate_abi::{Direction, VmRow};
use slipgate_control::maps::ReadOnlyMaps;

/// Limits of bytes of one direction; what is not limited is left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct ByteLimits {
    /// L3 bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) per_second: Option<u64>,
    /// Whether the rate is shaped, or only policed. In user mode TCP waits for it, and the rest is policed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) is_shaped: Option<bool>,
    /// L3 bytes in all, or in a day.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) budget: Option<u64>,
    /// Used part of the budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) used: Option<u64>,
    /// Part of the budget that is left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) left: Option<u64>,
}

/// Limits of bytes of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct VmByteLimits {
    /// Limits on bytes from the guest.
    pub(crate) tx: ByteLimits,
    /// Limits on bytes to the guest.
    pub(crate) rx: ByteLimits,
    /// Whether budgets are a day's.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) per_day: bool,
    /// Whether user mode applies them.
    #[serde(skip)]
    pub(crate) are_of_userspace: bool,
}

impl VmByteLimits {
    /// Reads those of a VM; `None` if it has none.
    pub(crate) fn read(maps: &ReadOnlyMaps, row: VmRow) -> Option<Self> {
        let rates = maps.rates(row)?;
        let are_of_userspace = maps.are_of_userspace();
        let of = |direction, per_second: u64| {
            let budget = maps.budget(row, direction);
            ByteLimits {
                per_second: (per_second != 0).then_some(per_second),
                is_shaped: (per_second != 0)
                    .then(|| are_of_userspace || maps.is_shaped(row, direction)),
                budget: budget.map(|(bytes, _)| bytes),
                used: budget.map(|(_, used)| used),
                left: budget.map(|(bytes, used)| bytes.saturating_sub(used)),
            }
        };
        let limits = Self {
            tx: of(Direction::Tx, rates.tx.bytes_per_second),
            rx: of(Direction::Rx, rates.rx.bytes_per_second),
            per_day: rates.has_budget() && rates.budget.per_day,
            are_of_userspace,
        };
        let is_limited = [limits.tx, limits.rx] != [ByteLimits::default(); 2];
        is_limited.then_some(limits)
    }

    /// The limits as rows of a table: what, and its value.
    pub(crate) fn rows(&self) -> Vec<(String, String)> {
        let mut rows = Vec::new();
        for (way, limits) in [("from the guest", self.tx), ("to the guest", self.rx)] {
            if let (Some(rate), Some(is_shaped)) = (limits.per_second, limits.is_shaped) {
                let how = match is_shaped {
                    true if self.are_of_userspace => "TCP shaped, the rest policed",
                    true => "shaped",
                    false => "policed",
                };
                rows.push((format!("bytes/s {way}"), format!("{rate} ({how})")));
            }
            if let (Some(budget), Some(left)) = (limits.budget, limits.left) {
                let period = if self.per_day { " today" } else { "" };
                let text = format!("{left} left of {budget}{period}");
                rows.push((format!("bytes {way}"), text));
            }
        }
        rows
    }
}
