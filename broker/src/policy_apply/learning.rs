//! VMs that are open so that their policy can be learnt (`slipgate policy learn --open`).
//!
//! # Theory of operation
//! Such a VM has a policy of its own: its former policy with default allow, and with `inspect`
//! treated as allow. So destinations that a rule denies, and protected addresses, stay closed. It is
//! put in force like any other policy ([`super`]), and stays while another policy is applied, from
//! which it is made anew.
//!
//! It lasts as long as the client keeps its end of a socket open for writing. When that end closes
//! for any reason, the VM gets its own policy again, the broker's end is closed too, and flows that
//! the own policy refuses are cut, even where that policy leaves flows at a reload. That policy is in
//! force all the while, so there is room for it. If another process holds the lock, or descriptors
//! are short, the broker retries a little later, and the VM is open until then. On any other failure
//! the VM is frozen.
//!
//! None of this is kept for a successor.
use std::{
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use slipgate_abi::{VmId, VmRow};
use slipgate_ipc::client::ClientId;
use slipgate_policy::{
    Action,
    document::{LoadedPolicy, RuleText},
};

use super::{Change, PolicyChanges, Prepared};
use crate::{
    kernel_errors::is_passing,
    kernel_state::{Attached, freeze, learning_name},
    parts::Parts,
};

/// Delay before a retry when a step fails for a passing reason.
const TRIED_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// A VM that is open for learning.
#[derive(Debug)]
pub(crate) struct LearningVm {
    vm: String,
    lifeline: OwnedFd,
    /// Whether the client has closed its end.
    over: bool,
    /// Time of the next attempt to restore the VM's own policy.
    again_at: Option<Instant>,
}

impl LearningVm {
    /// Name of the VM.
    pub(super) fn name(&self) -> &str {
        &self.vm
    }

    /// Descriptor to poll for the client's end; a client sends nothing.
    pub(crate) fn lifeline(&self) -> Option<PollFd<'_>> {
        (!self.over).then(|| PollFd::new(self.lifeline.as_fd(), PollFlags::POLLIN))
    }

    fn has_ended(&self) -> bool {
        if self.over {
            return true;
        }
        let mut fds = self.lifeline().into_iter().collect::<Vec<_>>();
        match poll(&mut fds, PollTimeout::ZERO) {
            Ok(ready) => ready > 0,
            Err(e) => e != nix::Error::EINTR,
        }
    }
}

/// Makes the policies of VMs that are open anew from their own, as these will be after a change.
pub(super) fn follow<'v>(
    attached: &Attached,
    open_vms: impl Iterator<Item = &'v str>,
    change: &mut Prepared,
) {
    for name in open_vms {
        let Some(at) = attached.index_of(name) else {
            continue;
        };
        let closes = change.learning.contains(&(at, false));
        if !attached.vms[at].is_learning || closes {
            continue;
        }
        let mut changed = change.vms.iter();
        let new = changed.find_map(|(other, new)| (*other == at).then_some(new));
        let own = &new.unwrap_or(&attached.vms[at].config).policy;
        let mut put = change.put.iter();
        let put = put.find(|policy| policy.settings.name == *own);
        if let Some(own) = put.or_else(|| attached.policies.loaded(own)) {
            change.put.push(open(own, name));
            change.learning.push((at, true));
        }
    }
}

/// Makes a policy that admits everything that it does not deny.
fn open(own: &LoadedPolicy, vm: &str) -> LoadedPolicy {
    let mut open = own.clone();
    open.default = Action::Allow;
    open.settings.name = Some(learning_name(vm));
    open.settings.is_learning = true;
    for rule in &mut open.rules {
        if let RuleText::Match(action @ Action::Inspect, _) = &mut rule.rule {
            *action = Action::Allow;
        }
    }
    open
}

/// The change by which a VM is opened.
fn opened(attached: &Attached, vm: &str) -> anyhow::Result<Prepared> {
    let at = attached
        .index_of(vm)
        .with_context(|| format!("{vm} is gone"))?;
    let own = &attached.vms[at].config.policy;
    let own = attached.policies.loaded(own);
    let own = own.with_context(|| format!("{vm} has no policy"))?;
    Ok(Prepared {
        put: vec![open(own, vm)],
        learning: vec![(at, true)],
        ..Prepared::default()
    })
}

