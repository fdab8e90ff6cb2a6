//! A VM's definition: checked by itself and against what there is, and put in force as far as it
//! needs no other process.
use anyhow::bail;
use slipgate_control::vm;
use slipgate_ipc::client::VmDefinition;

use crate::{
    config::VmConfig,
    kernel_state::{Attached, ForwardChange, ServedVm, Taken, tap_of},
    persisted_vms,
};

/// What a definition has come to, with the VM's place.
pub(super) enum Put {
    /// The VM is new; the engine does not know it yet, nor its forwards.
    Added(usize, ForwardChange),
    /// The definition was in force already.
    Unchanged(usize),
    /// The definition is in force, and the engine is to be told.
    Changed(usize, ForwardChange),
    /// All but the policy is in force.
    OtherPolicy(usize, Box<VmConfig>, ForwardChange),
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
    pub(super) fn prepare(
        &mut self,
        definition: &VmDefinition,
        is_applying: bool,
    ) -> anyhow::Result<Put> {
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
    pub(super) fn begin_to_serve(&mut self, at: usize) -> anyhow::Result<()> {
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
    pub(super) fn take_out(&mut self, at: usize) -> ServedVm {
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
        let is_idle = is_idle && new.idle_after != Some(0);
        if let Some(vm) = self.config.vms.iter_mut().find(|vm| vm.name == new.name) {
            *vm = in_force.clone();
        }
        let generation = self.vms[at].generation + 1;
        self.vms[at] = ServedVm {
            generation,
            is_idle,
            ..self.open_vm(in_force)?
        };
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
