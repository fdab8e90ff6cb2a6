//! Room for rules in `RULES`: a flow's slot names its rule by number. An element holds the rule's
//! text, for people, and its identity ([`Described`]).
//!
//! # Theory of operation
//! Each policy in force has a run of elements of its own, and so have the forwards. A policy that
//! changes gets another run; flows go on to name the elements of the run before, which stay as they
//! are. Several processes share the array. An element is
//!
//! - **in force**, for a process that judges by it;
//! - **free** for one process, which claimed it and has not used it yet;
//! - or nobody's: never used, or of a run that is no longer in force. Of the latter some elements
//!   are named by flows.
//!
//! Each process records the elements that are in force or free for it in a file beside the locks
//! (`<row>.rules`). No other process takes any of them while it lives. A run is taken from the free
//! elements, without a look at anything else. Only when they don't suffice, some more are claimed,
//! under the lock on the directory of the locks: of those that were never used, and where there are
//! none, of those that no flow names. Which these are is found out by reading the slots in use; so
//! many are claimed at once that this is seldom. In the end an element that flows name becomes part
//! of a new run if it has the rule of its place already: after many changes flows name a few rules
//! of each of many runs, which differ little from the next.
//!
//! At its start a process takes the runs that have the same rules already: its predecessor's.
mod range_set;

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    ops::Range,
    path::PathBuf,
};

use anyhow::{Context as _, bail};
use slipgate_abi::{
    RuleIndex, SlotIndex, Verdict,
    maps::{MOST_RULES, RuleElement, SLOTS_PER_CHUNK},
};
use slipgate_control::{Paths, maps::SharedMaps, owner};
use slipgate_policy::Described;

pub(crate) use self::range_set::RangeSet;
use crate::persisted_policy::write_whole;

/// Identity of an element: a digest of the whole rule, or the mark of a free element.
type RuleDigest = [u8; 16];
const FREE: RuleDigest = RuleElement::FREE.whole;

/// Part of all elements that is claimed at once.
const CLAIMED_AT_ONCE: u32 = 16;

/// Process whose rules are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Writer<'w> {
    pub(crate) maps: &'w SharedMaps,
    pub(crate) paths: &'w Paths,
    /// Rows of the process in `OWNERS`.
    pub(crate) rows: &'w [u32],
}

/// The elements of this process.
#[derive(Debug, Default)]
pub(crate) struct RuleRoom {
    in_force: RangeSet,
    free: RangeSet,
    /// Elements that the file names, at least those.
    recorded: RangeSet,
    /// Element at which the search for elements that were never used goes on.
    next_unused: u32,
}

/// Error: there is no room for the rules of a policy.
#[derive(thiserror::Error, Debug)]
#[error(
    "there is no room for {wanted} rules: all slipgate processes of a network namespace share \
     {most}, of which {in_force} are in force here, {of_others} are other processes', and of the \
     rest flows name too many: put long lists into one deny file, which is one rule, have VMs share \
     policies, or give a greater --max-rules, which takes effect when no slipgate runs here and no \
     flow is left"
)]
pub(crate) struct NoRoom {
    wanted: u32,
    most: u32,
    in_force: u32,
    of_others: u32,
}

impl RuleRoom {
    /// Number of elements in force for this process.
    pub(crate) const fn in_force(&self) -> u32 {
        self.in_force.len()
    }

    /// Takes the runs that have these rules already, for each list of rules, or else takes others
    /// and writes the rules. Called once, at the start. Returns the runs in order.
    ///
    /// # Errors
    /// There is no room, or the files of claims can't be read or written.
    pub(crate) fn begin(
        &mut self,
        writer: Writer<'_>,
        lists: &[Vec<Described>],
    ) -> anyhow::Result<Vec<Range<u32>>> {
        let _lock = writer.lock()?;
        let present = Present::read(writer.maps);
        let found: Vec<Option<Range<u32>>> = lists
            .iter()
            .map(|rules| present.run_of(&wholes(rules)))
            .collect();
        for run in found.iter().flatten() {
            self.in_force.insert(run.clone());
        }
        let mut runs = Vec::new();
        for (rules, found) in lists.iter().zip(found) {
            runs.push(match found {
                Some(run) => run,
                None => self.add_under_lock(writer, rules)?,
            });
        }
        self.record(writer)?;
        Ok(runs)
    }

