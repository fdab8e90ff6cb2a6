//! A change of the policy while the guest runs, and its budgets of bytes.
//!
//! # Theory of operation
//! `slipgate policy apply`, and SIGHUP where the guest has no use for it, read the policy files again, as in
//! hybrid mode ([`crate::policy_apply`]); clients of the API put policies, and change the VM
//! ([`super::definition`]). All is read and checked before anything changes. The rules get
//! elements of `RULES`, the engine switches between two packets, cuts the flows that the new policy
//! refuses, and answers when none of their packets can leave any more. Then rates are set, and the client
//! is answered. There is one change at a time.
//!
//! Budgets are looked at as the broker does it ([`crate::kernel_state::look_at`]): the programs' functions
//! count and stop by themselves, and what happens besides is done here.
use std::{collections::BTreeSet, path::PathBuf, time::Instant};

use anyhow::bail;
use slipgate_ipc::{
    api::Event,
    channel::memory_file,
    client::{ClientAnswer, ClientId, Version, VmChange},
    engine::{EngineRequest, Policies, Subject, ToEngine},
};
use slipgate_policy::document::LoadedPolicies;

use super::{
    Served,
    described::{check_egress, spec},
    forwards::ForwardChange,
};
use crate::{
    config::Config,
    kernel_state::{BUDGETS_EVERY, BudgetOrder, has_frozen, is_cut, look_at, today},
    vm_changes::refusal,
};

/// Answer to changes that no engine carries out.
const NO_ENGINE: &str = "the engine has ended";

/// A change under way, and when budgets are looked at next.
#[derive(Debug, Default)]
pub(super) struct PolicyChanges {
    applying: Option<Applying>,
    /// Whether a signal came meanwhile.
    apply_again: bool,
    /// Indexes of policies that changed here, and of which the engine was not told.
    untold: BTreeSet<u32>,
    /// `None` while the guest has no budget.
    pub(super) budgets_due: Option<Instant>,
}

/// A change that the engine was told of.
#[derive(Debug)]
struct Applying {
    /// Number of the message to the engine.
    id: u64,
    /// Who asked; `None`: a signal did.
    client: Option<ClientId>,
    what: Changed,
}

/// What a change puts in force.
#[derive(Debug)]
pub(super) enum Changed {
    /// The policy files.
    Files,
    /// A policy that a client put.
    Policy {
        name: String,
        generation: u64,
        version: Version,
    },
    /// The end of one that a client had put.
    NoPolicy { name: String },
    /// Another definition of the VM.
    Vm {
        has_other_policy: bool,
        /// What becomes of its forwards; `None`: they stay, or the engine was told.
        forwards: Option<ForwardChange>,
    },
}

impl PolicyChanges {
    /// Notes indexes of policies that changed, until the engine is told. Returns all that it is to be told of,
    /// and whether that concerns the guest.
    fn note_changed(&mut self, changed: Vec<u32>, is_described_anew: bool) -> (Vec<u32>, bool) {
        self.untold.extend(changed);
        let indexes: Vec<u32> = self.untold.iter().copied().collect();
        let is_concerned = is_described_anew || !indexes.is_empty();
        (indexes, is_concerned)
    }
}

impl Served {
    /// Puts the present contents of the files in force: the policy file in force, or `file`.
    pub(super) fn apply_policy(
        &mut self,
        client: Option<ClientId>,
        file: Option<PathBuf>,
    ) -> anyhow::Result<()> {
        if self.is_changing(client) {
            self.policy.apply_again |= client.is_none();
            return Ok(());
        }
        let config = match file {
            Some(file) => self.nat.with_policy_file(&file),
            None => self.nat.reread(),
        };
        let loaded = config.and_then(|config| Ok((config.load_policies()?, config)));
        self.change(client, loaded.map_err(Into::into), Changed::Files)
    }

    /// Whether a change is under way; then who asks for another is answered.
    pub(super) fn is_changing(&mut self, client: Option<ClientId>) -> bool {
        let is_changing = self.policy.applying.is_some();
        if let (true, Some(client)) = (is_changing, client) {
            let busy = "another policy is just being put in force: try again";
            self.clients.answer(client, &ClientAnswer::busy(busy));
        }
        is_changing
    }

