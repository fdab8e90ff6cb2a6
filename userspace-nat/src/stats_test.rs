use slipgate_abi::{DropCounters, DropReason, RuleIndex, RuleRefusals, VmCounters};

use super::VmStats;

#[test]
fn a_rule_keeps_its_place_when_one_before_comes_free() {
    let (mut counters, mut drops) = (VmCounters::default(), DropCounters::default());
    let counters = &raw mut counters;
    // SAFETY: both outlive it, and only this thread has them.
    let stats = unsafe { VmStats::new(counters, &raw mut drops) };
    for rule in [3, 7] {
        stats.refused_by(RuleIndex::new(rule));
    }
    // A broker takes the first one's count away, since its rule is another now.
    // SAFETY: as above.
    unsafe { (*counters).refused_by_rule[0] = RuleRefusals::default() };
    for rule in [7, 9] {
        stats.refused_by(RuleIndex::new(rule));
    }
    let places = stats.snapshot().0.refused_by_rule;
    let named = |place: RuleRefusals| (place.rule, place.flows);
    assert_eq!(places.map(named)[..3], [(10, 1), (8, 2), (0, 0)]);
}

impl VmStats {
    /// Packets dropped for this reason so far.
    pub(crate) fn packets_dropped(&self, reason: DropReason) -> u64 {
        let counters = self.drops.cast::<slipgate_abi::Counter>();
        // SAFETY: `new`'s promise; the struct is an array of counters in the order of the enum.
        unsafe { (*counters.add(reason as usize)).packets }
    }
}