    /// Takes a run of free elements, which is in force from now on, and writes rules into it.
    ///
    /// # Errors
    /// [`NoRoom`], or the files of claims can't be read or written.
    pub(crate) fn add(
        &mut self,
        writer: Writer<'_>,
        rules: &[Described],
    ) -> anyhow::Result<Range<u32>> {
        if self.free.first_fit(rules.len() as u32).is_some() {
            return self.add_under_lock(writer, rules);
        }
        let _lock = writer.lock()?;
        self.add_under_lock(writer, rules)
    }

    /// A run is no longer in force; its elements stay as flows may name them. `stays`: one that is
    /// in force all the same, and may have elements of it.
    pub(crate) fn retire(&mut self, run: Range<u32>, stays: Option<Range<u32>>) {
        self.in_force.remove(run);
        if let Some(stays) = stays {
            self.in_force.insert(stays);
        }
    }

    /// Records the elements of this process, where the file names many that others may have by now.
    pub(crate) fn record_if_stale(&mut self, writer: Writer<'_>) {
        let ours = self.in_force.len() + self.free.len();
        let most = at_once(writer.maps, 1);
        if self.recorded.len() - ours.min(self.recorded.len()) > most
            && let Err(e) = self.record(writer)
        {
            tracing::debug!("the record of the rules stays as it was: {e:#}");
        }
    }

    fn add_under_lock(
        &mut self,
        writer: Writer<'_>,
        rules: &[Described],
    ) -> anyhow::Result<Range<u32>> {
        let wanted = rules.len() as u32;
        if wanted == 0 {
            // A place would be that of another run's first element.
            return Ok(0..0);
        }
        let start = match self.free.first_fit(wanted) {
            Some(start) => start,
            None => self.claim(writer, rules)?,
        };
        let run = start..start + wanted;
        self.free.remove(run.clone());
        self.in_force.insert(run.clone());
        for (index, rule) in run.clone().zip(rules) {
            let index = RuleIndex::new(index);
            // One that flows name may be the same rule's.
            if writer.maps.rule_whole(index) != rule.identity.whole() {
                writer.maps.set_rule(index, rule.element(), &rule.text);
            }
        }
        Ok(run)
    }

    /// Claims elements among which there is room for these rules. Returns the first of these.
    fn claim(&mut self, writer: Writer<'_>, rules: &[Described]) -> anyhow::Result<u32> {
        let (maps, wanted) = (writer.maps, rules.len() as u32);
        let others = writer.of_others()?;
        if self.claim_unused(maps, &others, wanted) {
            self.record(writer)?;
        } else {
            self.claim_unnamed(writer, &others, wanted)?;
        }
        if let Some(start) = self.free.first_fit(wanted) {
            return Ok(start);
        }
        let start = self.overlay(maps, &others, &wholes(rules));
        let Some(start) = start else {
            bail!(NoRoom {
                wanted,
                most: maps.sizes().rules,
                in_force: self.in_force.len(),
                of_others: others.len(),
            });
        };
        self.free.insert(start..start + wanted);
        self.record(writer)?;
        Ok(start)
    }

    /// Claims elements that were never used. Returns whether there is room among them.
    fn claim_unused(&mut self, maps: &SharedMaps, others: &RangeSet, wanted: u32) -> bool {
        let (size, most) = (maps.sizes().rules, at_once(maps, wanted));
        let is_unused = |index: u32| {
            !others.contains(index)
                && !self.in_force.contains(index)
                && !self.free.contains(index)
                && maps.rule_whole(RuleIndex::new(index)) == FREE
        };
        for from in [self.next_unused, 0] {
            let mut at = from;
            while at < size {
                let start = at;
                while at < size && at - start < most && is_unused(at) {
                    at += 1;
                }
                if at - start >= wanted {
                    self.next_unused = at;
                    self.free.insert(start..at);
                    return true;
                }
                at += 1;
            }
        }
        false
    }