    /// Puts a configuration in force, with its policies, and answers who asked: later, or at once if that
    /// can't be.
    pub(super) fn change(
        &mut self,
        client: Option<ClientId>,
        changed: anyhow::Result<(LoadedPolicies, Config)>,
        mut what: Changed,
    ) -> anyhow::Result<()> {
        if self.is_changing(client) {
            return Ok(());
        }
        if let (None, Some(client)) = (&self.engine, client) {
            self.clients.answer(client, &ClientAnswer::busy(NO_ENGINE));
            return Ok(());
        }
        match changed.and_then(|changed| self.take_in_policy(changed)) {
            Ok(policies) => {
                self.count(&what);
                self.change_forwards(&mut what)?;
                let id = policies.id;
                self.policy.applying = Some(Applying { id, client, what });
                self.send(ToEngine::Policies(Box::new(policies)))
            }
            Err(e) => {
                match client {
                    Some(client) => self.clients.answer(client, &refusal(&e)),
                    None => tracing::warn!("the policy stays as it was: {e:#}"),
                }
                Ok(())
            }
        }
    }

    /// Puts other forwards in force. The engine has them before the rest, and so it answers that last.
    fn change_forwards(&mut self, what: &mut Changed) -> anyhow::Result<()> {
        let Changed::Vm { forwards, .. } = what else {
            return Ok(());
        };
        let Some(change) = forwards.take() else {
            return Ok(());
        };
        let id = self.clients.next_id();
        let message = self.forwards.put(id, change, &self.place);
        self.send(message)
    }

    /// Counts what is taken in: who reads meanwhile sees the new text with its own number.
    fn count(&mut self, what: &Changed) {
        match what {
            Changed::Files => {}
            Changed::Policy {
                name, generation, ..
            } => drop(self.generations.insert(name.clone(), *generation)),
            Changed::NoPolicy { name } => drop(self.generations.remove(name)),
            Changed::Vm { .. } => self.definitions += 1,
        }
    }

    /// Checks policies with their configuration, and takes them in. Returns the message for the engine.
    fn take_in_policy(
        &mut self,
        (loaded, config): (LoadedPolicies, Config),
    ) -> anyhow::Result<Policies> {
        if self.engine.is_none() {
            bail!(NO_ENGINE);
        }
        if config.forwards != self.nat.forwards {
            bail!("it has other forwards, whose ports are taken at the start only");
        }
        check_egress(&config.flags, &loaded)?;
        let taken = self.place.take_in(loaded.policies, &self.view.local)?;
        let link = (self.vm.spec.mtu.into(), self.vm.spec.ipv6);
        let mut described = match &config.vms[..] {
            [vm] => spec(&config, vm, &self.place, link),
            _ => self.vm.spec.clone(),
        };
        described.is_idle = self.vm.spec.is_idle && described.idle_after_s != 0;
        let (indexes, is_concerned) = self
            .policy
            .note_changed(taken.indexes, described != self.vm.spec);
        let policies = self.place.policies.set().changes_to_bytes(&indexes);
        // Without memory for it the engine goes on by the policy before, and the next change is told with this.
        let policies = memory_file(&policies)?;
        self.policy.untold.clear();
        self.nat = config;
        self.vm.spec = described;
        Ok(Policies {
            id: self.clients.next_id(),
            policies,
            local: self.view.local.clone(),
            // Flows are judged again only where there is something else to judge them by.
            vms: is_concerned
                .then(|| self.vm.spec.clone())
                .into_iter()
                .collect(),
            strictly: Vec::new(),
        })
    }

    /// Finishes a change after the engine's answer.
    pub(super) fn applied(&mut self, id: u64, answer: ClientAnswer) -> anyhow::Result<()> {
        let Some(Applying { client, what, .. }) = self.policy.applying.take_if(|it| it.id == id)
        else {
            return Ok(());
        };
        let rates = of_guest(&self.nat);
        let limited = rates.is_limited().then_some(rates);
        let row = self.place.open.row;
        self.place.memory.maps.set_rates(row, limited);
        self.await_budgets();
        let answer = match answer {
            ClientAnswer::Applied { cut, kept, left } => self.is_in_force(what, (cut, kept, left)),
            answer => answer,
        };
        if let Some(client) = client {
            self.clients.answer(client, &answer);
        }
        match std::mem::take(&mut self.policy.apply_again) {
            true => self.apply_policy(None, None),
            false => Ok(()),
        }
    }

