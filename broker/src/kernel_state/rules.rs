//! The rules in `RULES`: a flow's slot names its rule by number. An element holds the rule's text,
//! for people, and its identity ([`Described`]).
//!
//! Several processes share the array. Each takes a run of free elements for its rules, or the run
//! that has the same rules already (its predecessor's). A run is not freed while the maps live,
//! since flows may name it, unless the array is full: then elements that no flow names any more are
//! reused, first of the process's own, except those of the rules in force. An element that has the rule of its place already is part
//! of a run whoever names it: after many changes flows name a few rules of each of many runs, which
//! differ little from the next.
//!
//! Each process records the elements that it judges by in a file beside the locks (`<row>.rules`).
//! No other process takes any of them while it lives, whether flows name them or not.
use std::{
    collections::HashSet,
    fs::{self, File},
    ops::Range,
    path::PathBuf,
};

use anyhow::{Context as _, bail};
use slipgate_abi::{
    RuleIndex, Verdict,
    maps::{MOST_RULES, RuleElement},
};
use slipgate_control::{Paths, maps::SharedMaps, owner};
use slipgate_policy::Described;

/// Identity of an element: a digest of the whole rule, or the mark of a free element.
type Whole = [u8; 16];
const FREE: Whole = RuleElement::FREE.whole;

/// Process whose rules are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Writer<'w> {
    pub(crate) paths: &'w Paths,
    /// Rows of the process in `OWNERS`.
    pub(crate) rows: &'w [u32],
    /// Ranges of elements that this process has used.
    pub(crate) own: &'w [Range<u32>],
    /// Elements in use without a flow: the rules in force, and the forwards to which relays refer
    /// by number.
    pub(crate) kept: &'w [Range<u32>],
}

/// Writes the rules. Returns their range of elements. The lock on the directory of the locks
/// excludes other processes meanwhile.
pub(crate) fn write(
    maps: &SharedMaps,
    rules: &[Described],
    writer: Writer<'_>,
) -> anyhow::Result<Range<u32>> {
    let Writer { own, kept, .. } = writer;
    let run_dir = &writer.paths.run_dir;
    let what = || format!("locking {}", run_dir.display());
    let dir = File::open(run_dir).with_context(what)?;
    dir.lock().with_context(what)?;
    let element = |index| maps.rule_element(RuleIndex::new(index));
    let present: Vec<Whole> = (0..maps.sizes().rules)
        .map(|index| element(index).map_or(FREE, |element| element.whole))
        .collect();
    let wanted: Vec<Whole> = rules.iter().map(|rule| rule.identity.whole()).collect();
    let mut in_use = writer.of_others()?;
    in_use.extend(kept.iter().cloned().flatten());
    // Elements that no flow names, of ours, then of anybody.
    let without = |free: &dyn Fn(u32) -> bool| -> Vec<Whole> {
        let named = named_by_flows(maps);
        let stays = |index| !free(index) || named.contains(&index) || in_use.contains(&index);
        leaving(&present, stays)
    };
    let again = |left: Vec<Whole>| {
        let run = place(&left, &wanted)?;
        for range in free_in(&left, run.clone()) {
            maps.forget_refusals_by(range);
        }
        Some(run)
    };
    let is_own = |index: u32| own.iter().any(|run| run.contains(&index));
    // Which elements flows name is found out by reading every slot: only where there is no room.
    let run = place(&present, &wanted)
        .or_else(|| again((!own.is_empty()).then(|| without(&is_own))?))
        .or_else(|| again(without(&|_| true)));
    let Some(run) = run else {
        let most = maps.sizes().rules;
        bail!(no_room(rules.len(), in_use.len(), own.is_empty(), most));
    };
    // Before the rules are: whoever comes after us sees the claim first.
    let mut claimed = vec![run.clone()];
    claimed.extend(kept.iter().cloned());
    writer.claim(&claimed)?;
    for (index, rule) in run.clone().zip(rules) {
        maps.set_rule(RuleIndex::new(index), rule.element(), &rule.text);
    }
    Ok(run)
}

