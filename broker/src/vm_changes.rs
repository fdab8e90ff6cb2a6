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
//! So when the new one is ready, everything that waited for an older one's answer is done. What was
//! sent to the new one while it was starting, it answers itself.
mod definition;
mod kept;
mod tied_machine;
mod ties;

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{BorrowedFd, OwnedFd},
    time::Instant,
};

use anyhow::{Context as _, anyhow};
use slipgate_abi::{VmId, VmRow};
use slipgate_control::vm;
use slipgate_ipc::{
    api::Event,
    client::{ClientAnswer, ClientId, MachineStatus, Replaces, VmChange, VmDefinition},
    engine::ToEngine,
};
use slipgate_policy::document::{check_inline, inline_name};

pub(crate) use self::tied_machine::TiedMachine;
use self::{definition::Put, ties::Ties};
use crate::{
    kernel_errors::is_passing,
    kernel_state::{Attached, ForwardChange, GivenBack, ResourceTaken},
    parts::Parts,
    policy_apply::PolicyChanges,
};

/// VMs on their way in or out.
#[derive(Debug)]
pub(crate) struct VmChanges {
    ties: Ties,
    /// Steps that wait for an engine, by the number of the message, each with the engine that it was
    /// sent to.
    waiting: BTreeMap<u64, (Asked, Step)>,
    /// Definitions that wait for a change of policy, in the order in which they came.
    deferred: VecDeque<Deferred>,
    /// Definitions that wait for a port which the engine gives back with the answer to the message of
    /// this number, in the order in which they came.
    for_ports: Vec<(u64, Deferred)>,
}

/// An engine that was sent a message: its worker, and which of the worker's engines it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Asked {
    worker: usize,
    number: u64,
}

/// A definition that names another policy while a policy is being put in force, or whose own policy
/// is put in force first; or one with a port that another VM is just giving back.
#[derive(Debug)]
struct Deferred {
    client: ClientId,
    definition: VmDefinition,
    /// The condition, which must hold when the definition is put in force. `None`: it is a VM that
    /// its client brings.
    replaces: Option<Replaces>,
}

/// A VM that a client brings.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) vm: VmDefinition,
    /// Device by which its flows are to leave; `None`: the daemon's uplink.
    pub(crate) uplink: Option<String>,
    /// Whether a former daemon served it for this client.
    pub(crate) returns: bool,
}

