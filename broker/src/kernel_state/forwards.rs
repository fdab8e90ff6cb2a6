//! Forwarded ports: their sockets, their keys in the map, and the rules that their flows show. A port of a
//! guest's own address of IPv6 is one, too, but for the socket: nobody can bind it here.
//!
//! Forwards of the command line and of the policy file are there from the start to the end; those
//! of a daemon's VMs come and go with the VM's definition. A port is held from the moment at which
//! a definition with it is accepted. The programs hand packets over once the engine knows of it.
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use anyhow::{Context as _, bail};
use slipgate_abi::{ForwardKey, ForwardKey6, ForwardTarget, RuleIndex, VmId, maps::MAX_FORWARDS};
use slipgate_control::{
    maps::{Insert, SharedMaps},
    vm::OpenVm,
};
use slipgate_ipc::engine::{ForwardSocket, ToEngine};
use slipgate_policy::{Described, document::Forward};

use super::{Attached, ResourceTaken, ServedVm, reserve};
use crate::config::{Config, VmConfig};

/// Text of the rule that flows of VMs' own forwards show. All share one element of `RULES`, so a
/// forward that is added needs none; a flow's addresses show the port.
pub(crate) const OF_ITS_VM: &str = "forward of its VM";

/// A forwarded port of the host, or an open one of a guest's own address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct HostPort {
    protocol: u8,
    port: u16,
    /// 0.0.0.0 or `::`: any address of the family. Of a guest's own ports the first address of a /64
    /// stands for all of it.
    host: IpAddr,
    /// Whether it is a guest's own: the host has no such address, so nobody can bind the port there.
    is_own: bool,
}

impl HostPort {
    fn of(forward: &Forward) -> Self {
        Self {
            protocol: forward.protocol,
            port: forward.host_port,
            host: forward.host,
            is_own: forward.is_own,
        }
    }

    /// Whether the two can't be bound at the same time.
    fn clashes(self, other: Self) -> bool {
        if self.is_own || other.is_own {
            return false;
        }
        let has_any = self.host.is_unspecified() || other.host.is_unspecified();
        let is_same_family = self.host.is_ipv4() == other.host.is_ipv4();
        (self.protocol, self.port) == (other.protocol, other.port)
            && (self.host == other.host || has_any && is_same_family)
    }

    fn address(self) -> SocketAddr {
        SocketAddr::new(self.host, self.port)
    }

    fn key(self) -> Key {
        let Self { protocol, port, .. } = self;
        match self.host {
            IpAddr::V4(host) => Key::V4(ForwardKey::new(host.into(), port, protocol)),
            // No guest has the first address of its /64.
            IpAddr::V6(host) if self.is_own && host.to_bits() as u64 == 0 => {
                Key::V6(ForwardKey6::of_routed_port(host.into(), port, protocol))
            }
            IpAddr::V6(host) => Key::V6(ForwardKey6::new(host.into(), port, protocol)),
        }
    }

    /// Whether the programs match the port. A forward of loopback serves the host only, whose
    /// connections arrive by the socket: any neighbour on the uplink's link could send to that
    /// address too.
    fn is_from_links(self) -> bool {
        !self.host.is_loopback()
    }
}

/// Key of a forward in its family's map.
enum Key {
    V4(ForwardKey),
    V6(ForwardKey6),
}

impl Key {
    fn insert(&self, maps: &SharedMaps, target: &ForwardTarget) -> anyhow::Result<()> {
        match self {
            Self::V4(key) => maps.forwards.insert(key, target, Insert::Any)?,
            Self::V6(key) => maps.forwards6.insert(key, target, Insert::Any)?,
        }
        Ok(())
    }

    fn remove(&self, maps: &SharedMaps) -> anyhow::Result<()> {
        match self {
            Self::V4(key) => maps.forwards.remove(key)?,
            Self::V6(key) => maps.forwards6.remove(key)?,
        };
        Ok(())
    }
}

/// A port of the host that is held for a guest.
#[derive(Debug)]
pub(crate) struct HeldForward {
    vm: String,
    guest_port: u16,
    /// Text of the rule that its flows show.
    rule: String,
    /// The socket that holds the port; `None`: it is of the guest's own address.
    socket: Option<OwnedFd>,
}