    /// Claims elements that no flow names any more. They hold no rule afterwards.
    fn claim_unnamed(
        &mut self,
        writer: Writer<'_>,
        others: &RangeSet,
        wanted: u32,
    ) -> anyhow::Result<()> {
        let maps = writer.maps;
        let unnamed = self.unnamed(maps, others);
        let mut claimed = RangeSet::default();
        let with_room = unnamed.first_fit(wanted).map(|start| start..start + wanted);
        claimed.insert(with_room.unwrap_or(0..0));
        let most = at_once(maps, wanted);
        for range in unnamed.iter() {
            let left = most.saturating_sub(claimed.len());
            let length = (range.end - range.start).min(left);
            claimed.insert(range.start..range.start + length);
        }
        self.free = self.free.iter().chain(claimed.iter()).collect();
        self.record(writer)?;
        maps.forget_refusals_by(|rule| claimed.contains(rule));
        // A process that starts with the rules of a former run here would take it for its own.
        for index in claimed.iter().flatten() {
            maps.set_rule(RuleIndex::new(index), RuleElement::FREE, "");
        }
        Ok(())
    }

    /// Elements that are nobody's, and that no flow names.
    fn unnamed(&self, maps: &SharedMaps, others: &RangeSet) -> RangeSet {
        let named = named_by_flows(maps);
        let is_taken = |index: u32| {
            named.contains(&index)
                || others.contains(index)
                || self.in_force.contains(index)
                || self.free.contains(index)
        };
        ranges_where(maps.sizes().rules, |index| !is_taken(index)).collect()
    }

    /// Returns the first element of a run in which each element is free, or has the rule of its
    /// place already.
    fn overlay(&self, maps: &SharedMaps, others: &RangeSet, wanted: &[RuleDigest]) -> Option<u32> {
        let unnamed = self.unnamed(maps, others);
        let fits = |index: u32, whole: &RuleDigest| {
            unnamed.contains(index)
                || self.free.contains(index)
                || maps.rule_whole(RuleIndex::new(index)) == *whole
        };
        let starts = 0..(maps.sizes().rules + 1).saturating_sub(wanted.len() as u32);
        let mut starts = starts.into_iter();
        let start = starts.find(|start| (*start..).zip(wanted).all(|(at, whole)| fits(at, whole)));
        if let Some(start) = start {
            let run = start..start + wanted.len() as u32;
            let is_new = |rule: u32| run.contains(&rule) && unnamed.contains(rule);
            maps.forget_refusals_by(is_new);
        }
        start
    }

    /// Writes the file of this process's elements.
    fn record(&mut self, writer: Writer<'_>) -> anyhow::Result<()> {
        let ours: RangeSet = self.in_force.iter().chain(self.free.iter()).collect();
        writer.claim(&ours)?;
        self.recorded = ours;
        Ok(())
    }
}

/// Number of elements that are claimed at once for so many rules.
fn at_once(maps: &SharedMaps, wanted: u32) -> u32 {
    (maps.sizes().rules / CLAIMED_AT_ONCE).max(wanted)
}

fn wholes(rules: &[Described]) -> Vec<RuleDigest> {
    rules.iter().map(|rule| rule.identity.whole()).collect()
}

/// Returns the ranges of the numbers below `end` for which something holds.
fn ranges_where(end: u32, holds: impl Fn(u32) -> bool) -> impl Iterator<Item = Range<u32>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = (at..end).find(|number| holds(*number))?;
        at = (start..end).find(|number| !holds(*number)).unwrap_or(end);
        Some(start..at)
    })
}

/// Content of the elements of `RULES`.
struct Present {
    elements: Vec<RuleDigest>,
    /// Places of each rule.
    places: HashMap<RuleDigest, Vec<u32>>,
}

