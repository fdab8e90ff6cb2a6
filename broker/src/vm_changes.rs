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
mod definition;
mod ties;

use std::{
    collections::BTreeMap,
    os::fd::{BorrowedFd, OwnedFd},
    time::Instant,
};

use anyhow::{Context as _, anyhow};
use slipgate_abi::VmRow;
use slipgate_control::vm;
use slipgate_ipc::{
    api::Event,
    client::{ClientAnswer, ClientId, ErrorKind, VmChange, VmDefinition},
    engine::ToEngine,
};

use self::{definition::Put, ties::Ties};
use crate::{
    kernel_errors::is_passing,
    kernel_state::{Attached, ForwardChange, Taken},
    parts::Parts,
    policy_apply::PolicyChanges,
};

/// VMs on their way in or out.
#[derive(Debug)]
pub(crate) struct VmChanges {
    ties: Ties,
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
        /// `None`: the client that had it has gone.
        client: Option<ClientId>,
    },
}

impl VmChanges {
    /// No change yet; clients of the VMs that are there may come back.
    pub(crate) fn new(attached: &Attached) -> anyhow::Result<Self> {
        let mut ties = Ties::new().context("making a set of descriptors to wait for")?;
        let tied = attached.config.vms.iter().filter(|vm| vm.tied);
        tied.for_each(|vm| ties.await_client(&vm.name));
        Ok(Self {
            ties,
            waiting: BTreeMap::new(),
        })
    }