    /// Tells of a change that is in force, and makes the answer to it.
    fn is_in_force(&mut self, what: Changed, (cut, kept, left): (u64, u64, u64)) -> ClientAnswer {
        let more = match left {
            0 => String::new(),
            left => format!(", {left} of them against it"),
        };
        let flows = format!("{cut} flows cut, {kept} go on{more}");
        let applied = Event::PolicyApplied { cut, kept };
        match what {
            Changed::Files => {
                let name = self.nat.policy_name();
                tracing::info!("{name} is in force: {flows}");
                self.clients.events.push(applied);
                ClientAnswer::Applied { cut, kept, left }
            }
            Changed::Policy {
                name,
                generation,
                version,
            } => {
                tracing::info!("the policy {name} is in force: {flows}");
                self.clients.events.push(applied);
                ClientAnswer::PolicyPut {
                    generation,
                    version,
                    cut,
                    kept,
                }
            }
            Changed::NoPolicy { name } => {
                tracing::info!("the policy {name} is removed: {flows}");
                self.clients.events.push(applied);
                ClientAnswer::Done
            }
            Changed::Vm {
                has_other_policy, ..
            } => {
                let vm = self.vm.spec.name.clone();
                tracing::info!("{vm} has another definition: {flows}");
                self.clients.events.push(Event::VmChanged { vm });
                if has_other_policy {
                    self.clients.events.push(applied);
                }
                ClientAnswer::Vm {
                    vm: Box::new(self.status()),
                    change: VmChange::Changed,
                }
            }
        }
    }

    /// The engine has ended: answers who waits for a change that it does not carry out.
    pub(super) fn give_up_changes(&mut self) {
        self.policy.budgets_due = None;
        let applying = self.policy.applying.take();
        if let Some(client) = applying.and_then(|applying| applying.client) {
            self.clients.answer(client, &ClientAnswer::busy(NO_ENGINE));
        }
    }

    /// Has the guest's budgets looked at, if it has some, or is frozen by one that it had.
    pub(super) fn await_budgets(&mut self) {
        let limits = self.place.memory.maps.rate_limits(self.place.open.row);
        let is_due = of_guest(&self.nat).has_budget() || limits.is_some_and(has_frozen);
        self.policy.budgets_due = is_due.then(Instant::now);
    }

    /// Does what a spent budget leads to, and the beginning of a day.
    pub(super) fn see_to_budgets(&mut self) -> anyhow::Result<()> {
        let now = Instant::now();
        if self.engine.is_none() || self.policy.budgets_due.is_none_or(|due| due > now) {
            return Ok(());
        }
        let maps = &self.place.memory.maps;
        let row = self.place.open.row;
        let at_end = of_guest(&self.nat).budget.at_end;
        let events = &mut self.clients.events;
        let tell = |event| events.push(event);
        let order = look_at(maps, (row, &self.vm.spec.name), at_end, today(), tell);
        self.await_budgets();
        self.policy.budgets_due = self.policy.budgets_due.map(|_| now + BUDGETS_EVERY);
        let (id, request) = match order {
            None => return Ok(()),
            Some(BudgetOrder::Cut(_)) => (self.clients.next_id(), EngineRequest::Cut),
            Some(BudgetOrder::Thaw(_)) => match self.clients.thaw() {
                Some(id) => (id, EngineRequest::Thaw),
                None => return Ok(()),
            },
        };
        let about = Some(Subject::Vm { row });
        self.send(ToEngine::Request { id, about, request })?;
        if let Some(BudgetOrder::Cut(row)) = order {
            is_cut(&self.place.memory.maps, row);
        }
        Ok(())
    }
}

/// The rates and budgets of the one guest.
fn of_guest(nat: &Config) -> slipgate_abi::VmRates {
    let vm = nat.vms.first();
    vm.map(|vm| vm.limits.rates).unwrap_or_default()
}

#[cfg(test)]
#[path = "policy_test.rs"]
mod tests;
