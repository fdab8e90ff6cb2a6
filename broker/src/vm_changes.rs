//! VMs that come, change and go while a daemon serves.
//!
//! # Theory of operation
//! A VM is **added** in this order, so that its guest reaches nothing before everything is known
//! of it: its row is filled; the engine is told; when the engine has answered, the TAP gets its
//! programs and is brought up, the definition is kept for a successor, and the client is answered.
//! A VM whose TAP does not exist is added all the same: it is served when the TAP comes.
//!
//! It is **removed** in the reverse order: the TAP is taken down, so that nothing new comes; the
//! engine ends the VM's flows and answers when no program can be at work on them any more; then the
//! row is free. Its name is free at once.
//!
//! A **change** of quotas, labels, MAC address or TAP is made in place. Another policy is put in
//! force like any change of policy ([`crate::policy_apply`]), so that flows which it refuses are
//! cut before the client is answered. The guest's address is the VM's for as long as it is served:
//! its flows are known by it.
//!
//! An engine that ends meanwhile is replaced by one that starts with the VMs as they are by then.
//! So when the new one is ready, everything that waited for the old one's answer is done.
use std::collections::BTreeMap;

use anyhow::{anyhow, bail};
use slipgate_abi::VmRow;
use slipgate_control::vm;
use slipgate_ipc::{
    api::Event,
    client::{ClientAnswer, ClientId, VmChange, VmDefinition},
    engine::ToEngine,
};

use crate::{
    config::VmConfig,
    kernel_errors::is_passing,
    kernel_state::{Attached, ForwardChange, ServedVm, Taken, tap_of},
    parts::Parts,
    persisted_vms,
    policy_apply::PolicyChanges,
};

/// VMs on their way in or out.
#[derive(Debug, Default)]
pub(crate) struct VmChanges {
    /// Steps that wait for the engine, by the number of the message.
    waiting: BTreeMap<u64, Step>,
}

/// Steps that remain after the engine's answer.
#[derive(Debug)]
enum Step {
    /// Bring up the TAP of a VM that was added.
    Serve { name: String, client: ClientId },
    /// Direct packets to a VM's new forwards, and answer who changed it.
    Change {
        name: String,
        client: Option<ClientId>,
    },
    /// Free the row of a VM that was removed.
    Close {
        row: VmRow,
        name: String,
        client: ClientId,
    },
}

impl VmChanges {
    /// Adds a VM, or gives the one of this name another definition.
    pub(crate) fn put(
        &mut self,
        parts: &mut Parts,
        policies: &mut PolicyChanges,
        client: ClientId,
        definition: &VmDefinition,
    ) -> anyhow::Result<()> {
        let prepared = parts.attached.prepare(definition, policies.is_applying());
        match prepared {
            Err(e) => {
                refuse(parts, client, e);
                Ok(())
            }
            Ok(Put::Added(at, forwards)) => {
                let vm = parts.attached.vm_spec(&parts.attached.vms[at]);
                let name = vm.name.clone();
                let mut id = parts.next_id();
                parts.engine.send(ToEngine::AddVm { id, vm })?;
                if !forwards.is_empty() {
                    id = parts.next_id();
                    let message = parts.attached.change_forwards(id, at, forwards)?;
                    parts.engine.send(message)?;
                }
                self.waiting.insert(id, Step::Serve { name, client });
                Ok(())
            }
            Ok(Put::Unchanged(at)) => {
                parts.answer_vm(client, at, VmChange::Unchanged);
                Ok(())
            }
            Ok(Put::Changed(at, forwards)) => {
                let vm = parts.attached.vm_spec(&parts.attached.vms[at]);
                let name = vm.name.clone();
                let mut id = parts.next_id();
                parts.engine.send(ToEngine::AddVm { id, vm })?;
                if !forwards.is_empty() {
                    id = parts.next_id();
                    let message = parts.attached.change_forwards(id, at, forwards)?;
                    parts.engine.send(message)?;
                }
                let client = Some(client);
                self.waiting.insert(id, Step::Change { name, client });
                Ok(())
            }
            Ok(Put::OtherPolicy(at, new, forwards)) => {
                if !forwards.is_empty() {
                    let id = parts.next_id();
                    let message = parts.attached.change_forwards(id, at, forwards)?;
                    let (name, client) = (new.name.clone(), None);
                    self.waiting.insert(id, Step::Change { name, client });
                    parts.engine.send(message)?;
                }
                policies.apply_to_vm(parts, client, *new)
            }
        }
    }