impl PolicyChanges {
    /// Opens a VM for as long as the client keeps its end of `lifeline`.
    pub(crate) fn open(
        &mut self,
        parts: &mut Parts,
        client: ClientId,
        vm: String,
        lifeline: OwnedFd,
    ) -> anyhow::Result<()> {
        if parts.attached.row_of(&vm).is_none() {
            let answer = parts.attached.unknown_vm();
            parts.control.answer(client, &answer);
            return Ok(());
        }
        if self.is_open(parts, client, &vm) {
            return Ok(());
        }
        self.to_learn.push_back((client, vm, lifeline));
        self.see_to_learning(parts)
    }

    fn open_now(
        &mut self,
        parts: &mut Parts,
        client: ClientId,
        vm: String,
        lifeline: OwnedFd,
    ) -> anyhow::Result<()> {
        if self.is_open(parts, client, &vm) {
            return Ok(());
        }
        let prepared = opened(&parts.attached, &vm);
        match prepared.and_then(|prepared| self.take_in(parts, prepared)) {
            Ok(done) => {
                self.learning.push(LearningVm {
                    vm: vm.clone(),
                    lifeline,
                    over: false,
                    again_at: None,
                });
                tracing::warn!(
                    "{vm} is open, to learn its policy: every flow that nothing denies is admitted"
                );
                self.send_policies(
                    parts,
                    Change {
                        client: Some(client),
                        what: format!("{vm} is open"),
                        done,
                        closed: Some(Vec::new()),
                        ..Change::default()
                    },
                )
            }
            Err(e) => {
                parts.refuse(client, format!("{e:#}"));
                Ok(())
            }
        }
    }

    /// Returns whether another client has the VM open, and refuses this client's request if so.
    fn is_open(&self, parts: &mut Parts, client: ClientId, vm: &str) -> bool {
        let mut learning = self.learning.iter();
        let open = learning.any(|one| one.vm == vm && !one.has_ended());
        if open {
            let error = format!("{vm} is open already, by another `policy learn`");
            parts.refuse(client, error);
        }
        open
    }

    /// Closes VMs whose client has ended, and opens the next one: one change at a time.
    pub(crate) fn see_to_learning(&mut self, parts: &mut Parts) -> anyhow::Result<()> {
        self.close_learnt(parts)?;
        if self.applying.is_none()
            && let Some((client, vm, lifeline)) = self.to_learn.pop_front()
        {
            self.open_now(parts, client, vm, lifeline)?;
        }
        Ok(())
    }

    /// Restores the own policy of VMs whose client has ended.
    fn close_learnt(&mut self, parts: &mut Parts) -> anyhow::Result<()> {
        for one in &mut self.learning {
            one.over |= one.has_ended();
        }
        let over: Vec<String> = self
            .learning
            .iter()
            .filter(|o| o.over && o.again_at.is_none_or(|at| at <= Instant::now()))
            .map(|o| o.vm.clone())
            .collect();
        if over.is_empty() || self.applying.is_some() {
            return Ok(());
        }
        let is_over = |name: &String| over.contains(name);
        let served = over.iter().filter_map(|name| parts.attached.index_of(name));
        let served: Vec<usize> = served.collect();
        let vms = served.iter().map(|at| &parts.attached.vms[*at].open);
        let (rows, ids): (Vec<VmRow>, Vec<VmId>) = vms.map(|open| (open.row, open.id)).unzip();
        let prepared = Prepared {
            gone: over.iter().map(|name| Some(learning_name(name))).collect(),
            learning: served.into_iter().map(|at| (at, false)).collect(),
            ..Prepared::default()
        };
        let closed = self.take_in(parts, prepared);
        if let Err(e) = &closed
            && is_passing(e)
        {
            tracing::warn!("{} stays open a little longer: {e:#}", over.join(", "));
            let again_at = Some(Instant::now() + TRIED_AGAIN_AFTER);
            let late = self.learning.iter_mut().filter(|o| is_over(&o.vm));
            late.for_each(|one| one.again_at = again_at);
            return Ok(());
        }
        let gone = self.learning.extract_if(.., |one| is_over(&one.vm));
        let gone = gone.collect();
        let names = over.join(", ");
        match closed {
            Ok(done) => self.send_policies(
                parts,
                Change {
                    what: format!("{names}: not open any more"),
                    done,
                    strictly: ids,
                    closed: Some(gone),
                    ..Change::default()
                },
            ),
            Err(e) => {
                for row in rows {
                    freeze(parts.attached.datapath.maps(), row);
                }
                tracing::error!(
                    "{names} could not get its earlier policy back, and is frozen for that: {e:#}; \
                     `slipgate policy apply` and then `slipgate thaw`"
                );
                Ok(())
            }
        }
    }
}

#[cfg(test)]
#[path = "learning_test.rs"]
mod tests;
