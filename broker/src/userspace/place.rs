//! The VM's place in the maps, which are files of memory of this user's.
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail};
use nix::unistd::geteuid;
use slipgate_control::{
    InMemory, Owner, Paths, paths,
    vm::{self, OpenVm},
};
use slipgate_ipc::client::ControlServer;
use slipgate_model::{GuestIpv6, USERSPACE_GUEST, USERSPACE_PORT};
use slipgate_policy::{
    LocalAddresses, PolicySet,
    document::{LoadedPolicies, LoadedPolicy},
};

use super::forwards;
use crate::{
    config::{Config, VmConfig},
    host::{MEMORY_OF_ROOT, make_private, user_mode_dir},
    kernel_state::{Catalogue, GATEWAY_MAC, MOST_CREDITS, TakenIn, Writer, ipv6_in_row},
};

/// Directory of files of memory that a `--pin-dir` stands for; `None`: it is a directory of pins.
pub(crate) fn memory_base(pin_dir: &Path) -> Option<PathBuf> {
    if pin_dir.starts_with(MEMORY_OF_ROOT) {
        return Some(pin_dir.to_owned());
    }
    (!geteuid().is_root() && pin_dir == Path::new(paths::PINS)).then(user_mode_dir)
}

/// Directories in which this user's tables and sockets are, those of a hybrid daemon of root's too.
pub(super) fn private_dirs(nat: &Config) -> Vec<PathBuf> {
    let own = match geteuid().is_root() {
        true => paths::RUN.into(),
        false => user_mode_dir(),
    };
    let named = memory_base(&nat.pin_dir).filter(|named| !named.starts_with(&own));
    [own].into_iter().chain(named).collect()
}

/// Makes the directory of a socket of the API, if it is to be below one of these, for this user alone.
/// Returns whether it is, however the path is written: no command of `slipgate exec` sees it then.
///
/// # Errors
/// It can't be made, others can get into it, or it is a place of control sockets.
pub(super) fn prepare_dir(dir: &Path, private: &[PathBuf]) -> anyhow::Result<bool> {
    let netns = paths::netns_inode()?.to_string();
    for above in private {
        // There the other commands take each socket for a control socket.
        if [above.clone(), above.join(&netns)]
            .iter()
            .any(|it| it == dir)
        {
            bail!(
                "control sockets are in {}: give a path below {}/api",
                dir.display(),
                above.display()
            );
        }
        if dir.starts_with(above) && !dir.components().any(|part| part == Component::ParentDir) {
            let below = dir.ancestors().take_while(|it| it != above);
            // From above, so that each is checked before anything is made in it.
            let mut below: Vec<_> = below.collect();
            below.reverse();
            for dir in below {
                make_private(dir).with_context(|| format!("making {}", dir.display()))?;
            }
        }
    }
    Ok(is_below(dir, private))
}

/// Whether a directory is below one of these, whatever links lead there.
pub(super) fn is_below(dir: &Path, private: &[PathBuf]) -> bool {
    let Ok(dir) = dir.canonicalize() else {
        return false;
    };
    let mut private = private.iter().filter_map(|it| it.canonicalize().ok());
    private.any(|above| dir.starts_with(above))
}

/// Returns the `--pin-dir` by which the reading commands find the tables of this NAT.
pub(super) fn pin_dir(nat: &Config) -> PathBuf {
    match memory_base(&nat.pin_dir) {
        Some(_) => nat.pin_dir.clone(),
        None if geteuid().is_root() => MEMORY_OF_ROOT.into(),
        None => paths::PINS.into(),
    }
}

/// The VM's place in the maps.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) memory: InMemory,
    pub(super) owner: Owner,
    pub(super) open: OpenVm,
    /// The policies, with the elements of `RULES` of theirs and of the forwards.
    pub(super) policies: Catalogue,
}

impl Place {
    pub(super) fn take(
        nat: &Config,
        vm: &VmConfig,
        (mtu, ipv6): (u32, Option<GuestIpv6>),
        policies: (LoadedPolicies, PolicySet),
    ) -> anyhow::Result<Self> {
        let base = memory_base(&nat.pin_dir).unwrap_or_else(user_mode_dir);
        let paths = Paths::in_memory(&base)?;
        make_private(&paths.run_dir)
            .with_context(|| format!("making a directory for tables, {}", base.display()))?;
        Self::take_in_tables(paths, nat, vm, (mtu, ipv6), policies)
    }

