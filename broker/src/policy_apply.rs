//! A change of policy under way: `slipgate policy apply`, and SIGHUP.
//!
//! # Theory of operation
//! Everything is read and checked before anything changes: an error in a file leaves all as it was.
//! The steps follow in an order such that one of the two policies holds completely at any time:
//!
//! 1. the rules get elements of `RULES`, which flows of the old policy do not name;
//! 2. the prefixes that the new policy denies are put into the guard's list under numbers of their
//!    own, and then the VMs' rows get these numbers. The engine still judges by the old policy;
//! 3. each engine gets the new policy, switches between two packets, cuts the flows that it refuses,
//!    and answers when none of their packets can leave any more;
//! 4. when all have answered, rates are set, the old policy's entries are removed from the guard's list, and the client is
//!    answered.
//!
//! There is one change at a time.
mod learning;
mod named;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use nix::poll::PollFd;
use slipgate_abi::{RuleIndex, VmId};
use slipgate_control::vm;
use slipgate_ipc::{
    api::Event,
    channel::{ChannelError, memory_file},
    client::{ClientAnswer, ClientId, Version, VmChange},
    engine::{Policies, ToEngine},
};
use slipgate_policy::{
    PolicySet,
    document::{ConfigError, LoadedPolicies},
};

use self::learning::{LearningVm, LearningVms};
pub(crate) use self::named::NamedChange;
use crate::{
    config::{Config, VmConfig},
    kernel_state::{Attached, Writer, described, write_rules},
    parts::Parts,
};

/// Changes of policy in progress, and those that wait for them.
#[derive(Debug, Default)]
pub(crate) struct PolicyChanges {
    applying: Option<Applying>,
    /// VMs that are open for learning.
    learning: Vec<LearningVm>,
    /// VMs to open next, each with the client and its socket.
    to_learn: VecDeque<(ClientId, String, OwnedFd)>,
    /// Whether a SIGHUP came while a policy was being put in force.
    apply_again: bool,
    /// Changes of named policies to be made next.
    to_put: VecDeque<NamedChange>,
    /// Whether the last change was a named policy's.
    last_was_put: bool,
    /// Generations of the named policies that clients put, since the start.
    generations: BTreeMap<String, u64>,
}

/// A change that the engines are carrying out.
#[derive(Debug)]
struct Applying {
    id: u64,
    change: Change,
    /// Workers whose engines have not answered yet.
    awaited: BTreeSet<usize>,
    /// Sum of the answers.
    counts: Applied,
}

/// A change of policy, with the steps that remain when the engine has answered.
#[derive(Debug, Default)]
struct Change {
    /// Client that asked; `None`: a signal did.
    client: Option<ClientId>,
    /// Message for the log once the change is done.
    what: String,
    /// Policy numbers in the guard's list before the change.
    before: BTreeSet<u32>,
    /// Ids of VMs whose flows that are not admitted are cut in any case.
    strictly: Vec<VmId>,
    /// VMs whose learning ends with this change; `None` if another policy was put in force. Their
    /// clients are notified by the end of the sockets.
    closed: Option<Vec<LearningVm>>,
    /// VM whose definition named another policy; its state is the answer.
    vm: Option<VmId>,
    /// Named policy that was put, whose generation is part of the answer, or that was removed.
    named: Option<String>,
}

/// Complete policies: read, checked and compiled.
struct Read {
    config: Config,
    loaded: LoadedPolicies,
    /// The loaded policies and those of learning VMs.
    in_force: LoadedPolicies,
    policies: PolicySet,
}

impl Read {
    /// Reads the policies of the command line, with its files read again or with another policy
    /// file.
    fn reread(
        config: &Config,
        file: Option<&Path>,
        learning: &LearningVms,
    ) -> Result<Self, ConfigError> {
        let config = match file {
            Some(file) => config.with_policy_file(file)?,
            None => config.reread()?,
        };
        let loaded = config.load_policies()?;
        Self::of(config, loaded, learning)
    }

    /// Recompiles the policies in force with other learning VMs; no file is read again.
    fn again(attached: &Attached, learning: &LearningVms) -> Result<Self, ConfigError> {
        let config = attached.config.settled()?;
        Self::of(config, attached.loaded.clone(), learning)
    }

    fn of(
        mut config: Config,
        loaded: LoadedPolicies,
        learning: &LearningVms,
    ) -> Result<Self, ConfigError> {
        let in_force = learning.add_to(&mut config, &loaded);
        let policies = in_force.compile()?;
        Ok(Self {
            config,
            loaded,
            in_force,
            policies,
        })
    }

