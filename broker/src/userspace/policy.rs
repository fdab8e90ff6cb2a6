//! A change of the policy while the guest runs, and its budgets of bytes.
//!
//! # Theory of operation
//! `slipgate policy apply`, and SIGHUP where the guest has no use for it, read the policy files again, as in
//! hybrid mode ([`crate::policy_apply`]). All is read and checked before anything changes. The rules get
//! elements of `RULES`, the engine switches between two packets, cuts the flows that the new policy
//! refuses, and answers when none of their packets can leave any more. Then rates are set, and the client
//! is answered. There is one change at a time.
//!
//! Budgets are looked at as the broker does it ([`crate::kernel_state::look_at`]): the programs' functions
//! count and stop by themselves, and what happens besides is done here.
use std::{collections::BTreeSet, path::PathBuf, time::Instant};

use anyhow::bail;
use slipgate_ipc::{
    channel::memory_file,
    client::{ClientAnswer, ClientId},
    engine::{EngineRequest, Policies, Subject, ToEngine},
};

use super::{
    Served,
    described::{check_egress, spec},
};
use crate::{
    config::Config,
    kernel_state::{BUDGETS_EVERY, BudgetOrder, has_frozen, is_cut, look_at, today},
};

/// A change under way, and when budgets are looked at next.
#[derive(Debug, Default)]
pub(super) struct PolicyChanges {
    /// Number of the message to the engine, and who asked; `None`: a signal did.
    applying: Option<(u64, Option<ClientId>)>,
    /// Whether a signal came meanwhile.
    apply_again: bool,
    /// Indexes of policies that changed here, and of which the engine was not told.
    untold: BTreeSet<u32>,
    /// `None` while the guest has no budget.
    pub(super) budgets_due: Option<Instant>,
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
        if self.policy.applying.is_some() {
            match client {
                Some(client) => {
                    let busy = "another policy is just being put in force: try again";
                    self.clients.answer(client, &ClientAnswer::error(busy));
                }
                None => self.policy.apply_again = true,
            }
            return Ok(());
        }
        match self.take_in_policy(file) {
            Ok(policies) => {
                self.policy.applying = Some((policies.id, client));
                self.send(ToEngine::Policies(Box::new(policies)))
            }
            Err(e) => {
                let error = format!("{e:#}");
                match client {
                    Some(client) => self.clients.answer(client, &ClientAnswer::error(error)),
                    None => tracing::warn!("the policy stays as it was: {error}"),
                }
                Ok(())
            }
        }
    }

    /// Reads and checks a policy, and takes it in. Returns the message for the engine.
    fn take_in_policy(&mut self, file: Option<PathBuf>) -> anyhow::Result<Policies> {
        if self.engine.is_none() {
            bail!("the engine has ended");
        }
        let config = match file {
            Some(file) => self.nat.with_policy_file(&file),
            None => self.nat.reread(),
        }?;
        if config.forwards != self.nat.forwards {
            bail!("it has other forwards, whose ports are taken at the start only");
        }
        let loaded = config.load_policies()?;
        check_egress(&config.flags, &loaded)?;
        let taken = self.place.take_in(loaded.policies, &self.view.local)?;
        let link = (self.vm.spec.mtu.into(), self.vm.spec.ipv6);
        let described = match &config.vms[..] {
            [vm] => spec(&config, vm, &self.place, link),
            _ => self.vm.spec.clone(),
        };
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
    pub(super) fn applied(&mut self, id: u64, answer: &ClientAnswer) -> anyhow::Result<()> {
        let Some((_, client)) = self.policy.applying.take_if(|(of, _)| *of == id) else {
            return Ok(());
        };
        let rates = of_guest(&self.nat);
        let limited = rates.is_limited().then_some(rates);
        let row = self.place.open.row;
        self.place.memory.maps.set_rates(row, limited);
        self.await_budgets();
        if let ClientAnswer::Applied { cut, kept, left } = answer {
            let name = self.nat.policy_name();
            let more = match left {
                0 => String::new(),
                left => format!(", {left} of them against it"),
            };
            tracing::info!("{name} is in force: {cut} flows cut, {kept} go on{more}");
        }
        if let Some(client) = client {
            self.clients.answer(client, answer);
        }
        match std::mem::take(&mut self.policy.apply_again) {
            true => self.apply_policy(None, None),
            false => Ok(()),
        }
    }

    /// The engine has ended: answers who waits for a change that it does not carry out.
    pub(super) fn give_up_changes(&mut self) {
        self.policy.budgets_due = None;
        if let Some((_, Some(client))) = self.policy.applying.take() {
            let ended = ClientAnswer::error("the engine has ended");
            self.clients.answer(client, &ended);
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
        let order = look_at(maps, (row, &self.vm.spec.name), at_end, today(), |_| ());
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