fn no_room(rules: usize, in_use: usize, starts: bool, most: u32) -> String {
    let left = (most as usize).saturating_sub(in_use);
    let what = match starts {
        true => "",
        false => {
            " beside those in force, which stay until it is (restart slipgate with \
                  --on-exit keep, which keeps the flows and needs no such room)"
        }
    };
    format!(
        "there is no room for {rules} rules{what}: all slipgate processes of a network namespace \
         share {most} (--max-rules), of which {left} are not in force, and some of these are named by flows; \
         put long lists into one deny file, which is one rule"
    )
}

impl Writer<'_> {
    fn claims_of(&self, row: u32) -> PathBuf {
        self.paths.run_dir.join(format!("{row}.rules"))
    }

    /// Records the elements that this process uses.
    fn claim(&self, ranges: &[Range<u32>]) -> anyhow::Result<()> {
        let path = self.claims_of(self.rows[0]);
        // Those of former processes in our other rows are over.
        for row in &self.rows[1..] {
            let _ = fs::remove_file(self.claims_of(*row));
        }
        let lines = ranges
            .iter()
            .map(|range| format!("{} {}\n", range.start, range.end));
        fs::write(&path, lines.collect::<String>())
            .with_context(|| format!("writing {}", path.display()))
    }

    /// Returns the elements that other live processes use. Of a dead process, only the elements
    /// that flows name are in use.
    fn of_others(&self) -> anyhow::Result<HashSet<u32>> {
        let mut in_use = HashSet::new();
        for row in owner::living(self.paths, owner::WHILE_SERVING)? {
            if !self.rows.contains(&row) {
                // One that has none judges by no rules yet, or is of a version that writes none.
                let text = fs::read_to_string(self.claims_of(row)).unwrap_or_default();
                in_use.extend(ranges(&text).flatten());
            }
        }
        Ok(in_use)
    }
}

/// Returns the ranges in the text of a claims file.
fn ranges(text: &str) -> impl Iterator<Item = Range<u32>> {
    text.lines().filter_map(|line| {
        let (start, end) = line.split_once(' ')?;
        let range = start.parse().ok()?..end.parse().ok()?;
        (range.end <= MOST_RULES).then_some(range)
    })
}

/// Returns the present elements, with those that may be reused marked as free.
fn leaving(present: &[Whole], stays: impl Fn(u32) -> bool) -> Vec<Whole> {
    let all = (0..).zip(present);
    all.map(|(index, rule)| if stays(index) { *rule } else { FREE })
        .collect()
}

/// Returns the first range that has these rules, else the first whose other elements are free.
fn place(present: &[Whole], wanted: &[Whole]) -> Option<Range<u32>> {
    let fits = |run: &[Whole]| {
        let mut both = run.iter().zip(wanted);
        both.all(|(rule, wanted)| *rule == FREE || rule == wanted)
    };
    same(present, wanted).or_else(|| first(present, wanted, fits))
}

/// Returns the free elements of a range, as ranges.
fn free_in(present: &[Whole], range: Range<u32>) -> Vec<Range<u32>> {
    let mut end = range.start;
    let elements = &present[range.start as usize..range.end as usize];
    let alike = elements.chunk_by(|a, b| (*a == FREE) == (*b == FREE));
    let ranges = alike.map(|part| {
        let start = end;
        end += part.len() as u32;
        (part[0] == FREE).then_some(start..end)
    });
    ranges.flatten().collect()
}

/// Returns the first range that has these rules.
fn same(present: &[Whole], wanted: &[Whole]) -> Option<Range<u32>> {
    first(present, wanted, |run| run == wanted)
}

fn first(
    present: &[Whole],
    wanted: &[Whole],
    fits: impl Fn(&[Whole]) -> bool,
) -> Option<Range<u32>> {
    let start = present.windows(wanted.len()).position(fits)?;
    let start = u32::try_from(start).ok()?;
    Some(start..start + u32::try_from(wanted.len()).ok()?)
}

fn named_by_flows(maps: &SharedMaps) -> HashSet<u32> {
    use std::sync::atomic::Ordering::Relaxed;
    maps.slot_indexes()
        .filter_map(|index| maps.slot(index))
        .filter(|slot| slot.verdict().load(Relaxed) != Verdict::Free as u32)
        .map(|slot| slot.rule())
        .collect()
}

#[cfg(test)]
#[path = "rules_test.rs"]
mod tests;
