//! The policies in force, by name and by index.
//!
//! A policy keeps its index and the numbers of its rules while others come, change and go: a change
//! compiles, numbers and passes on what it changes and nothing else. An index is used again when its
//! policy is gone.
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    net::IpAddr,
    ops::Range,
    path::Path,
};

use anyhow::{Context as _, bail};
use slipgate_abi::forward::{DenyKey, DenyKey6};
use slipgate_control::maps::{DenyPrefix, DenyPrefix6};
use slipgate_policy::{
    Described, LocalAddresses, MOST_POLICIES, Policy, PolicySet,
    document::{LoadedPolicies, LoadedPolicy},
};

use super::rules::{RuleRoom, Writer};

/// Name of a policy; `None`: the one without a name.
pub(crate) type Name = Option<String>;

/// The policies in force.
#[derive(Debug)]
pub(crate) struct Catalogue {
    set: PolicySet,
    entries: Vec<Option<Entry>>,
    by_name: HashMap<Name, u32>,
    /// Whether the number of an index in the guard's list is the second of its two; by index.
    turns: Vec<bool>,
    /// Policies whose denied prefixes are in the guard's list.
    listed: BTreeSet<u32>,
    room: RuleRoom,
    /// Elements of `RULES` of the forwards.
    forwards: Range<u32>,
}

/// A policy in force.
#[derive(Debug)]
struct Entry {
    loaded: LoadedPolicy,
    /// Its elements of `RULES`.
    run: Range<u32>,
}

/// Policies that are new or changed, compiled, and names of those that are removed.
#[derive(Debug, Default)]
pub(crate) struct Compiled {
    put: Vec<(LoadedPolicy, Policy, Vec<Described>)>,
    gone: Vec<Name>,
}

/// Result of a change of the policies.
#[derive(Debug, Default)]
pub(crate) struct TakenIn {
    /// Indexes of the policies that changed.
    pub(crate) indexes: Vec<u32>,
    /// Former policies whose prefixes are in the guard's list, by their indexes and turns.
    pub(crate) unlisted: Vec<(u32, bool, Policy)>,
}

impl Compiled {
    /// Whether a policy of this name is put.
    pub(crate) fn puts(&self, name: &Name) -> bool {
        self.put
            .iter()
            .any(|(loaded, ..)| loaded.settings.name == *name)
    }
}

impl Catalogue {
    /// The first policies, and the forwards' rules; `policies` are those of `loaded`, compiled.
    ///
    /// # Errors
    /// There is no room for the rules, or there are too many policies.
    pub(crate) fn begin(
        writer: Writer<'_>,
        loaded: LoadedPolicies,
        policies: PolicySet,
        forwards: Vec<Described>,
    ) -> anyhow::Result<Self> {
        let policies: Vec<Policy> = policies.into_policies().collect();
        check_number(policies.len())?;
        let described = policies.iter().map(|policy| policy.described().collect());
        let lists: Vec<Vec<Described>> = described.chain([forwards]).collect();
        let mut room = RuleRoom::default();
        let runs = room.begin(writer, &lists);
        let mut runs = runs.context("giving the rules their numbers")?;
        let forwards = runs.pop().unwrap_or(0..0);
        let mut catalogue = Self {
            set: PolicySet::default(),
            entries: Vec::new(),
            by_name: HashMap::new(),
            turns: Vec::new(),
            listed: BTreeSet::new(),
            room,
            forwards,
        };
        for ((loaded, policy), run) in loaded.policies.into_iter().zip(policies).zip(runs) {
            catalogue.enter(loaded, policy, run);
        }
        Ok(catalogue)
    }

    /// Puts a policy at its index, or at a free one. Returns the index, and the policy before.
    fn enter(
        &mut self,
        loaded: LoadedPolicy,
        policy: Policy,
        run: Range<u32>,
    ) -> (u32, Option<Policy>) {
        let name = loaded.settings.name.clone();
        let index = self.by_name.get(&name).copied().unwrap_or_else(|| {
            let free = self.entries.iter().position(Option::is_none);
            free.unwrap_or(self.entries.len()) as u32
        });
        let at = index as usize;
        if self.entries.len() <= at {
            self.entries.resize_with(at + 1, || None);
            self.turns.resize(at + 1, true);
        }
        let before = self.set.put(index, Some(policy.numbered(run.start)));
        self.entries[at] = Some(Entry { loaded, run });
        self.turns[at] = !self.turns[at];
        self.by_name.insert(name, index);
        (index, before)
    }

