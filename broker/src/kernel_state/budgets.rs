//! Budgets of bytes: what happens when one is spent, and the beginning of a day's.
//!
//! The programs count and stop by themselves ([`slipgate_abi::rate`]). This process looks at some VMs
//! at a time, every [`LOOK_EVERY`], so what is done besides (the event, the cut, the freeze, the thaw of
//! a new day) is at most a round late. The state is in the row of `RATES`, and so outlives processes.
use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant, SystemTime},
};

use slipgate_abi::{
    AtEnd, Direction, VmRow,
    rate::{BudgetBits, RateRef},
};
use slipgate_control::SharedMaps;
use slipgate_ipc::api::Event;

use super::Attached;

/// Interval between two looks at the budgets.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(250);
/// VMs in one look.
const AT_ONCE: usize = 256;

/// The round of looks.
#[derive(Debug, Default)]
pub(crate) struct Budgets {
    /// Time of the next look; `None` while no VM has a budget.
    due: Option<Instant>,
    /// Place of the next VM.
    next: usize,
    /// Whether this round has met a VM with a budget, or one that a budget froze.
    has_met: bool,
}

/// Order to an engine about a spent budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BudgetOrder {
    /// Cut the VM's flows.
    Cut(VmRow),
    /// Prepare the thaw of the VM, which a spent budget froze.
    Thaw(VmRow),
}

impl Budgets {
    /// A VM has a budget, or is frozen by one that it had.
    pub(super) fn begin(&mut self) {
        self.has_met = true;
        self.due.get_or_insert_with(Instant::now);
    }
}

/// Returns the day since 1970 (UTC), as the rows have it.
pub(crate) fn today() -> u32 {
    const DAY_S: u64 = 86_400;
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let day = since.map_or(0, |since| since.as_secs() / DAY_S);
    // 0 is none.
    (day as u32 & BudgetBits::DAY).max(1)
}

impl Attached {
    /// Time of the next look at budgets; `None` while there are none.
    pub(crate) fn budgets_due(&self) -> Option<Instant> {
        self.budgets.due
    }

    /// Looks at the next VMs. Returns what engines are to do, each with its worker.
    pub(crate) fn look_at_budgets(&mut self, today: u32) -> Vec<(usize, BudgetOrder)> {
        let mut orders = Vec::new();
        let until = (self.budgets.next + AT_ONCE).min(self.vms.len());
        for at in self.budgets.next..until {
            let vm = &self.vms[at];
            let Some(limits) = self.datapath.maps().rate_limits(vm.open.row) else {
                continue;
            };
            if !vm.config.limits.rates.has_budget() && !has_frozen(limits) {
                continue;
            }
            self.budgets.has_met = true;
            let at_end = vm.config.limits.rates.budget.at_end;
            let order = self.look_at_budget(at, at_end, today);
            orders.extend(order.map(|order| (self.vms[at].worker, order)));
        }
        let has_ended = until >= self.vms.len();
        self.budgets.next = if has_ended { 0 } else { until };
        let goes_on = !has_ended || std::mem::take(&mut self.budgets.has_met);
        self.budgets.due = goes_on.then(|| Instant::now() + LOOK_EVERY);
        orders
    }

    fn look_at_budget(&mut self, at: usize, at_end: AtEnd, today: u32) -> Option<BudgetOrder> {
        let vm = &self.vms[at];
        let about = (vm.open.row, vm.config.name.as_str());
        let events = &mut self.events;
        look_at(self.datapath.maps(), about, at_end, today, |event| {
            events.push(event);
        })
    }

    /// An engine has been told to cut the flows of a VM whose budget is spent.
    pub(crate) fn is_cut(&self, row: VmRow) {
        is_cut(self.datapath.maps(), row);
    }
}