    /// Readable when a client has gone for whose sake a VM is served.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.ties.fd()
    }

    /// When [`VmChanges::see_to_clients`] has something to do in any case.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.ties.due()
    }

    /// Removes VMs whose clients have gone.
    pub(crate) fn see_to_clients(&mut self, parts: &mut Parts) -> anyhow::Result<()> {
        for name in self.ties.ended() {
            let at = parts.attached.index_of(&name);
            // It may be another one's by now.
            if at.is_some_and(|at| parts.attached.vms[at].config.tied) {
                tracing::info!("who brought {name} has ended");
                self.take_away(parts, None, &name)?;
            }
        }
        Ok(())
    }

    /// Adds a VM for as long as a client keeps its end of `lifeline`.
    pub(crate) fn serve(
        &mut self,
        parts: &mut Parts,
        policies: &mut PolicyChanges,
        client: ClientId,
        wanted: (VmDefinition, Option<String>),
        lifeline: OwnedFd,
    ) -> anyhow::Result<()> {
        let (vm, uplink) = wanted;
        let attached = &parts.attached;
        let by = &attached.uplink.name;
        let served = attached
            .index_of(&vm.name)
            .map(|at| &attached.vms[at].config);
        let has_other = served.is_some_and(|served| !served.tied || self.ties.has(&vm.name));
        let refused = if let Some(other) = uplink.filter(|uplink| uplink != by) {
            Some(format!(
                "--uplink {other}: the daemon's VMs leave by {by}: leave it out, or give --own"
            ))
        } else if has_other {
            let name = &vm.name;
            Some(format!(
                "the daemon serves a VM {name} already: call this one otherwise, or remove that one first"
            ))
        } else {
            None
        };
        if let Some(why) = refused {
            parts.refuse(client, why);
            return Ok(());
        }
        if let Err(e) = self.ties.tie(&vm.name, lifeline) {
            refuse(
                parts,
                client,
                anyhow!(e).context("waiting for the client's end"),
            );
            return Ok(());
        }
        let definition = VmDefinition { tied: true, ..vm };
        self.put_as(parts, policies, client, &definition)
    }

    /// Adds a VM, or gives the one of this name another definition. One that is tied to a client
    /// stays so.
    pub(crate) fn put(
        &mut self,
        parts: &mut Parts,
        policies: &mut PolicyChanges,
        client: ClientId,
        definition: &VmDefinition,
        replaces: Option<u64>,
    ) -> anyhow::Result<()> {
        let attached = &parts.attached;
        let served = attached.index_of(&definition.name);
        let now = served.map_or(0, |at| attached.vms[at].generation);
        if replaces.is_some_and(|replaces| replaces != now) {
            let name = &definition.name;
            let answer = ClientAnswer::Error {
                error: format!("{name} has generation {now} by now: read it again"),
                kind: ErrorKind::Replaced,
            };
            parts.control.answer(client, &answer);
            return Ok(());
        }
        let definition = VmDefinition {
            tied: served.is_some_and(|at| attached.vms[at].config.tied),
            ..definition.clone()
        };
        self.put_as(parts, policies, client, &definition)
    }

    fn put_as(
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
                let name = parts.attached.vms[at].config.name.clone();
                let id = send_vm(parts, at, forwards)?;
                self.waiting.insert(id, Step::Serve { name, client });
                Ok(())
            }
            Ok(Put::Unchanged(at)) => {
                parts.answer_vm(client, at, VmChange::Unchanged);
                Ok(())
            }
            Ok(Put::Changed(at, forwards)) => {
                let name = parts.attached.vms[at].config.name.clone();
                let client = Some(client);
                let id = send_vm(parts, at, forwards)?;
                self.waiting.insert(id, Step::Change { name, client });
                Ok(())
            }
            Ok(Put::OtherPolicy(at, new, forwards)) => {
                if let Some(id) = send_forwards(parts, at, forwards)? {
                    let (name, client) = (new.name.clone(), None);
                    self.waiting.insert(id, Step::Change { name, client });
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
        self.take_away(parts, Some(client), name)
    }

    fn take_away(
        &mut self,
        parts: &mut Parts,
        client: Option<ClientId>,
        name: &str,
    ) -> anyhow::Result<()> {
        let attached = &mut parts.attached;
        let Some(at) = attached.index_of(name) else {
            let answer = attached.unknown_vm();
            if let Some(client) = client {
                parts.control.answer(client, &answer);
            }
            return Ok(());
        };
        if let Err(e) = attached.shut_tap_of(&attached.vms[at]) {
            match client {
                Some(client) => refuse(parts, client, e),
                None => {
                    tracing::warn!("{name} is removed a little later: {e:#}");
                    self.ties.again(name.to_owned());
                }
            }
            return Ok(());
        }
        self.ties.untie(name);
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
                        if let Some(client) = client {
                            parts.control.answer(client, &ClientAnswer::Done);
                        }
                    }
                    Err(e) => {
                        let e = anyhow!(e).context(format!("closing {name}"));
                        match client {
                            Some(client) => refuse(parts, client, e),
                            None => tracing::warn!("{e:#}"),
                        }
                    }
                }
            }
        }
    }
}

/// Sends the engine a VM and the changes of its forwards. Returns the number of the last message.
fn send_vm(parts: &mut Parts, at: usize, forwards: ForwardChange) -> anyhow::Result<u64> {
    let vm = parts.attached.vm_spec(&parts.attached.vms[at]);
    let id = parts.next_id();
    parts.engine.send(ToEngine::AddVm { id, vm })?;
    Ok(send_forwards(parts, at, forwards)?.unwrap_or(id))
}

/// Sends the engine the changes of a VM's forwards. Returns the message's number; `None`: there are
/// no changes.
fn send_forwards(
    parts: &mut Parts,
    at: usize,
    forwards: ForwardChange,
) -> anyhow::Result<Option<u64>> {
    if forwards.is_empty() {
        return Ok(None);
    }
    let id = parts.next_id();
    let message = parts.attached.change_forwards(id, at, forwards)?;
    parts.engine.send(message)?;
    Ok(Some(id))
}

fn refuse(parts: &mut Parts, client: ClientId, e: anyhow::Error) {
    let answer = match is_passing(&e) {
        true => ClientAnswer::busy(format!("{e:#}: try again")),
        false if e.is::<Taken>() => ClientAnswer::taken(format!("{e:#}")),
        false => ClientAnswer::error(format!("{e:#}")),
    };
    parts.control.answer(client, &answer);
}