    /// Whether it can be put in force while running.
    fn check(&self, now: &Config) -> anyhow::Result<()> {
        if self.config.forwards != now.forwards {
            bail!(
                "it has other forwards, whose ports are taken at the start only: restart slipgate \
                 with --on-exit keep, which keeps the flows"
            );
        }
        Ok(())
    }
}

impl PolicyChanges {
    /// Descriptors to poll for the end of clients that had VMs opened.
    pub(crate) fn lifelines(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.learning.iter().filter_map(LearningVm::lifeline)
    }

    /// Puts the present contents of the files in force: the policy file in force, or `file`, and
    /// the deny files.
    pub(crate) fn apply(
        &mut self,
        parts: &mut Parts,
        client: Option<ClientId>,
        file: Option<PathBuf>,
    ) -> anyhow::Result<()> {
        if self.applying.is_some() {
            match client {
                Some(client) => {
                    parts.refuse(
                        client,
                        "another policy is just being put in force: try again",
                    );
                }
                None => self.apply_again = true,
            }
            return Ok(());
        }
        let learning = LearningVms::of(&self.learning);
        let prepared = Read::reread(&parts.attached.config, file.as_deref(), &learning)
            .map_err(anyhow::Error::from)
            .and_then(|read| {
                read.check(&parts.attached.config)?;
                parts.attached.take_in(read)
            });
        let before = match prepared {
            Ok(before) => before,
            Err(e) => {
                let error = format!("{e:#}");
                match client {
                    Some(client) => parts.refuse(client, error),
                    None => tracing::warn!("the policy stays as it was: {error}"),
                }
                return Ok(());
            }
        };
        let change = Change {
            client,
            what: format!("{} is in force", parts.attached.config.policy_name()),
            before,
            ..Change::default()
        };
        self.send_policies(parts, change)
    }

    /// Whether a change is under way.
    pub(crate) fn is_applying(&self) -> bool {
        self.applying.is_some()
    }

    /// Puts the policy that a VM's definition names in force.
    pub(crate) fn apply_to_vm(
        &mut self,
        parts: &mut Parts,
        client: ClientId,
        new: VmConfig,
    ) -> anyhow::Result<()> {
        let name = new.name.clone();
        let mut config = parts.attached.config.clone();
        let at = parts.attached.index_of(&name);
        // In the same order.
        if let Some(at) = at {
            config.vms[at] = new;
        }
        let vm = at.map(|at| parts.attached.vms[at].open.id);
        let learning = LearningVms::of(&self.learning);
        let read = config
            .settled()
            .and_then(|config| Read::of(config, parts.attached.loaded.clone(), &learning))
            .map_err(anyhow::Error::from);
        let before = match read.and_then(|read| parts.attached.take_in(read)) {
            Ok(before) => before,
            Err(e) => {
                parts.refuse(
                    client,
                    format!("the policy of {name} stays as it was: {e:#}"),
                );
                return Ok(());
            }
        };
        let change = Change {
            client: Some(client),
            what: format!("{name} has another policy"),
            before,
            vm,
            ..Change::default()
        };
        self.send_policies(parts, change)
    }

    /// Step 3: sends the policies to the engines.
    fn send_policies(&mut self, parts: &mut Parts, change: Change) -> anyhow::Result<()> {
        let id = parts.next_id();
        self.last_was_put = change.named.is_some();
        let workers = parts.engines.workers();
        self.applying = Some(Applying {
            id,
            change,
            awaited: workers.clone().collect(),
            counts: Applied::default(),
        });
        let mut workers = workers;
        workers.try_for_each(|worker| self.send_again(parts, worker))
    }

    /// Repeats step 3 for a worker, with an engine that replaced one which ended during it. The engine was
    /// started with the new policy and has cut the flows that it refuses. What remains are the
    /// flows to be cut regardless of the policy.
    pub(crate) fn send_again(&self, parts: &mut Parts, worker: usize) -> anyhow::Result<()> {
        let applying = self.applying.as_ref();
        let Some(applying) = applying.filter(|it| it.awaited.contains(&worker)) else {
            return Ok(());
        };
        let strictly = applying.change.strictly.clone();
        let policies = parts
            .attached
            .policies_to_tell(worker, applying.id, strictly)?;
        let policies = ToEngine::Policies(Box::new(policies));
        parts.engines.send(worker, policies)
    }