/// Error: the engine still has the socket of a port that a VM has given back.
#[derive(thiserror::Error, Debug)]
#[error("port {port} of the host is being given back")]
pub(crate) struct GivenBack {
    port: u16,
    /// Number of the message by which the engine is told, and after which the port is free.
    pub(crate) by: u64,
}

/// The ports that are held.
#[derive(Debug, Default)]
pub(crate) struct HeldForwards {
    held: BTreeMap<HostPort, HeldForward>,
    /// Ports that VMs have given back and whose sockets the engine still has, each with the number
    /// of the message to it.
    given_back: Vec<(HostPort, u64)>,
}

impl HeldForwards {
    /// Returns a port that a VM holds.
    fn of_vm(&self, vm: &str, port: HostPort) -> Option<&HeldForward> {
        self.held.get(&port).filter(|held| held.vm == vm)
    }

    /// Removes a port, which the engine gives back with the answer to a message.
    fn give_back(&mut self, port: HostPort, by: u64) {
        self.held.remove(&port);
        self.given_back.push((port, by));
    }

    /// The engine has answered this message, or has ended since.
    pub(crate) fn returned(&mut self, by: u64) {
        self.given_back.retain(|(_, told)| *told != by);
    }

    /// Returns what a port has to wait for if it is being given back.
    fn awaited(&self, forward: &Forward) -> Option<GivenBack> {
        let wanted = HostPort::of(forward);
        let mut given_back = self.given_back.iter();
        let (port, by) = given_back.rfind(|(port, _)| port.clashes(wanted))?;
        Some(GivenBack {
            port: port.port,
            by: *by,
        })
    }

    /// Returns the name of another VM that has the port at this address, or at any address if one
    /// of the two forwards has none.
    fn holder(&self, forward: &Forward, vm: &str) -> Option<&str> {
        let at = |host| HostPort {
            host,
            ..HostPort::of(forward)
        };
        let last = Ipv6Addr::from_bits(u128::MAX);
        let same_port = at(Ipv4Addr::UNSPECIFIED.into())..=at(last.into());
        let wanted = HostPort::of(forward);
        self.held
            .range(same_port)
            .find(|(port, held)| port.clashes(wanted) && held.vm != vm)
            .map(|(_, held)| held.vm.as_str())
    }
}

/// Changes of a VM's forwards by a new definition. The new ports are held already, and every
/// descriptor that the engine gets is there.
#[derive(Debug, Default)]
pub(crate) struct ForwardChange {
    /// Ports that are no longer forwarded, or lead to another port of the guest now.
    removed: Vec<HostPort>,
    added: Vec<AddedForward>,
}

/// A forward to be added.
#[derive(Debug)]
struct AddedForward {
    forward: Forward,
    /// Its socket; `None`: the VM holds the port already, or it has none.
    socket: Option<OwnedFd>,
    /// A copy of the socket for the engine; `None`: it has none.
    for_engine: Option<OwnedFd>,
    /// Whether the VM holds the port already.
    is_held: bool,
}

impl ForwardChange {
    pub(crate) fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.added.is_empty()
    }
}

impl Attached {
    /// Takes the forwards' ports of the host, at the start. A port of a daemon's VM that another
    /// process has taken meanwhile is left out.
    pub(crate) fn reserve_forwards(&mut self) -> anyhow::Result<()> {
        let handed_over = &mut self.handed_over;
        for forward in &self.config.forwards {
            let held = HeldForward {
                vm: self.vms[forward.vm].config.name.clone(),
                guest_port: forward.guest_port,
                rule: forward_text(forward),
                socket: reserve::take_over(forward, handed_over)?,
            };
            self.forwards.held.insert(HostPort::of(forward), held);
        }
        for vm in self.vms.iter() {
            let VmConfig { name, forwards, .. } = &vm.config;
            for forward in forwards {
                match reserve::take_over(forward, handed_over) {
                    Ok(socket) => {
                        let held = HeldForward::of_vm(name, forward, socket);
                        self.forwards.held.insert(HostPort::of(forward), held);
                    }
                    Err(e) => tracing::warn!("{name} is served without a forward: {e:#}"),
                }
            }
        }
        Ok(())
    }

