//! VMs that stay with the daemon while their machines come and go.
//!
//! A VM that `slipgate vm add` defines stays anyway; one that a client brings is kept from the request
//! on. A machine of `slipgate run --as` says what it is on a socket of its own, as one that brings its VM
//! does ([`Ties`](super::ties::Ties)); when that is closed the machine has ended, and the VM has no
//! other loss than its TAP, if that went too. Flows, names, forwards, leases and what is held for a VM that
//! sleeps stay, as for any VMM's TAP that is closed and opened again.
use std::os::fd::OwnedFd;

use slipgate_ipc::client::{ClientAnswer, ClientId, VmChange};

use super::{VmChanges, refuse};
use crate::{kernel_state::Attached, parts::Parts, policy_apply::PolicyChanges};

impl VmChanges {
    /// Takes back a VM that a client brought, unless it is kept by now.
    pub(crate) fn leave(
        &mut self,
        parts: &mut Parts,
        client: ClientId,
        name: &str,
    ) -> anyhow::Result<()> {
        let attached = &parts.attached;
        let at = attached.index_of(name);
        if at.is_some_and(|at| !attached.vms[at].config.tied) {
            parts.control.answer(client, &ClientAnswer::Done);
            return Ok(());
        }
        self.take_away(parts, Some(client), name)
    }

    /// Keeps a VM whatever becomes of the client that brought it.
    pub(crate) fn keep(
        &mut self,
        parts: &mut Parts,
        policies: &PolicyChanges,
        client: ClientId,
        name: &str,
    ) {
        let Some(at) = parts.attached.index_of(name) else {
            let answer = parts.attached.unknown_vm();
            return parts.control.answer(client, &answer);
        };
        if policies.is_applying() {
            // It may end with the definition as it was.
            let why = "a policy is just being put in force: try again";
            return parts.control.answer(client, &ClientAnswer::busy(why));
        }
        // Who hears of it has heard before of what the machine has done.
        self.ties.hear(name);
        self.tell_of_machines(parts);
        let change = match parts.attached.untie(at) {
            true => VmChange::Changed,
            false => VmChange::Unchanged,
        };
        self.ties.forget_awaited(name);
        parts.answer_vm(client, at, change);
    }

    /// Notes that a client is the machine of a VM that is kept, for as long as it keeps its end of
    /// `lifeline`.
    pub(crate) fn run(
        &mut self,
        parts: &mut Parts,
        client: ClientId,
        name: &str,
        lifeline: OwnedFd,
    ) -> anyhow::Result<()> {
        // A machine that has just ended makes room.
        self.see_to_clients(parts)?;
        let Some(at) = parts.attached.index_of(name) else {
            let answer = parts.attached.unknown_vm();
            parts.control.answer(client, &answer);
            return Ok(());
        };
        let answer = if self.ties.is_ending(name) {
            ClientAnswer::busy(format!("the machine of {name} is just ending: try again"))
        } else if self.ties.has(name) {
            ClientAnswer::taken(format!(
                "{name} has a machine or an `attach`, which runs: end that one first, such as by \
                 `slipgate snapshot {name} DIR --sleep`, which keeps the VM"
            ))
        } else if parts.attached.vms[at].config.tied {
            ClientAnswer::error(format!(
                "{name} goes with the command that brought it: keep it (`slipgate vm keep {name}`)"
            ))
        } else if !parts.attached.serves_tap(at) {
            let tap = &parts.attached.vms[at].config.tap;
            ClientAnswer::busy(format!(
                "the TAP {tap} of {name} is not served yet: try again"
            ))
        } else {
            match self.ties.tie(name, lifeline) {
                Ok(()) => {
                    parts.answer_vm(client, at, VmChange::Unchanged);
                    return Ok(());
                }
                Err(e) => {
                    let e = anyhow::Error::new(e).context("waiting for the end of the machine");
                    refuse(parts, client, e);
                    return Ok(());
                }
            }
        };
        parts.control.answer(client, &answer);
        Ok(())
    }
}

impl Attached {
    /// Keeps a VM that a client brought. Returns whether that is new.
    fn untie(&mut self, at: usize) -> bool {
        if !self.vms[at].config.tied {
            return false;
        }
        let mut config = self.vms[at].config.clone();
        config.tied = false;
        self.config.vms[at].tied = false;
        self.vms.configure(at, config);
        self.vms[at].generation += 1;
        self.keep_vm(&self.vms[at]);
        true
    }

    /// Whether the TAP of a VM that is there now has its programs.
    fn serves_tap(&self, at: usize) -> bool {
        let vm = &self.vms[at];
        let link = self.watch.network().link_by_name(&vm.config.tap);
        let there = link.map(|link| link.ifindex);
        vm.is_up && there.is_some_and(|tap| Some(tap) == vm.tap_ifindex && self.is_served(tap))
    }
}