    /// Finishes the change after the last engine's answer: no packet that is denied now leaves any
    /// more.
    pub(crate) fn applied(
        &mut self,
        parts: &mut Parts,
        worker: usize,
        id: u64,
        counts: Applied,
    ) -> anyhow::Result<()> {
        let is_done = |applying: &mut Applying| applying.answered(worker, id, counts);
        let Some(applying) = self.applying.take_if(is_done) else {
            return Ok(());
        };
        let (done, counts) = (applying.change, applying.counts);
        parts.attached.set_rates();
        parts.attached.keep_applied();
        parts.attached.forget_denied(&done.before);
        let Applied { cut, kept, left } = counts;
        let more = match left {
            0 => String::new(),
            left => format!(", {left} of them against it"),
        };
        if done.closed.is_none() {
            let event = Event::PolicyApplied { cut, kept };
            parts.attached.events.push(event);
        }
        tracing::info!("{}: {cut} flows cut, {kept} go on{more}", done.what);
        let changed = done.vm.and_then(|vm| parts.attached.index_of_id(vm));
        if let Some(at) = changed {
            parts.attached.keep_vm(&parts.attached.vms[at]);
        }
        if let (Some(client), Some(_)) = (done.client, done.vm) {
            match changed {
                Some(at) => parts.answer_vm(client, at, VmChange::Changed),
                None => parts.control.answer(client, &ClientAnswer::removed()),
            }
        } else if let (Some(client), Some(name)) = (done.client, &done.named) {
            let text = parts.attached.config.named_policies.get(name);
            let put = |text: &String| ClientAnswer::PolicyPut {
                generation: self.generation(&parts.attached, name),
                version: Version::of(text.as_bytes()),
                cut,
                kept,
            };
            let answer = text.map_or(ClientAnswer::Done, put);
            parts.control.answer(client, &answer);
        } else if let Some(client) = done.client {
            let answer = match &done.closed {
                Some(_) => ClientAnswer::Done,
                None => ClientAnswer::Applied { cut, kept, left },
            };
            parts.control.answer(client, &answer);
        }
        if std::mem::take(&mut self.apply_again) {
            return self.apply(parts, None, None);
        }
        Ok(())
    }
}

impl Applying {
    /// Takes in a worker's answer. Returns whether it was the last.
    fn answered(&mut self, worker: usize, id: u64, counts: Applied) -> bool {
        if id != self.id || !self.awaited.remove(&worker) {
            return false;
        }
        self.counts.add(counts);
        self.awaited.is_empty()
    }
}

/// Numbers of flows affected by a change of policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Applied {
    pub(crate) cut: u64,
    pub(crate) kept: u64,
    pub(crate) left: u64,
}

impl Applied {
    fn add(&mut self, other: Self) {
        // Engines may say anything.
        self.cut = self.cut.saturating_add(other.cut);
        self.kept = self.kept.saturating_add(other.kept);
        self.left = self.left.saturating_add(other.left);
    }
}

impl Attached {
    /// Does steps 1 and 2. Returns the policy numbers that the guard's list had before.
    fn take_in(&mut self, read: Read) -> anyhow::Result<BTreeSet<u32>> {
        let Read {
            config,
            loaded,
            in_force,
            mut policies,
        } = read;
        let maps = self.datapath.maps();
        let rules = described(&policies, &config);
        let own = self.former_rules.clone();
        self.clear_other_turn()?;
        let kept = [self.rules.clone(), self.relayed_rules.clone()];
        let writer = Writer {
            paths: self.datapath.paths(),
            rows: &self.rows(),
            own: &own,
            kept: &kept,
        };
        let run = write_rules(maps, &rules, writer).context("giving the rules their numbers")?;
        // From here on nothing fails.
        if !self.former_rules.contains(&run) {
            self.former_rules.push(run.clone());
        }
        let before = self.denied_numbers();
        self.turn = !self.turn;
        // The VMs are in the same order in both.
        for (vm, new) in self.vms.iter_mut().zip(&config.vms) {
            debug_assert_eq!(vm.config.name, new.name);
            vm.config = new.clone();
        }
        policies.set_local(&self.network_view().local);
        self.config = config;
        self.loaded = loaded;
        self.in_force = in_force;
        self.policies = policies;
        self.rules = run;
        self.add_denied();
        for vm in self.vms.iter() {
            let number = self.policy_number(vm.config.policy);
            vm::set_policy(self.datapath.maps(), vm.open.row, number);
        }
        Ok(before)
    }

    /// Returns the policies in force, as a message to a worker's engine.
    fn policies_to_tell(
        &self,
        worker: usize,
        id: u64,
        strictly: Vec<VmId>,
    ) -> Result<Policies, ChannelError> {
        Ok(Policies {
            id,
            policies: memory_file(&self.policies.to_bytes())?,
            rule_base: RuleIndex::new(self.rules.start),
            local: self.network_view().local,
            vms: self.vm_specs(worker),
            strictly,
        })
    }
}

#[cfg(test)]
#[path = "policy_apply_test.rs"]
mod tests;