    /// Compiles policies that are put in force, except those that are as they were, and notes those
    /// that are removed. Nothing changes yet.
    ///
    /// # Errors
    /// A policy can't be used, or there are too many.
    pub(crate) fn compile(
        &self,
        put: Vec<LoadedPolicy>,
        gone: Vec<Name>,
    ) -> anyhow::Result<Compiled> {
        let mut compiled = Compiled::default();
        for loaded in put {
            if self.loaded(&loaded.settings.name) != Some(&loaded) {
                let policy = loaded.compile()?;
                let described = policy.described().collect();
                compiled.put.push((loaded, policy, described));
            }
        }
        compiled.gone = gone;
        compiled.gone.retain(|name| self.by_name.contains_key(name));
        let is_new =
            |(loaded, ..): &&(LoadedPolicy, _, _)| self.loaded(&loaded.settings.name).is_none();
        check_number(self.by_name.len() + compiled.put.iter().filter(is_new).count())?;
        Ok(compiled)
    }

    /// Puts compiled policies in force for whoever asks from now on. On error nothing has changed.
    ///
    /// # Errors
    /// There is no room for the rules.
    pub(crate) fn take_in(
        &mut self,
        writer: Writer<'_>,
        compiled: Compiled,
        local: &LocalAddresses,
    ) -> anyhow::Result<TakenIn> {
        let runs = self.runs_for(writer, &compiled)?;
        let mut taken = TakenIn::default();
        for ((loaded, mut policy, _), run) in compiled.put.into_iter().zip(runs) {
            if let Some(before) = self.run_of(&loaded.settings.name) {
                self.room.retire(before, Some(run.clone()));
            }
            policy.set_local(local);
            let (index, before) = self.enter(loaded, policy, run);
            self.unlist(index, !self.turns[index as usize], before, &mut taken);
        }
        for name in compiled.gone {
            let Some(index) = self.by_name.remove(&name) else {
                continue;
            };
            if let Some(entry) = self.entries[index as usize].take() {
                self.room.retire(entry.run, None);
            }
            let before = self.set.put(index, None);
            self.unlist(index, self.turns[index as usize], before, &mut taken);
        }
        self.room.record_if_stale(writer);
        Ok(taken)
    }

    /// Returns a run for each policy that is put: the one that it has, if its rules are the same.
    fn runs_for(
        &mut self,
        writer: Writer<'_>,
        compiled: &Compiled,
    ) -> anyhow::Result<Vec<Range<u32>>> {
        let mut runs = Vec::new();
        for (loaded, _, described) in &compiled.put {
            let present = self.run_of(&loaded.settings.name);
            let run = match present.filter(|run| writer.has(run, described)) {
                Some(same) => Ok(same),
                None => self.room.add(writer, described),
            };
            match run {
                Ok(run) => runs.push(run),
                Err(e) => {
                    for ((loaded, ..), run) in compiled.put.iter().zip(runs) {
                        let stays = self.run_of(&loaded.settings.name);
                        self.room.retire(run, stays);
                    }
                    return Err(e.context("giving the rules their numbers"));
                }
            }
        }
        Ok(runs)
    }

    fn run_of(&self, name: &Name) -> Option<Range<u32>> {
        self.entry(name).map(|entry| entry.run.clone())
    }

    fn unlist(&mut self, index: u32, turn: bool, before: Option<Policy>, taken: &mut TakenIn) {
        taken.indexes.push(index);
        if let Some(before) = before.filter(|_| self.listed.remove(&index)) {
            taken.unlisted.push((index, turn, before));
        }
    }

    fn entry(&self, name: &Name) -> Option<&Entry> {
        let index = self.by_name.get(name)?;
        self.entries.get(*index as usize)?.as_ref()
    }

    /// Returns the policies by their indexes.
    pub(crate) const fn set(&self) -> &PolicySet {
        &self.set
    }

