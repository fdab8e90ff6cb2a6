//! A change of policy under way: `slipgate policy apply`, and SIGHUP.
//!
//! # Theory of operation
//! A change concerns the policies that are new, changed or removed, and the VMs that have one of
//! them, or get another: the rest is neither compiled nor numbered, and no engine hears of it.
//! Everything is read and checked before anything changes: an error in a file leaves all as it was.
//! The steps follow in an order such that one of the two policies holds completely at any time:
//!
//! 1. the rules of each get elements of `RULES`, which flows of the old policy do not name;
//! 2. the prefixes that the new policy denies are put into the guard's list under a number of its
//!    own, and then the VMs' rows get this number. The engine still judges by the old policy;
//! 3. each engine gets the new policies, switches between two packets, cuts the flows that they
//!    refuse, and answers when none of their packets can leave any more;
//! 4. when all have answered, rates are set, the old policies' entries are removed from the guard's
//!    list, and the client is answered.
//!
//! There is one change at a time.
mod learning;
mod named;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::OwnedFd,
    path::PathBuf,
};

use anyhow::bail;
use nix::poll::PollFd;
use slipgate_abi::VmId;
use slipgate_control::vm;
use slipgate_ipc::{
    api::Event,
    channel::{ChannelError, memory_file},
    client::{ClientAnswer, ClientId, Version, VmChange},
    engine::{Policies, ToEngine},
};
use slipgate_policy::{
    Policy,
    document::{LoadedPolicy, PutPolicy},
};