/// Steps that remain after the engine's answer.
#[derive(Debug)]
enum Step {
    /// Bring up the TAP of a VM that was added.
    Serve { vm: VmId, client: ClientId },
    /// Direct packets to a VM's new forwards, and answer who changed it.
    Change { vm: VmId, client: Option<ClientId> },
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
            deferred: VecDeque::new(),
            for_ports: Vec::new(),
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
        let ended = self.ties.ended();
        self.tell_of_machines(parts);
        for name in ended {
            let at = parts.attached.index_of(&name);
            // It may be another one's by now.
            if at.is_some_and(|at| parts.attached.vms[at].config.tied) {
                tracing::info!("the client that brought {name} has ended");
                self.take_away(parts, None, &name)?;
            }
        }
        Ok(())
    }

    /// The machines of `slipgate run` behind VMs, by name.
    pub(crate) fn machines(&self) -> Vec<MachineStatus> {
        self.ties.machines().collect()
    }

    /// The machine of `slipgate run` behind a VM, as it says of itself by now.
    pub(crate) fn machine(&mut self, parts: &mut Parts, vm: &str) -> Option<MachineStatus> {
        self.ties.hear(vm);
        self.tell_of_machines(parts);
        self.ties.machine(vm)
    }

    fn tell_of_machines(&mut self, parts: &mut Parts) {
        parts.attached.events.extend(self.ties.take_events());
    }

    /// Adds a VM for as long as a client keeps its end of `lifeline`.
    pub(crate) fn serve(
        &mut self,
        parts: &mut Parts,
        policies: &mut PolicyChanges,
        client: ClientId,
        wanted: Wanted,
        lifeline: OwnedFd,
    ) -> anyhow::Result<()> {
        let Wanted {
            vm,
            uplink,
            returns,
        } = wanted;
        let attached = &parts.attached;
        let by = &attached.uplink.name;
        let served = attached.index_of(&vm.name);
        let is_tied = served.is_some_and(|at| attached.vms[at].config.tied);
        // One that was kept meanwhile is still this client's.
        let is_its =
            is_tied || returns && served.is_some_and(|at| attached.vms[at].config.tap == vm.tap);
        let has_other = served.is_some() && (!is_its || self.ties.has(&vm.name));
        let uplink = uplink.filter(|uplink| uplink != by);
        let exists = |name: &String| attached.watch.network().link_by_name(name).is_some();
        let refused = if let Some(absent) = uplink.as_ref().filter(|name| !exists(name)) {
            Some(format!(
                "--uplink {absent}: there is no such device: give one that `ip link` shows, or \
                 leave it out for the daemon's, {by}"
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
        let name = vm.name.clone();
        let is_accepted = match served {
            // What others have changed since, stays.
            Some(at) if returns => {
                parts.answer_vm(client, at, VmChange::Unchanged);
                true
            }
            _ => {
                let definition = VmDefinition {
                    tied: true,
                    uplink,
                    ..vm
                };
                self.put_as(parts, policies, client, &definition, None)?
            }
        };
        if is_accepted && let Err(e) = self.ties.tie(&name, lifeline) {
            // The client's end is closed with ours: it comes back, or the VM goes.
            tracing::warn!("waiting for the end of the client of {name}: {e}");
            self.ties.await_client(&name);
        }
        Ok(())
    }

    /// Adds a VM, or gives the one of this name another definition. One that is tied to a client
    /// stays so.
    pub(crate) fn put(
        &mut self,
        parts: &mut Parts,
        policies: &mut PolicyChanges,
        client: ClientId,
        definition: &VmDefinition,
        replaces: &Replaces,
    ) -> anyhow::Result<()> {
        let attached = &parts.attached;
        let served = attached.index_of(&definition.name);
        let served = served.map(|at| attached.vms[at].config.definition());
        if !replaces.permits(served.as_ref().map(VmDefinition::version)) {
            let what = format!("the VM {}", definition.name);
            let answer = ClientAnswer::replaced(&what, served.is_some());
            parts.control.answer(client, &answer);
            return Ok(());
        }
        let definition = VmDefinition {
            tied: served.is_some_and(|served| served.tied),
            ..definition.clone()
        };
        self.put_as(parts, policies, client, &definition, Some(replaces))
            .map(drop)
    }

    /// Puts a definition in force. Returns whether it was accepted; the client is answered in any
    /// case, at once or when the engine has answered.
    fn put_as(
        &mut self,
        parts: &mut Parts,
        policies: &mut PolicyChanges,
        client: ClientId,
        definition: &VmDefinition,
        replaces: Option<&Replaces>,
    ) -> anyhow::Result<bool> {
        let prepared = match lacks_policy(&parts.attached, definition) {
            true => Ok(Put::Later),
            false => parts.attached.prepare(definition, policies.is_applying()),
        };
        let later = || Deferred {
            client,
            definition: definition.clone(),
            replaces: replaces.cloned(),
        };
        match prepared {
            Ok(Put::Later) => self.deferred.push_back(later()),
            Err(e) => match e.downcast_ref::<GivenBack>() {
                Some(port) => self.for_ports.push((port.by, later())),
                None => {
                    refuse(parts, client, e);
                    return Ok(false);
                }
            },
            Ok(Put::Added(at, forwards)) => {
                let vm = parts.attached.vms[at].open.id;
                let id = send_vm(parts, at, forwards)?;
                let worker = parts.attached.vms[at].worker;
                self.wait(parts, worker, id, Step::Serve { vm, client });
            }
            Ok(Put::Unchanged(at)) => parts.answer_vm(client, at, VmChange::Unchanged),
            Ok(Put::Changed(at, forwards)) => {
                let vm = parts.attached.vms[at].open.id;
                // It may have another uplink.
                parts.attached.follow_ipv6_of(at);
                let client = Some(client);
                let id = send_vm(parts, at, forwards)?;
                let worker = parts.attached.vms[at].worker;
                self.wait(parts, worker, id, Step::Change { vm, client });
            }
            Ok(Put::OtherPolicy(at, new, forwards)) => {
                let vm = parts.attached.vms[at].open.id;
                parts.follow_vm_uplinks()?;
                let served = &parts.attached.vms[at];
                let (worker, spec) = (served.worker, parts.attached.vm_spec(served));
                parts.engines.send(worker, ToEngine::Vm(spec))?;
                if let Some(id) = send_forwards(parts, at, forwards)? {
                    let client = None;
                    let worker = parts.attached.vms[at].worker;
                    self.wait(parts, worker, id, Step::Change { vm, client });
                }
                policies.apply_to_vm(parts, client, *new)?;
            }
        }
        Ok(true)
    }

    /// Puts definitions in force that waited for a change of policy, up to the first that leads to
    /// another one. Those with policies of their own that are not in force yet share one.
    pub(crate) fn see_to_policies(
        &mut self,
        parts: &mut Parts,
        policies: &mut PolicyChanges,
    ) -> anyhow::Result<()> {
        while !policies.is_applying()
            && let Some(first) = self.deferred.pop_front()
        {
            if !lacks_policy(&parts.attached, &first.definition) {
                let Deferred {
                    client,
                    definition,
                    replaces,
                } = first;
                match replaces {
                    Some(replaces) => self.put(parts, policies, client, &definition, &replaces)?,
                    None => drop(self.put_as(parts, policies, client, &definition, None)?),
                }
                continue;
            }
            let own = first.policy();
            let others = self.deferred.iter().filter_map(Deferred::policy);
            let texts = own.clone().into_iter().chain(others).collect();
            // One of the others, then: this one may be fine.
            let put = policies
                .put_inline(parts, &texts)
                .or_else(|_| policies.put_inline(parts, &own.into_iter().collect()));
            match put {
                Ok(()) => self.deferred.push_front(first),
                Err(e) => refuse(parts, first.client, e),
            }
        }
        Ok(())
    }

    /// Notes a step that remains when the worker's engine has answered the message with number `id`.
    fn wait(&mut self, parts: &Parts, worker: usize, id: u64, step: Step) {
        let number = parts.engines.of(worker).number();
        self.waiting.insert(id, (Asked { worker, number }, step));
    }

    /// Begins the removal of a VM.
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
        self.tell_of_machines(parts);
        let id = parts.next_id();
        let gone = parts.attached.take_out(at, id);
        let (vm, row, worker) = (gone.open.id, gone.open.row, gone.worker);
        let name = name.to_owned();
        self.wait(parts, worker, id, Step::Close { row, name, client });
        let removed = ToEngine::RemoveVm { id, vm, row };
        parts.engines.send(worker, removed)
    }

    /// The engine of a worker has carried out what it was told under this number.
    pub(crate) fn done(&mut self, parts: &mut Parts, worker: usize, id: u64) {
        // None may answer for another.
        let is_its = (self.waiting.get(&id)).is_some_and(|(asked, _)| asked.worker == worker);
        if !is_its {
            return;
        }
        if let Some((_, step)) = self.waiting.remove(&id) {
            step.finish(parts);
        }
        self.ports_returned(parts, id);
    }

    /// The engine has given back the ports that it was to by this message.
    fn ports_returned(&mut self, parts: &mut Parts, id: u64) {
        parts.attached.forwards.returned(id);
        let waited = self.for_ports.extract_if(.., |(by, _)| *by == id);
        self.deferred
            .extend(waited.map(|(_, definition)| definition));
    }

    /// A worker has another engine, which has started with the VMs as they were then.
    pub(crate) fn engine_serves(&mut self, parts: &mut Parts, worker: usize) {
        let present = parts.engines.of(worker).number();
        let is_former = |asked: Asked| asked.worker == worker && asked.number < present;
        let done = self
            .waiting
            .extract_if(.., |_, (asked, _)| is_former(*asked));
        let done: Vec<_> = done.collect();
        for (id, (_, step)) in done {
            step.finish(parts);
            self.ports_returned(parts, id);
        }
    }
}

impl Deferred {
    /// Name and text of the policy.
    fn policy(&self) -> Option<(String, String)> {
        let text = self.definition.inline_policy.as_ref()?;
        Some((inline_name(text), text.clone()))
    }
}

/// Whether the policy that a definition contains is to be put in force first. One that can't be used
/// is refused with the definition.
fn lacks_policy(attached: &Attached, definition: &VmDefinition) -> bool {
    definition.policy.is_none()
        && definition.inline_policy.as_ref().is_some_and(|text| {
            let named = &attached.config.named_policies;
            !named.contains_key(&inline_name(text)) && check_inline(text).is_ok()
        })
}

impl Step {
    fn finish(self, parts: &mut Parts) {
        match self {
            Self::Serve { vm, client } => {
                // It may have been removed meanwhile: that client has its own answer.
                let Some(at) = parts.attached.index_of_id(vm) else {
                    return parts.control.answer(client, &ClientAnswer::removed());
                };
                let served = parts.attached.begin_to_serve(at);
                let config = &parts.attached.vms[at].config;
                let name = config.name.clone();
                match served {
                    Ok(()) => {
                        tracing::info!("{name} is added, with the TAP {}", config.tap);
                        parts.attached.events.push(Event::VmAdded { vm: name });
                        parts.answer_vm(client, at, VmChange::Created);
                    }
                    // It stays; its TAP is tried again, until it can be served or the VM is removed.
                    Err(e) => {
                        let e = e.context(format!("{name} is there, and not all of it is served"));
                        refuse(parts, client, e);
                    }
                }
            }
            Self::Change { vm, client } => {
                let Some(at) = parts.attached.index_of_id(vm) else {
                    if let Some(client) = client {
                        parts.control.answer(client, &ClientAnswer::removed());
                    }
                    return;
                };
                let name = parts.attached.vms[at].config.name.clone();
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
    parts.follow_vm_uplinks()?;
    let served = &parts.attached.vms[at];
    let (worker, vm) = (served.worker, parts.attached.vm_spec(served));
    let id = parts.next_id();
    parts.engines.send(worker, ToEngine::AddVm { id, vm })?;
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
    let message = parts.attached.change_forwards(id, at, forwards);
    let worker = parts.attached.vms[at].worker;
    parts.engines.send(worker, message)?;
    Ok(Some(id))
}

fn refuse(parts: &mut Parts, client: ClientId, e: anyhow::Error) {
    parts.control.answer(client, &refusal(&e));
}

/// The answer to a change that can't be made.
pub(crate) fn refusal(e: &anyhow::Error) -> ClientAnswer {
    match is_passing(e) {
        true => ClientAnswer::busy(format!("{e:#}: try again")),
        false if e.is::<ResourceTaken>() => ClientAnswer::taken(format!("{e:#}")),
        false => ClientAnswer::error(format!("{e:#}")),
    }
}