    /// Determines the changes of a VM's forwards by another definition, and takes the new ports.
    /// `old`: the forwards of its present definition, of which it may not hold all.
    ///
    /// # Errors
    /// [`ResourceTaken`]: another process or VM has a port. [`GivenBack`]: a VM had it until now. There are
    /// too many forwards, or there is no descriptor left.
    pub(crate) fn reserve_change(
        &self,
        old: &[Forward],
        new: &VmConfig,
    ) -> anyhow::Result<ForwardChange> {
        let held = |forward: &Forward| self.forwards.of_vm(&new.name, HostPort::of(forward));
        let wanted = |port: HostPort| {
            let mut wanted = new.forwards.iter();
            wanted
                .find(|forward| HostPort::of(forward) == port)
                .map(|forward| forward.guest_port)
        };
        let is_removed = |forward: &&Forward| {
            let held = held(forward).map(|held| held.guest_port);
            held.is_some() && held != wanted(HostPort::of(forward))
        };
        let removed: Vec<HostPort> = old.iter().filter(is_removed).map(HostPort::of).collect();
        let mut added = Vec::new();
        for forward in &new.forwards {
            let held = held(forward);
            let socket = match held {
                Some(held) if held.guest_port == forward.guest_port => continue,
                Some(_) => None,
                None => self.reserve_for(forward, &new.name)?,
            };
            let ours = socket
                .as_ref()
                .or(held.and_then(|held| held.socket.as_ref()));
            let for_engine = ours.map(OwnedFd::try_clone).transpose();
            added.push(AddedForward {
                forward: forward.clone(),
                for_engine: for_engine.context("copying a forward's socket")?,
                socket,
                is_held: held.is_some(),
            });
        }
        let new = added.iter().filter(|new| !new.is_held);
        let more: Vec<HostPort> = new.map(|new| HostPort::of(&new.forward)).collect();
        let fewer = removed.iter().filter(|port| wanted(**port).is_none());
        self.check_room(&more, &fewer.copied().collect::<Vec<_>>())?;
        Ok(ForwardChange { removed, added })
    }

    /// Checks that each family's map has room for more forwards while some others go.
    fn check_room(&self, more: &[HostPort], fewer: &[HostPort]) -> anyhow::Result<()> {
        for is_ipv6 in [false, true] {
            let counts = |port: &&HostPort| port.is_from_links() && port.host.is_ipv6() == is_ipv6;
            let more = more.iter().filter(counts).count();
            if more == 0 {
                continue;
            }
            let fewer = fewer.iter().filter(counts).count();
            let held = self.forwards.held.keys().filter(counts).count();
            // Guests' mappings may take the other half.
            let most = match &self.config.eim_ports {
                Some(_) => MAX_FORWARDS as usize / 2,
                None => MAX_FORWARDS as usize,
            };
            if held + more - fewer > most {
                let family = if is_ipv6 { "IPv6" } else { "IPv4" };
                bail!(
                    "{held} forwards of {family} are held in this network namespace, of at most \
                     {most}: take some from other VMs first"
                );
            }
        }
        Ok(())
    }

    /// Takes the port of a VM's new forward. One of the guest's own address has no socket.
    fn reserve_for(&self, forward: &Forward, vm: &str) -> anyhow::Result<Option<OwnedFd>> {
        match self.forwards.holder(forward, vm) {
            None => reserve::reserve(forward).map_err(|e| match self.forwards.awaited(forward) {
                Some(awaited) if e.is::<ResourceTaken>() => awaited.into(),
                _ => e,
            }),
            Some(holder) => Err(ResourceTaken(format!(
                "forwards {}: port {} of the host leads to {holder}: forward another port, \
                 or take it from that VM first",
                forward.spec, forward.host_port
            ))
            .into()),
        }
    }