    /// Removes a VM.
    pub(crate) fn remove(
        &mut self,
        parts: &mut Parts,
        client: ClientId,
        name: &str,
    ) -> anyhow::Result<()> {
        let attached = &mut parts.attached;
        let Some(at) = attached.index_of(name) else {
            let answer = attached.unknown_vm();
            parts.control.answer(client, &answer);
            return Ok(());
        };
        if let Err(e) = attached.shut_tap_of(&attached.vms[at]) {
            refuse(parts, client, e);
            return Ok(());
        }
        let gone = attached.take_out(at);
        let id = parts.next_id();
        let (vm, row) = (gone.open.id, gone.open.row);
        self.waiting.insert(
            id,
            Step::Close {
                row,
                name: name.to_owned(),
                client,
            },
        );
        parts.engine.send(ToEngine::RemoveVm { id, vm, row })
    }

    /// The engine has carried out what it was told under this number.
    pub(crate) fn done(&mut self, parts: &mut Parts, id: u64) {
        if let Some(step) = self.waiting.remove(&id) {
            step.finish(parts);
        }
    }

    /// Another engine is ready, which has started with the VMs as they are now.
    pub(crate) fn engine_serves(&mut self, parts: &mut Parts) {
        for step in std::mem::take(&mut self.waiting).into_values() {
            step.finish(parts);
        }
    }
}

/// Outcome of a definition, with the VM's index.
enum Put {
    /// The VM is new; the engine does not know it yet, nor its forwards.
    Added(usize, ForwardChange),
    /// The definition was in force already.
    Unchanged(usize),
    /// The definition is in force, and the engine is to be told.
    Changed(usize, ForwardChange),
    /// All but the policy is in force.
    OtherPolicy(usize, Box<VmConfig>, ForwardChange),
}

impl Step {
    fn finish(self, parts: &mut Parts) {
        match self {
            Self::Serve { name, client } => {
                // It may have been removed meanwhile: that client has its own answer.
                let Some(at) = parts.attached.index_of(&name) else {
                    return parts.refuse(client, format!("{name} was removed meanwhile"));
                };
                let served = parts.attached.begin_to_serve(at);
                match served {
                    Ok(()) => {
                        tracing::info!("{name} is served on {}", parts.attached.vms[at].config.tap);
                        parts.attached.events.push(Event::VmAdded { vm: name });
                        parts.answer_vm(client, at, VmChange::Created);
                    }
                    // It stays, with its TAP down, until the TAP can be served or it is removed.
                    Err(e) => refuse(
                        parts,
                        client,
                        e.context(format!("{name} is not served yet")),
                    ),
                }
            }
            Self::Change { name, client } => {
                let Some(at) = parts.attached.index_of(&name) else {
                    if let Some(client) = client {
                        parts.refuse(client, format!("{name} was removed meanwhile"));
                    }
                    return;
                };
                let opened = parts.attached.open_forwards(&parts.attached.vms[at]);
                match (opened, client) {
                    (Ok(()), Some(client)) => parts.answer_vm(client, at, VmChange::Changed),
                    (Ok(()), None) => {}
                    (Err(e), Some(client)) => refuse(parts, client, e),
                    (Err(e), None) => tracing::warn!("the forwards of {name}: {e:#}"),
                }
            }
            Self::Close { row, name, client } => {
                match vm::close(parts.attached.datapath.maps(), row) {
                    Ok(()) => {
                        tracing::info!("{name} is not served any more");
                        parts.attached.events.push(Event::VmRemoved { vm: name });
                        parts.control.answer(client, &ClientAnswer::Done);
                    }
                    Err(e) => {
                        refuse(parts, client, anyhow!(e).context(format!("closing {name}")));
                    }
                }
            }
        }
    }
}

fn refuse(parts: &mut Parts, client: ClientId, e: anyhow::Error) {
    let answer = match is_passing(&e) {
        true => ClientAnswer::busy(format!("{e:#}: try again")),
        false if e.is::<Taken>() => ClientAnswer::taken(format!("{e:#}")),
        false => ClientAnswer::error(format!("{e:#}")),
    };
    parts.control.answer(client, &answer);
}