    /// Takes a place in the tables of this directory.
    pub(super) fn take_in_tables(
        paths: Paths,
        nat: &Config,
        vm: &VmConfig,
        (mtu, ipv6): (u32, Option<GuestIpv6>),
        policies: (LoadedPolicies, PolicySet),
    ) -> anyhow::Result<Self> {
        let place = paths.run_dir.display().to_string();
        let (memory, owner) = InMemory::open(paths, nat.sizes())
            .with_context(|| format!("making the tables in {place}"))?;
        let row = vm::VmSpec {
            name: vm.name.clone(),
            guest: vm.ip,
            gateway: nat.network.gateway,
            prefix_len: nat.network.prefix_len,
            ipv6: ipv6.as_ref().map(ipv6_in_row),
            guest_mac: vm.mac,
            gateway_mac: GATEWAY_MAC,
            mtu,
            credits: MOST_CREDITS,
            // It is the guard's, which there is none of here.
            policy: 0,
            tap_ifindex: Some(USERSPACE_GUEST),
            port_ifindex: USERSPACE_PORT,
        };
        match fill(&memory, &owner, nat, &row, policies) {
            Ok((open, policies)) => {
                let rates = vm.limits.rates;
                let rates = rates.is_limited().then_some(rates);
                memory.maps.set_rates(open.row, rates);
                Ok(Self {
                    memory,
                    owner,
                    open,
                    policies,
                })
            }
            Err(e) => {
                // The cause is told; a directory that is left is the next one's.
                let _ = memory.close(owner);
                Err(e)
            }
        }
    }

    /// Path of the socket for requests of other commands.
    pub(super) fn socket(&self) -> PathBuf {
        let socket = format!("{}.sock", self.owner.row());
        self.memory.paths().run_dir.join(socket)
    }

    /// Listens for requests of other commands.
    pub(super) fn listen(&self) -> anyhow::Result<ControlServer> {
        let socket = self.socket();
        let control = ControlServer::bind(&socket, geteuid().as_raw())
            .with_context(|| format!("listening at {}", socket.display()))?;
        Ok(control.of_its_owner())
    }

    /// Puts policies in force for whoever asks from now on, in the place of all that there are. On error
    /// nothing has changed.
    ///
    /// # Errors
    /// A policy can't be used, or there is no room for the rules.
    pub(super) fn take_in(
        &mut self,
        put: Vec<LoadedPolicy>,
        local: &LocalAddresses,
    ) -> anyhow::Result<TakenIn> {
        let is_put = |name: &&_| put.iter().any(|policy| policy.settings.name == **name);
        let gone = self.policies.names().filter(|name| !is_put(name)).cloned();
        let gone = gone.collect();
        let compiled = self.policies.compile(put, gone)?;
        let writer = Writer {
            maps: &self.memory.maps,
            paths: self.memory.paths(),
            rows: &[self.owner.row()],
        };
        self.policies.take_in(writer, compiled, local)
    }

    pub(super) fn leave(self) {
        let closed = vm::close(&self.memory.maps, self.open.row);
        if let Err(e) = closed.and(self.memory.close(self.owner)) {
            tracing::warn!("{e}");
        }
    }
}

fn fill(
    memory: &InMemory,
    owner: &Owner,
    nat: &Config,
    row: &vm::VmSpec,
    (loaded, policies): (LoadedPolicies, PolicySet),
) -> anyhow::Result<(OpenVm, Catalogue)> {
    owner.divide_queue(&memory.maps, MOST_CREDITS, u32::MAX);
    let writer = Writer {
        maps: &memory.maps,
        paths: memory.paths(),
        rows: &[owner.row()],
    };
    let policies = Catalogue::begin(writer, loaded, policies, forwards::described(nat))?;
    Ok((vm::open(&memory.maps, owner, row)?, policies))
}

#[cfg(test)]
#[path = "place_test.rs"]
pub(super) mod tests;