    /// Puts a change of a VM's forwards in force, but for the programs, which hand packets over
    /// after [`Attached::open_forwards`]. Returns the message for the engine.
    pub(crate) fn change_forwards(
        &mut self,
        id: u64,
        at: usize,
        change: ForwardChange,
    ) -> ToEngine {
        let ForwardChange { removed, added } = change;
        let vm = &self.vms[at];
        let name = vm.config.name.clone();
        let again: BTreeSet<HostPort> =
            added.iter().map(|new| HostPort::of(&new.forward)).collect();
        for port in &removed {
            self.close_forward(*port);
            if !again.contains(port) {
                self.forwards.give_back(*port, id);
            }
        }
        let open = &vm.open;
        let mut sockets = Vec::new();
        for AddedForward {
            forward,
            socket,
            for_engine,
            ..
        } in added
        {
            let port = HostPort::of(&forward);
            let held = self.forwards.held.remove(&port);
            let socket = socket.or(held.and_then(|held| held.socket));
            let held = HeldForward::of_vm(&name, &forward, socket);
            sockets.push(self.forward_socket(port, &held, for_engine, open));
            self.forwards.held.insert(port, held);
        }
        ToEngine::ChangeForwards {
            id,
            vm: open.id,
            row: open.row,
            removed: removed
                .iter()
                .map(|port| (port.protocol, port.address()))
                .collect(),
            added: sockets,
        }
    }

    /// Makes the programs hand first packets to a VM's forwarded ports over to the engine, which
    /// has the forwards already.
    pub(crate) fn open_forwards(&self, vm: &ServedVm) -> anyhow::Result<()> {
        let ports = vm.config.forwards.iter().map(HostPort::of);
        ports.into_iter().try_for_each(|port| {
            let held = self.forwards.of_vm(&vm.config.name, port);
            held.map_or(Ok(()), |held| self.open_forward(port, held, vm))
        })
    }

    /// Opens or closes the ports of a VM's own addresses: their prefix is the VM's alone, or not for now.
    pub(super) fn follow_own_ports(&self, vm: &ServedVm) {
        let name = &vm.config.name;
        let all = self.forwards.held.iter();
        for (port, held) in all.filter(|(port, held)| port.is_own && held.vm == *name) {
            match self.may_be_open(*port, vm) {
                false => self.close_forward(*port),
                true => {
                    if let Err(e) = self.open_forward(*port, held, vm) {
                        tracing::warn!("{name}: {e:#}");
                    }
                }
            }
        }
    }

    /// Whether the programs may match a port that a VM holds. One of its own addresses waits while the
    /// host has an address in their prefix: whoever sends to that one means the host.
    fn may_be_open(&self, port: HostPort, vm: &ServedVm) -> bool {
        port.is_from_links() && (!port.is_own || self.has_its_prefix(vm))
    }

    /// Returns the forwards of a VM's definition whose ports it does not hold.
    pub(crate) fn unserved_forwards(&self, vm: &ServedVm) -> Vec<String> {
        let VmConfig { name, forwards, .. } = &vm.config;
        let unserved = forwards
            .iter()
            .filter(|forward| self.forwards.of_vm(name, HostPort::of(forward)).is_none());
        unserved.map(|forward| forward.spec.clone()).collect()
    }

    /// Releases the forwards of a VM that is removed. `told`: number of the message by which the
    /// engine is told.
    pub(crate) fn close_forwards(&mut self, gone: &ServedVm, told: u64) {
        for forward in &gone.config.forwards {
            let port = HostPort::of(forward);
            if self.forwards.of_vm(&gone.config.name, port).is_some() {
                self.close_forward(port);
                self.forwards.give_back(port, told);
            }
        }
    }

    /// Makes the programs hand over no packet to this port any more. Where the kernel refuses that,
    /// the engine has no forward for the packets, and drops them.
    fn close_forward(&self, port: HostPort) {
        if port.is_from_links()
            && let Err(e) = port.key().remove(self.datapath.maps())
        {
            tracing::warn!("closing the forward of port {}: {e:#}", port.port);
        }
    }

