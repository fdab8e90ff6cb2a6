//! VMs that are open so that their policy can be learnt (`slipgate policy learn --open`).
//!
//! # Theory of operation
//! Such a VM has a policy of its own, behind those of the file: the one that it had, with the default
//! allow, and `inspect` meaning allow. So what a rule denies, and protected space, stays shut. It is
//! put in force as any other policy is ([`super::reload`]), and stays while another one is applied.
//!
//! It lasts for as long as the client keeps its end of a socket open, for writing: when it ends,
//! however it does, the VM has its own policy again (and then our end is closed too), and whatever
//! that does not let in is cut, also where the policy leaves flows at a reload. If the texts of the
//! policies find no room then, the ones of before stay in `RULES`, and the VM has its own among
//! them. Where another process holds the lock, or descriptors are short, it is tried again a little
//! later, and the VM is open until then. Should anything else fail, the VM is frozen.
//!
//! Nothing of it is kept for a successor.
use std::{
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use slipgate_policy::Action;

use super::{Broker, is_passing, reload::Read};
use crate::{
    config::Config,
    control_socket::{Answer, ClientId},
};
use slipgate_policy::document::{LoadedPolicies, LoadedPolicy, RuleText};

/// After what can't be done just now.
const TRIED_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// One of them.
#[derive(Debug)]
pub(super) struct Opened {
    vm: String,
    lifeline: OwnedFd,
    /// The client has ended.
    over: bool,
    /// When it is tried again to give its VM the policy of before.
    again_at: Option<Instant>,
}

impl Opened {
    /// What to wait for: an end. A client has nothing to say.
    pub(super) fn lifeline(&self) -> Option<PollFd<'_>> {
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

/// Which VMs have such a policy, and which of them it holds for.
#[derive(Debug)]
pub(super) struct OpenedVms {
    with_policy: Vec<String>,
    open: Vec<String>,
}

impl OpenedVms {
    /// Those that learn now.
    pub(super) fn of(opened: &[Opened]) -> Self {
        let open = opened.iter().filter(|opened| !opened.over);
        let open: Vec<String> = open.map(|opened| opened.vm.clone()).collect();
        Self {
            with_policy: open.clone(),
            open,
        }
    }

    /// The policies of `loaded` and behind them those of these VMs, which get them in `config`.
    pub(super) fn add_to(&self, config: &mut Config, loaded: &LoadedPolicies) -> LoadedPolicies {
        let mut all = loaded.clone();
        for name in &self.with_policy {
            let Some(vm) = config.vms.iter_mut().find(|vm| vm.name == *name) else {
                continue;
            };
            let Some(own) = loaded.policies.get(vm.policy as usize) else {
                continue;
            };
            if self.open.contains(name) {
                vm.policy = all.policies.len() as u32;
            }
            all.policies.push(open(own, name));
        }
        all
    }
}

/// A policy that lets in what it does not deny.
fn open(own: &LoadedPolicy, vm: &str) -> LoadedPolicy {
    let mut open = own.clone();
    open.default = Action::Allow;
    open.settings.name = Some(format!("learning {vm}"));
    open.settings.is_learning = true;
    for rule in &mut open.rules {
        if let RuleText::Match(action @ Action::Inspect, _) = &mut rule.rule {
            *action = Action::Allow;
        }
    }
    open
}

impl Broker {
    /// Opens a VM for as long as the client keeps its end of `lifeline`.
    pub(super) fn open(
        &mut self,
        client: ClientId,
        vm: String,
        lifeline: Option<OwnedFd>,
    ) -> anyhow::Result<()> {
        let Some(lifeline) = self.descriptor(client, lifeline) else {
            return Ok(());
        };
        if self.row_of(client, &vm).is_none() {
            return Ok(());
        }
        if self.is_open(client, &vm) {
            return Ok(());
        }
        self.to_open.push_back((client, vm, lifeline));
        self.see_to_opened()
    }

    fn open_now(&mut self, client: ClientId, vm: String, lifeline: OwnedFd) -> anyhow::Result<()> {
        if self.is_open(client, &vm) {
            return Ok(());
        }
        self.opened.push(Opened {
            vm: vm.clone(),
            lifeline,
            over: false,
            again_at: None,
        });
        let opened = OpenedVms::of(&self.opened);
        let read = Read::again(&self.attached, &opened).map_err(anyhow::Error::from);
        match read.and_then(|read| self.attached.take_in(read, Vec::new())) {
            Ok((policies, before)) => {
                tracing::warn!("{vm} is open, to learn its policy: what nothing denies is let in");
                let what = format!("{vm} is open");
                self.tell_policies(policies, before, Some(client), what, Some(Vec::new()))
            }
            Err(e) => {
                self.opened.pop();
                let error = format!("{e:#}");
                self.control.answer(client, &Answer::Error { error });
                Ok(())
            }
        }
    }

    /// Whether another client has it open; who asked is told.
    fn is_open(&mut self, client: ClientId, vm: &str) -> bool {
        let mut opened = self.opened.iter();
        let open = opened.any(|opened| opened.vm == vm && !opened.has_ended());
        if open {
            let error = format!("{vm} is open already, by another `policy learn`");
            self.control.answer(client, &Answer::Error { error });
        }
        open
    }

    /// Closes VMs whose client has ended, and opens one that is to be: one change at a time.
    pub(super) fn see_to_opened(&mut self) -> anyhow::Result<()> {
        self.close_opened()?;
        if self.applying.is_none()
            && let Some((client, vm, lifeline)) = self.to_open.pop_front()
        {
            self.open_now(client, vm, lifeline)?;
        }
        Ok(())
    }

    /// Gives VMs whose client has ended their own policy again.
    fn close_opened(&mut self) -> anyhow::Result<()> {
        for opened in &mut self.opened {
            opened.over |= opened.has_ended();
        }
        let over: Vec<String> = self
            .opened
            .iter()
            .filter(|o| o.over && o.again_at.is_none_or(|at| at <= Instant::now()))
            .map(|o| o.vm.clone())
            .collect();
        if over.is_empty() || self.applying.is_some() {
            return Ok(());
        }
        let all = OpenedVms::of(&self.opened);
        let with_room = OpenedVms {
            with_policy: self.opened.iter().map(|opened| opened.vm.clone()).collect(),
            open: all.open.clone(),
        };
        let is_over = |name: &String| over.contains(name);
        let vms = self
            .attached
            .vms
            .iter()
            .filter(|vm| is_over(&vm.config.name));
        let rows: Vec<(u32, u32)> = vms.map(|vm| (vm.open.row, vm.open.id)).collect();
        let ids: Vec<u32> = rows.iter().map(|(_, id)| *id).collect();
        let mut closed = Err(anyhow::anyhow!("never tried"));
        for opened in [all, with_room] {
            let read = Read::again(&self.attached, &opened).map_err(anyhow::Error::from);
            closed = read.and_then(|read| self.attached.take_in(read, ids.clone()));
            if closed.is_ok() {
                break;
            }
        }
        if let Err(e) = &closed
            && is_passing(e)
        {
            tracing::warn!("{} stays open a little longer: {e:#}", over.join(", "));
            let again_at = Some(Instant::now() + TRIED_AGAIN_AFTER);
            let late = self.opened.iter_mut().filter(|o| is_over(&o.vm));
            late.for_each(|opened| opened.again_at = again_at);
            return Ok(());
        }
        let gone = self.opened.extract_if(.., |opened| is_over(&opened.vm));
        let gone = gone.collect();
        let names = over.join(", ");
        match closed {
            Ok((policies, before)) => {
                let what = format!("{names}: not open any more");
                self.tell_policies(policies, before, None, what, Some(gone))
            }
            Err(e) => {
                for (row, _) in rows {
                    self.attached.datapath.maps().set_frozen(row, true);
                }
                tracing::error!(
                    "{names} can't be given the policy of before, and is frozen for that: {e:#}; \
                     `slipgate policy apply` and then `slipgate thaw`"
                );
                Ok(())
            }
        }
    }
}

#[cfg(test)]
#[path = "opened_test.rs"]
mod tests;