/// Looks at the budgets of a VM, by its row and its name. Returns what its engine is to do; `tell` is
/// told of what happens.
pub(crate) fn look_at(
    maps: &SharedMaps,
    (row, vm): (VmRow, &str),
    at_end: AtEnd,
    today: u32,
    mut tell: impl FnMut(Event),
) -> Option<BudgetOrder> {
    let limits = maps.rate_limits(row)?;
    let mut order = None;
    for direction in [Direction::Tx, Direction::Rx] {
        let Some((bytes, _)) = limits.budget(direction) else {
            continue;
        };
        begin_day(limits, direction, today);
        let bits = limits.budget_bits(direction);
        let is_told = bits.load(Relaxed) & BudgetBits::TOLD != 0;
        match limits.is_spent(direction) {
            true if !is_told => {
                bits.fetch_or(BudgetBits::TOLD, Relaxed);
                let name = name(direction);
                tracing::info!("{vm} has spent its budget of {bytes} bytes ({name})");
                tell(Event::BudgetSpent {
                    vm: vm.to_owned(),
                    direction: name.into(),
                    bytes,
                });
                match at_end {
                    AtEnd::Refuse => {}
                    AtEnd::Cut => {
                        bits.fetch_or(BudgetBits::CUT_DUE, Relaxed);
                    }
                    AtEnd::Freeze if maps.is_frozen(row) => {}
                    AtEnd::Freeze => {
                        maps.set_frozen(row, true);
                        bits.fetch_or(BudgetBits::FROZE, Relaxed);
                        tell(Event::VmFrozen { vm: vm.to_owned() });
                    }
                }
            }
            // A new day, or a larger budget.
            false if is_told => {
                bits.fetch_and(!(BudgetBits::TOLD | BudgetBits::CUT_DUE), Relaxed);
            }
            _ => {}
        }
        // Asked again until an engine is told.
        if at_end == AtEnd::Cut && bits.load(Relaxed) & BudgetBits::CUT_DUE != 0 {
            order = Some(BudgetOrder::Cut(row));
        }
    }
    let is_spent = limits.is_spent(Direction::Tx) || limits.is_spent(Direction::Rx);
    if has_frozen(limits) && !is_spent {
        // Asked again until it is thawed.
        match maps.is_frozen(row) {
            true => order = Some(BudgetOrder::Thaw(row)),
            false => clear(limits, BudgetBits::FROZE),
        }
    }
    order
}

/// The engine has been told to cut the flows of a VM whose budget is spent.
pub(crate) fn is_cut(maps: &SharedMaps, row: VmRow) {
    if let Some(limits) = maps.rate_limits(row) {
        clear(limits, BudgetBits::CUT_DUE);
    }
}

/// Freezes a VM for another reason than a spent budget, so that none thaws it. Returns whether it was not
/// frozen before.
pub(crate) fn freeze(maps: &SharedMaps, row: VmRow) -> bool {
    if let Some(limits) = maps.rate_limits(row) {
        clear(limits, BudgetBits::FROZE);
    }
    let was_frozen = maps.is_frozen(row);
    maps.set_frozen(row, true);
    !was_frozen
}

/// Whether a spent budget froze the VM, be it that the budget is no more.
pub(crate) fn has_frozen(limits: RateRef) -> bool {
    let bits = |direction| limits.budget_bits(direction).load(Relaxed);
    (bits(Direction::Tx) | bits(Direction::Rx)) & BudgetBits::FROZE != 0
}

fn clear(limits: RateRef, bit: u32) {
    for direction in [Direction::Tx, Direction::Rx] {
        limits.budget_bits(direction).fetch_and(!bit, Relaxed);
    }
}

/// Begins the day of a budget that is a day's.
fn begin_day(limits: RateRef, direction: Direction, today: u32) {
    let bits = limits.budget_bits(direction);
    let now = bits.load(Relaxed);
    let day = match now & BudgetBits::PER_DAY {
        0 => 0,
        _ => today,
    };
    let before = now & BudgetBits::DAY;
    if before == day {
        return;
    }
    // What passed before the first look counts, and what passed before the budget became a day's not.
    if before != 0 && day != 0 {
        limits.used(direction).store(0, Relaxed);
    }
    bits.store(now & !BudgetBits::DAY | day, Relaxed);
}

fn name(direction: Direction) -> &'static str {
    match direction {
        Direction::Tx => "tx",
        Direction::Rx => "rx",
    }
}

#[cfg(test)]
#[path = "budgets_test.rs"]
mod tests;