impl Attached {
    /// Checks a definition by itself and against the other VMs.
    fn check_definition(&self, definition: &VmDefinition) -> anyhow::Result<VmConfig> {
        let mut new = VmConfig::checked(definition, &self.config.network)?;
        if new.tap == self.uplink.name {
            bail!("tap {}: it is the uplink: give the VM's TAP", new.tap);
        }
        let mut others = self.vms.iter().filter(|vm| vm.config.name != new.name);
        if let Some(other) = others.find(|vm| vm.config.tap == new.tap) {
            return Err(Taken(format!(
                "tap {}: it is the TAP of {}: give each VM its own, or remove that one first",
                new.tap, other.config.name
            ))
            .into());
        }
        let network = self.watch.network();
        if network.link_by_name(&new.tap).is_some() {
            tap_of(&new, network)?;
        }
        self.config.settle_vm(&mut new)?;
        Ok(new)
    }

    /// Does what needs no other process. `is_applying`: a change of policy is under way.
    fn prepare(&mut self, definition: &VmDefinition, is_applying: bool) -> anyhow::Result<Put> {
        let new = self.check_definition(definition)?;
        match self.index_of(&new.name) {
            None => self.add_vm(new),
            Some(at) => self.change_vm(at, new, is_applying),
        }
    }

    /// Opens the row of a VM that is new.
    fn add_vm(&mut self, new: VmConfig) -> anyhow::Result<Put> {
        let forwards = self.reserve_change(&[], &new)?;
        let lacks_list = self.vms.iter().all(|vm| vm.config.policy != new.policy);
        let vm = self.open_vm(new.clone())?;
        self.set_rates_of(&vm);
        self.config.vms.push(new);
        self.vms.push(vm);
        self.share_credits();
        if lacks_list {
            self.add_denied();
        }
        Ok(Put::Added(self.vms.len() - 1, forwards))
    }

    /// Has the TAP of a VM served, now that the engine knows the VM, and keeps its definition.
    fn begin_to_serve(&mut self, at: usize) -> anyhow::Result<()> {
        self.keep_vm(&self.vms[at]);
        self.open_forwards(&self.vms[at])?;
        self.note_taps()?;
        let served = self.serve_tap(at);
        if served.is_err() {
            // It is tried again when links change, and every few seconds.
            self.vms[at].tap_ifindex = None;
        }
        served
    }

    /// Takes a VM out of those that are served; its TAP is down.
    fn take_out(&mut self, at: usize) -> ServedVm {
        let gone = self.vms.remove(at);
        self.config.vms.retain(|vm| vm.name != gone.config.name);
        vm::retire(self.datapath.maps(), gone.open.row);
        if let Err(e) = self.close_forwards(&gone) {
            tracing::warn!("the forwards of {}: {e:#}", gone.config.name);
        }
        self.share_credits();
        let run_dir = &self.datapath.paths().run_dir;
        if let Err(e) = persisted_vms::forget(run_dir, &gone.config.name) {
            tracing::warn!("{e:#}");
        }
        if let Err(e) = self.note_taps() {
            tracing::warn!("{e:#}");
        }
        gone
    }

    /// Makes a VM's definition this one, but for its policy.
    fn change_vm(&mut self, at: usize, new: VmConfig, is_applying: bool) -> anyhow::Result<Put> {
        let old = &self.vms[at].config;
        if old.definition() == new.definition() {
            return Ok(Put::Unchanged(at));
        }
        if old.ip != new.ip {
            bail!(
                "ip {}: the address of {} is {} as long as it is served: remove it and add it again",
                new.ip,
                new.name,
                old.ip
            );
        }
        let has_other_policy = old.flags.policy != new.flags.policy;
        if has_other_policy && is_applying {
            bail!("another policy is just being put in force: try again");
        }
        let forwards = self.reserve_change(&old.forwards, &new)?;
        let has_other_tap = old.tap != new.tap;
        let mut in_force = VmConfig {
            policy: old.policy,
            ..new.clone()
        };
        in_force.flags.policy = old.flags.policy.clone();
        if has_other_tap {
            self.shut_tap_of(&self.vms[at])?;
        }
        let ServedVm { is_up, is_idle, .. } = self.vms[at];
        if let Some(vm) = self.config.vms.iter_mut().find(|vm| vm.name == new.name) {
            *vm = in_force.clone();
        }
        self.vms[at] = self.open_vm(in_force)?;
        self.vms[at].is_idle = is_idle && new.idle_after != Some(0);
        self.share_credits();
        self.set_rates_of(&self.vms[at]);
        if is_up {
            self.note_taps()?;
            self.serve_tap(at)?;
        }
        self.keep_vm(&self.vms[at]);
        Ok(match has_other_policy {
            true => Put::OtherPolicy(at, Box::new(new), forwards),
            false => Put::Changed(at, forwards),
        })
    }
}