    /// Sets the current addresses of the host and the guests.
    pub(crate) fn set_local(&mut self, local: &LocalAddresses) {
        self.set.set_local(local);
    }

    /// Returns the index of a policy; one that no policy has if there is none of this name.
    pub(crate) fn index_of(&self, name: &Name) -> u32 {
        self.by_name.get(name).copied().unwrap_or(MOST_POLICIES)
    }

    /// Returns a policy as it was read.
    pub(crate) fn loaded(&self, name: &Name) -> Option<&LoadedPolicy> {
        self.entry(name).map(|entry| &entry.loaded)
    }

    /// Returns the policies as they were read.
    pub(crate) fn all_loaded(&self) -> impl Iterator<Item = &LoadedPolicy> {
        let entries = self.entries.iter().flatten();
        entries.map(|entry| &entry.loaded)
    }

    /// Returns the uplinks that policies name.
    pub(crate) fn uplinks(&self) -> impl Iterator<Item = String> {
        let settings = self.all_loaded().map(|policy| &policy.settings);
        settings.filter_map(|settings| settings.egress.uplink.clone())
    }

    /// Returns the names of the policies.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Name> {
        self.by_name.keys()
    }

    /// Returns the texts of the deny files, by the paths under which they were read.
    pub(crate) fn deny_files(&self) -> BTreeMap<String, String> {
        let entries = self.entries.iter().flatten();
        entries
            .flat_map(|entry| entry.loaded.deny_files())
            .collect()
    }

    /// Reads a deny file as it was when a policy in force was read; another one from the disk.
    ///
    /// # Errors
    /// The disk refuses.
    pub(crate) fn read_again(&self, path: &Path) -> io::Result<String> {
        let shown = path.display().to_string();
        let entries = self.entries.iter().flatten();
        let known = entries
            .filter_map(|entry| entry.loaded.deny_file(&shown))
            .next();
        match known {
            Some(text) => Ok(text.to_owned()),
            None => crate::config::from_disk(path),
        }
    }

    /// Number of elements of `RULES` in force for this process.
    pub(crate) const fn rules_in_force(&self) -> u32 {
        self.room.in_force()
    }

    /// Returns the elements of `RULES` of the forwards.
    pub(crate) const fn forwards(&self) -> &Range<u32> {
        &self.forwards
    }

    /// Whether the second of the numbers of an index is in use in the guard's list.
    pub(crate) fn turn(&self, index: u32) -> bool {
        self.turns.get(index as usize).copied().unwrap_or_default()
    }

    /// Notes that a policy's prefixes are in the guard's list. Returns whether they were not.
    pub(crate) fn list(&mut self, index: u32) -> bool {
        self.listed.insert(index)
    }
}

fn check_number(policies: usize) -> anyhow::Result<()> {
    if policies > MOST_POLICIES as usize {
        bail!(
            "{policies} policies, and there are {MOST_POLICIES} at most: have VMs share some, or \
             serve them in another network namespace"
        );
    }
    Ok(())
}

/// A key of the guard's list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Denied {
    V4(DenyPrefix),
    V6(DenyPrefix6),
}

/// Returns the keys of the guard's list under a number for what a policy denies whole, with the
/// rules.
pub(crate) fn denied(policy: &Policy, number: u32) -> impl Iterator<Item = (Denied, u32)> {
    let number = number.to_be_bytes();
    let all = policy.deny_prefixes().into_iter();
    all.map(move |(prefix, rule)| {
        // The number is compared too.
        let prefix_len = 32 + u32::from(prefix.prefix_len());
        let key = match prefix.addr() {
            IpAddr::V4(remote) => Denied::V4(DenyPrefix {
                prefix_len,
                key: DenyKey {
                    policy: number,
                    remote: remote.into(),
                },
            }),
            IpAddr::V6(remote) => Denied::V6(DenyPrefix6 {
                prefix_len,
                key: DenyKey6 {
                    policy: number,
                    remote: remote.octets(),
                },
            }),
        };
        (key, rule.0)
    })
}

#[cfg(test)]
#[path = "catalogue_test.rs"]
mod tests;