use self::learning::LearningVm;
pub(crate) use self::named::{NamedChange, check_unused};
use crate::{
    config::{Config, VmConfig},
    kernel_errors::is_shortage,
    kernel_state::{Attached, Name, TakenIn},
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
    /// Changes that were made to the policies and the VMs.
    done: Done,
    /// Whether the policy file or flags may be others, which are kept for a successor.
    is_applied: bool,
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

/// Policies and VMs that a change has concerned.
#[derive(Debug, Default)]
struct Done {
    /// Indexes of the policies that changed.
    indexes: Vec<u32>,
    /// Former policies whose prefixes are still in the guard's list, by their indexes and turns.
    unlisted: Vec<(u32, bool, Policy)>,
    /// Ids of the VMs that are concerned.
    vms: Vec<VmId>,
}

/// A change that was read and checked.
#[derive(Debug, Default)]
struct Prepared {
    /// A whole configuration in the place of the present one.
    config: Option<Box<Config>>,
    /// Named policies that come, or go.
    named: Vec<(String, Option<PutPolicy>)>,
    /// Policies to be put in force, those among them that are another than now.
    put: Vec<LoadedPolicy>,
    /// Names of policies that are removed.
    gone: Vec<Name>,
    /// VMs whose configuration is another, by their places.
    vms: Vec<(usize, VmConfig)>,
    /// VMs that are opened or closed, by their places.
    learning: Vec<(usize, bool)>,
}

impl Prepared {
    /// Another configuration as a whole. The VMs are in the same order in both.
    fn whole(attached: &Attached, config: Config) -> anyhow::Result<Self> {
        if config.forwards != attached.config.forwards {
            bail!(
                "it has other forwards, whose ports are taken at the start only: restart slipgate \
                 with --on-exit keep, which keeps the flows"
            );
        }
        let put = config.load_policies()?.policies;
        let names: BTreeSet<&Name> = put.iter().map(|policy| &policy.settings.name).collect();
        let present = attached.policies.names();
        let is_learning = |name: &Name| {
            let loaded = attached.policies.loaded(name);
            loaded.is_some_and(|policy| policy.settings.is_learning)
        };
        let gone = present.filter(|name| !names.contains(name) && !is_learning(name));
        let vms = attached.vms.iter().zip(&config.vms).enumerate();
        let others = vms.filter(|(_, (vm, new))| vm.config != **new);
        Ok(Self {
            gone: gone.cloned().collect(),
            vms: others.map(|(at, (_, new))| (at, new.clone())).collect(),
            config: Some(Box::new(config)),
            put,
            ..Self::default()
        })
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
        let present = &parts.attached.config;
        let config = match file {
            Some(file) => present.with_policy_file(&file),
            None => present.reread(),
        };
        let prepared = config
            .map_err(anyhow::Error::from)
            .and_then(|config| Prepared::whole(&parts.attached, config));
        let done = prepared.and_then(|prepared| self.take_in(parts, prepared));
        let done = match done {
            Ok(done) => done,
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
            done,
            is_applied: true,
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
        let at = parts.attached.index_of(&name);
        let vm = at.map(|at| parts.attached.vms[at].open.id);
        let prepared = Prepared {
            vms: at.map(|at| (at, new)).into_iter().collect(),
            ..Prepared::default()
        };
        let done = match self.take_in(parts, prepared) {
            Ok(done) => done,
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
            done,
            vm,
            ..Change::default()
        };
        self.send_policies(parts, change)
    }

    /// Does steps 1 and 2. On error nothing has changed.
    fn take_in(&self, parts: &mut Parts, mut prepared: Prepared) -> anyhow::Result<Done> {
        let open = self.learning.iter().map(LearningVm::name);
        learning::follow(&parts.attached, open, &mut prepared);
        let attached = &mut parts.attached;
        let are_new = attached.follow_domains_with(&prepared.put)?;
        let done = attached.take_in(prepared);
        if are_new
            && done.is_err()
            && let Err(e) = attached.follow_domains()
        {
            // Tables that no policy in force names are followed, until the next one is put.
            tracing::debug!("{e:#}");
        }
        done
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
        // An uplink that only a policy names from now on is to be known before its VMs are.
        if let Err(e) = parts.attached.follow_domains() {
            if !is_shortage(&e) {
                return Err(e);
            }
            // Until they are read, nothing leaves by routes that are named for the first time.
            parts.attached.watch.fall_behind(&format!("{e:#}"));
        }
        let uplinks = parts.attached.follow_vm_uplinks();
        parts.tell_network()?;
        if !uplinks.is_empty() {
            parts.attached.refresh_next_hops()?;
        }
        let mut workers = workers;
        workers.try_for_each(|worker| self.send_again(parts, worker))?;
        parts.tell_vms_by_uplinks(&uplinks)?;
        // The policy may name other routes now.
        parts.follow_ipv6()
    }

    /// Repeats step 3 for a worker, with an engine that replaced one which ended during it. The engine was
    /// started with the new policy and has cut the flows that it refuses. What remains are the
    /// flows to be cut regardless of the policy.
    pub(crate) fn send_again(&self, parts: &mut Parts, worker: usize) -> anyhow::Result<()> {
        let applying = self.applying.as_ref();
        let Some(applying) = applying.filter(|it| it.awaited.contains(&worker)) else {
            return Ok(());
        };
        let change = &applying.change;
        let policies = parts
            .attached
            .policies_to_tell(worker, applying.id, change)?;
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
        parts.attached.set_rates_of_all(&done.done.vms);
        if done.is_applied {
            parts.attached.keep_applied();
        }
        parts.attached.forget_denied(&done.done.unlisted);
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
            let policy = parts.attached.config.named_policies.get(name);
            let put = |policy: &PutPolicy| ClientAnswer::PolicyPut {
                generation: self.generation(&parts.attached, name),
                version: Version::of(policy.text().as_bytes()),
                cut,
                kept,
            };
            let answer = policy.map_or(ClientAnswer::Done, put);
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
    /// Does steps 1 and 2.
    fn take_in(&mut self, prepared: Prepared) -> anyhow::Result<Done> {
        let Prepared {
            config,
            named,
            put,
            gone,
            vms,
            learning,
        } = prepared;
        self.see_host_nat_for_request();
        self.unless_shared(|attached| attached.check_egress(&put))?;
        self.host_nat.look_soon();
        let mut changed: BTreeSet<Name> = put.iter().map(|p| p.settings.name.clone()).collect();
        let compiled = self.policies.compile(put, gone)?;
        changed.retain(|name| compiled.puts(name));
        self.clear_unremoved()?;
        let local = self.network_view().local;
        let TakenIn { indexes, unlisted } = self.take_in_policies(compiled, &local)?;
        // From here on nothing fails.
        if let Some(config) = config {
            self.config = *config;
        }
        for (name, policy) in named {
            match policy {
                Some(policy) => self.config.named_policies.insert(name, policy),
                None => self.config.named_policies.remove(&name),
            };
        }
        let mut concerned: BTreeSet<usize> = vms.iter().map(|(at, _)| *at).collect();
        for (at, new) in vms {
            debug_assert_eq!(self.vms[at].config.name, new.name);
            self.config.vms[at] = new.clone();
            self.vms.configure(at, new);
        }
        for (at, is_learning) in learning {
            self.vms[at].is_learning = is_learning;
            concerned.insert(at);
        }
        let with_changed = changed.iter().flat_map(|name| self.vms.with_policy(name));
        concerned.extend(with_changed);
        for at in &concerned {
            let index = self.policy_index(&self.vms[*at]);
            self.add_denied_of(index);
            let row = self.vms[*at].open.row;
            vm::set_policy(self.datapath.maps(), row, self.policy_number(index));
        }
        let ids = concerned.into_iter().map(|at| self.vms[at].open.id);
        Ok(Done {
            indexes,
            unlisted,
            vms: ids.collect(),
        })
    }

    /// Returns what a change concerns, as a message to a worker's engine.
    fn policies_to_tell(
        &self,
        worker: usize,
        id: u64,
        change: &Change,
    ) -> Result<Policies, ChannelError> {
        let vms = change
            .done
            .vms
            .iter()
            .filter_map(|id| self.index_of_id(*id));
        let vms = vms.map(|at| &self.vms[at]).filter(|vm| vm.worker == worker);
        let policies = self.policies.set().changes_to_bytes(&change.done.indexes);
        Ok(Policies {
            id,
            policies: memory_file(&policies)?,
            local: self.network_view().local,
            vms: vms.map(|vm| self.vm_spec(vm)).collect(),
            strictly: change.strictly.clone(),
        })
    }
}

#[cfg(test)]
#[path = "policy_apply_test.rs"]
mod tests;