impl Present {
    fn read(maps: &SharedMaps) -> Self {
        let all = (0..maps.sizes().rules).map(RuleIndex::new);
        Self::of(all.map(|index| maps.rule_whole(index)).collect())
    }

    fn of(elements: Vec<RuleDigest>) -> Self {
        let mut places: HashMap<RuleDigest, Vec<u32>> = HashMap::new();
        for (index, whole) in (0..).zip(&elements).filter(|(_, whole)| **whole != FREE) {
            places.entry(*whole).or_default().push(index);
        }
        Self { elements, places }
    }

    /// Returns the first run that has these rules.
    fn run_of(&self, wanted: &[RuleDigest]) -> Option<Range<u32>> {
        let has = |start: &u32| {
            let run = self.elements.get(*start as usize..).unwrap_or_default();
            run.starts_with(wanted)
        };
        let mut starts = self.places.get(wanted.first()?)?.iter().copied();
        let start = starts.find(has)?;
        Some(start..start + wanted.len() as u32)
    }
}

impl Writer<'_> {
    /// Excludes other processes for as long as the result lives.
    fn lock(&self) -> anyhow::Result<File> {
        let run_dir = &self.paths.run_dir;
        let what = || format!("locking {}", run_dir.display());
        let dir = File::open(run_dir).with_context(what)?;
        dir.lock().with_context(what)?;
        Ok(dir)
    }

    /// Whether a run has these rules.
    pub(crate) fn has(&self, run: &Range<u32>, rules: &[Described]) -> bool {
        let is_it = |(index, rule): (u32, &Described)| {
            self.maps.rule_whole(RuleIndex::new(index)) == rule.identity.whole()
        };
        run.len() == rules.len() && run.clone().zip(rules).all(is_it)
    }

    fn claims_of(&self, row: u32) -> PathBuf {
        self.paths.run_dir.join(format!("{row}.rules"))
    }

    /// Records the elements that this process uses, or may use at any time.
    fn claim(&self, elements: &RangeSet) -> anyhow::Result<()> {
        let path = self.claims_of(self.rows[0]);
        // Those of former processes in our other rows are over.
        for row in &self.rows[1..] {
            let _ = fs::remove_file(self.claims_of(*row));
        }
        let lines = elements
            .iter()
            .map(|range| format!("{} {}\n", range.start, range.end));
        // Whoever reads it meets a whole one: this may be written without the lock.
        write_whole(&path, lines.collect::<String>().as_bytes())
            .with_context(|| format!("writing {}", path.display()))
    }

    /// Returns the elements of other live processes. Of a dead process, only the elements that flows
    /// name are in use.
    fn of_others(&self) -> anyhow::Result<RangeSet> {
        let mut in_use = RangeSet::default();
        for row in owner::living(self.paths, owner::WHILE_SERVING)? {
            if !self.rows.contains(&row) {
                // One that has none judges by no rules yet, or is of a version that writes none.
                let text = fs::read_to_string(self.claims_of(row)).unwrap_or_default();
                ranges(&text).for_each(|range| in_use.insert(range));
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

/// Elements that flows name. Chunks of slots that nobody has hold none.
fn named_by_flows(maps: &SharedMaps) -> HashSet<u32> {
    use std::sync::atomic::Ordering::Relaxed;
    let chunks = 0..maps.slots().div_ceil(SLOTS_PER_CHUNK);
    let owned = chunks.filter(|chunk| maps.chunk_owner(*chunk).is_some());
    let first = |chunk: u32| SlotIndex::of_chunk(chunk).get();
    owned
        .flat_map(|chunk| first(chunk)..first(chunk + 1))
        .filter_map(|slot| maps.slot(SlotIndex::new(slot)))
        .filter(|slot| slot.verdict().load(Relaxed) != Verdict::Free as u32)
        .map(|slot| slot.rule())
        .collect()
}

#[cfg(test)]
#[path = "rules_test.rs"]
mod tests;
