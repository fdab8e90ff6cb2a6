//! The VM's place in the maps, which are files of memory of this user's.
use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use nix::unistd::geteuid;
use slipgate_control::{
    InMemory, Owner, Paths, paths,
    vm::{self, OpenVm},
};
use slipgate_ipc::client::ControlServer;
use slipgate_model::{GuestIpv6, USERSPACE_GUEST, USERSPACE_PORT};
use slipgate_policy::PolicySet;

use crate::{
    config::{Config, VmConfig},
    host::{MEMORY_OF_ROOT, make_private, user_mode_dir},
    kernel_state::{GATEWAY_MAC, MOST_CREDITS, Writer, forwards_described, ipv6_in_row, numbered},
};

/// Directory of files of memory that a `--pin-dir` stands for; `None`: it is a directory of pins.
pub(crate) fn memory_base(pin_dir: &Path) -> Option<PathBuf> {
    if pin_dir.starts_with(MEMORY_OF_ROOT) {
        return Some(pin_dir.to_owned());
    }
    (!geteuid().is_root() && pin_dir == Path::new(paths::PINS)).then(user_mode_dir)
}

/// What the reading commands take as `--pin-dir` for the tables of this NAT.
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
    /// The policies, numbered by their elements of `RULES`.
    pub(super) policies: PolicySet,
    /// Index of the VM's policy.
    pub(super) policy: u32,
    /// Elements of `RULES` of the forwards.
    pub(super) forwards: Range<u32>,
}

impl Place {
    pub(super) fn take(
        nat: &Config,
        vm: &VmConfig,
        (mtu, ipv6): (u32, Option<GuestIpv6>),
        policies: PolicySet,
    ) -> anyhow::Result<Self> {
        let base = memory_base(&nat.pin_dir).unwrap_or_else(user_mode_dir);
        let paths = Paths::in_memory(&base)?;
        make_private(&paths.run_dir)
            .with_context(|| format!("making a directory for tables, {}", base.display()))?;
        let (memory, owner) = InMemory::open(paths, nat.sizes())
            .with_context(|| format!("making the tables in {}", base.display()))?;
        let policy = match &vm.policy {
            Some(name) => policies.by_name(name).map_or(0, |(index, _)| index),
            None => 0,
        };
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
            policy,
            tap_ifindex: Some(USERSPACE_GUEST),
            port_ifindex: USERSPACE_PORT,
        };
        match fill(&memory, &owner, nat, &row, policies) {
            Ok((open, policies, forwards)) => {
                let rates = vm.limits.rates;
                let rates = rates.is_limited().then_some(rates);
                memory.maps.set_rates(open.row, rates);
                Ok(Self {
                    memory,
                    owner,
                    open,
                    policies,
                    policy,
                    forwards,
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
    policies: PolicySet,
) -> anyhow::Result<(OpenVm, PolicySet, Range<u32>)> {
    owner.divide_queue(&memory.maps, MOST_CREDITS, u32::MAX);
    let writer = Writer {
        maps: &memory.maps,
        paths: memory.paths(),
        rows: &[owner.row()],
    };
    let (policies, forwards) = numbered(writer, policies, forwards_described(nat))?;
    Ok((vm::open(&memory.maps, owner, row)?, policies, forwards))
}

#[cfg(test)]
#[path = "place_test.rs"]
mod tests;