    /// Directs first packets from outside to all forwarded ports to the engine, and none to ports
    /// that are no longer forwarded. The sockets are bound by now, so no port of another process
    /// is taken.
    pub(crate) fn write_forwards(&self) -> anyhow::Result<()> {
        let ids: BTreeSet<VmId> = self.vms.iter().map(|vm| vm.open.id).collect();
        let maps = self.datapath.maps();
        let vms = self.vms.iter();
        let by_name: BTreeMap<&str, &ServedVm> =
            vms.map(|vm| (vm.config.name.as_str(), vm)).collect();
        // One that stays is written over, so that nobody else can take its place meanwhile.
        let stays_as = |port: &HostPort| {
            let held = self.forwards.held.get(port);
            let vm = held.and_then(|held| by_name.get(&*held.vm));
            vm.is_some_and(|vm| self.may_be_open(*port, vm))
        };
        let stays = |host: IpAddr, port, protocol| {
            let as_own = |is_own| HostPort {
                protocol,
                host,
                port,
                is_own,
            };
            [false, true].map(as_own).iter().any(stays_as)
        };
        // Those of mappings are the engine's.
        let mapped = self.config.eim_ports.as_ref();
        let is_mapped = |port: u16| mapped.is_some_and(|ports| ports.contains(&port));
        maps.forwards.remove_if(|key, target| {
            ids.contains(&target.id())
                && !is_mapped(key.port)
                && !stays(IpAddr::V4(key.host.into()), key.port, key.protocol)
        })?;
        let routed = self.routed_prefixes();
        maps.forwards6.remove_if(|key, target| {
            ids.contains(&target.id())
                && !routed.contains(key)
                && (key.is_routed() || !is_mapped(key.port))
                && !stays(IpAddr::V6(key.host.into()), key.port, key.transport())
        })?;
        for (port, held) in &self.forwards.held {
            if let Some(vm) = by_name.get(held.vm.as_str())
                && let Err(e) = self.open_forward(*port, held, vm)
            {
                // Other processes of this namespace may have filled the map.
                tracing::warn!("{}: {e:#}", held.vm);
            }
        }
        Ok(())
    }

    /// Has the programs match a port of a VM, if they may now.
    fn open_forward(
        &self,
        port: HostPort,
        held: &HeldForward,
        vm: &ServedVm,
    ) -> anyhow::Result<()> {
        if !self.may_be_open(port, vm) {
            return Ok(());
        }
        let target = ForwardTarget::new(vm.open.id, vm.open.row, held.guest_port);
        port.key()
            .insert(self.datapath.maps(), &target)
            .with_context(|| format!("forwarding port {}", port.port))
    }

    /// The sockets of all forwards.
    pub(crate) fn held_sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let held = self.forwards.held.values();
        held.filter_map(|held| Some(held.socket.as_ref()?.as_fd()))
    }

    /// All forwards of a worker's VMs, in the form in which its engine gets them.
    pub(crate) fn forward_sockets(&self, worker: usize) -> Vec<ForwardSocket<BorrowedFd<'_>>> {
        let vms = self.vms.iter().filter(|vm| vm.worker == worker);
        let by_name: BTreeMap<_, _> = vms.map(|vm| (&*vm.config.name, &vm.open)).collect();
        let all = self.forwards.held.iter();
        all.filter_map(|(port, held)| {
            let open = by_name.get(held.vm.as_str())?;
            let socket = held.socket.as_ref().map(OwnedFd::as_fd);
            Some(self.forward_socket(*port, held, socket, open))
        })
        .collect()
    }

    fn forward_socket<F>(
        &self,
        port: HostPort,
        held: &HeldForward,
        socket: Option<F>,
        open: &OpenVm,
    ) -> ForwardSocket<F> {
        let at = forward_texts(&self.config).position(|text| text == held.rule);
        let at = at.map_or(0, |at| at as u32);
        ForwardSocket {
            socket,
            vm: open.id,
            vm_row: open.row,
            protocol: port.protocol,
            host: port.address(),
            guest_port: held.guest_port,
            rule: RuleIndex::new(self.policies.forwards().start + at),
        }
    }
}

impl HeldForward {
    fn of_vm(vm: &str, forward: &Forward, socket: Option<OwnedFd>) -> Self {
        Self {
            vm: vm.to_owned(),
            guest_port: forward.guest_port,
            rule: OF_ITS_VM.to_owned(),
            socket,
        }
    }
}

/// Returns the rules of the forwards.
pub(crate) fn forwards_described(config: &Config) -> Vec<Described> {
    forward_texts(config).map(Described::forward).collect()
}

/// Returns one text per flag, whatever the length of its port range, or the one of a daemon's VMs.
pub(crate) fn forward_texts(config: &Config) -> impl Iterator<Item = String> {
    let mut texts: Vec<String> = config.forwards.iter().map(forward_text).collect();
    texts.dedup();
    let of_vms = config.is_daemon.then(|| OF_ITS_VM.to_owned());
    texts.into_iter().chain(of_vms)
}

/// Text of the rule that a forward's flows show.
pub(crate) fn forward_text(forward: &Forward) -> String {
    format!("--forward {}", forward.spec)
}
