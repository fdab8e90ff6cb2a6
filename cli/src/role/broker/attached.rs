//! Everything the broker has in the kernel: made in order at the start, taken down in order at the
//! end, followed in between.
use std::{
    collections::BTreeSet,
    fs::File,
    net::TcpListener,
    ops::Range,
    os::fd::{AsFd as _, OwnedFd},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use slipgate_abi::{ForwardKey, ForwardTarget, forward::DenyKey, maps::MAX_OWNERS};
use slipgate_control::{
    Datapath, Error, LoadOptions, Owner, Paths, Users,
    attach::{self, Hook, Program},
    device::Device,
    maps::{DenyPrefix, Insert},
    netlink::{Network, NetworkWatch, NextHops},
    owner, probe, serve,
    tap::{EnginePort, QUEUE_FRAMES},
    vm::{self, OpenVm},
};
use slipgate_policy::{Described, PolicySet};
use userspace_nat::vm::VmSpec;

use super::{
    inputs::{Inputs, open_flow_log, open_pcap},
    network_view, reserve,
    resolvers::HostResolvers,
    rule_texts, survival,
    uplink::{self, Uplink},
    xdp,
};
use crate::{
    channel::{NetworkView, ToEngine},
    config::{Config, Said, VmConfig},
    show,
};
use slipgate_policy::document::{ConfigError, Forward, LoadedPolicies};
use slipgate_policy::one_line;

/// The gateway's MAC in every guest's network, locally administered: a clone or a restored
/// snapshot finds the one it knew.
const GATEWAY_MAC: [u8; 6] = [0x02, 0x53, 0x4c, 0x47, 0x00, 0x01];
/// Frames of one guest that may be on their way to the engine at once, at most, and as many that the
/// world sends it: room for a burst of first packets, and what another VM's first packet may have to
/// wait behind, at a few microseconds each.
const MOST_CREDITS: u32 = 512;

/// The bit of a policy's number that tells whose turn it is.
const TURN_BIT: u32 = 31;
/// Bits of a policy's number that tell its owner's row, from 1: the rest tells which of the owner's.
const OWNER_BITS: u32 = 16;
const _: () = assert!(MAX_OWNERS < 1 << OWNER_BITS);

/// A VM that is served.
#[derive(Debug)]
pub(super) struct ServedVm {
    pub(super) config: VmConfig,
    pub(super) open: OpenVm,
    /// Its TAP; `None` while there is none of that name.
    pub(super) tap_ifindex: Option<u32>,
    pub(super) mtu: u32,
}

/// What is in place.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) config: Config,
    pub(super) datapath: Datapath,
    pub(super) owner: Owner,
    pub(super) port: EnginePort,
    pub(super) vms: Vec<ServedVm>,
    pub(super) watch: NetworkWatch,
    pub(super) next_hops: NextHops,
    pub(super) loaded: LoadedPolicies,
    /// These, and those of VMs that learn.
    pub(super) in_force: LoadedPolicies,
    pub(super) policies: PolicySet,
    /// The forwards' host ports, in order: they stay ours while an engine is started again.
    pub(super) forward_sockets: Vec<OwnedFd>,
    pub(super) flow_log: Option<File>,
    pub(super) pcap: Option<File>,
    /// The socket of `--metrics`, until it is served.
    pub(super) metrics: Option<TcpListener>,
    /// Whom our processes are.
    pub(super) users: Users,
    pub(super) rule_base: u32,
    /// What the command line said of policies.
    pub(super) command_line: Said,
    /// What a predecessor applied is in force.
    took_over: bool,
    /// Runs of `RULES` that were ours, this one's too.
    pub(super) former_rules: Vec<Range<u32>>,
    /// The forwards' of the first of these: relays name them as long as they run.
    pub(super) relayed_rules: Range<u32>,
    /// TAPs that a predecessor served, until those of them that are not ours are shut.
    former_taps: BTreeSet<u32>,
    /// Which of two sets of numbers the guard's list has.
    pub(super) turn: bool,
    /// The host's.
    pub(super) resolvers: HostResolvers,
    pub(super) uplink: Uplink,
    pub(super) hook: Hook,
    /// It was said that somebody else holds the lock.
    told_of_lock: bool,
}

impl Attached {
    /// Loads or joins, takes an owner's row, makes the port, opens the VMs' rows, attaches to the
    /// port and the uplink. TAPs are not served yet: that waits for the engine.
    pub(super) fn new(mut config: Config, inputs: Inputs) -> anyhow::Result<Self> {
        let Inputs {
            mut loaded,
            mut policies,
            flow_log,
            pcap,
            metrics,
            users,
        } = inputs;
        let watch = NetworkWatch::open()?;
        for vm in &config.vms {
            tap_of(vm, watch.network())?;
        }
        let uplink = uplink::find(&config, watch.network())?;
        uplink::check_source(&config, &uplink, watch.network())?;
        let paths: Paths = show::paths(&config.pin_dir)?;
        let datapath = Datapath::open(&LoadOptions {
            paths: paths.clone(),
            slots: config.flow_table,
            bpf_log: config.bpf_log,
        })
        .context("loading the programs")?;
        if datapath.joined() && datapath.maps().slots() != config.flow_table {
            tracing::warn!(
                "--flow-table {} has no effect: the maps are there already, with {} slots",
                config.flow_table,
                datapath.maps().slots()
            );
        }
        let hook = probe::best_hook();
        let names: Vec<&str> = config.vms.iter().map(|vm| vm.name.as_str()).collect();
        let owner = Owner::take(datapath.maps(), &paths, &names)?;
        if config.new_vms {
            // Their flows are ended by the engine.
            for row in vm::rows_of(datapath.maps(), owner.row()) {
                vm::retire(datapath.maps(), row);
            }
        }
        let swept = owner::sweep(datapath.maps(), &paths, &owner, owner::PATIENCE)?;
        tracing::debug!(
            ?swept,
            row = owner.row(),
            adopted = owner.adopted(),
            "took a row"
        );
        let command_line = config.said_of_policies();
        let kept = survival::path(&paths.run_dir, owner.row());
        let mut took_over = false;
        if owner.adopted()
            && !config.new_vms
            && let Some(all) = survival::take_over(&kept, &config)?
        {
            (config, loaded, policies) = all;
            took_over = true;
        }
        let run_dirs = slipgate_control::pins::sweep_run_dirs();
        tracing::debug!("removed {run_dirs} directories of locks that dead processes left");
        let rules = described(&policies, &config);
        // Before anything is made that a failure would have to take down.
        let taps = owner.noted_taps(&paths).map_err(anyhow::Error::from);
        let made = taps.and_then(|taps| Ok((taps, Made::new(&datapath, &owner, &rules)?)));
        let (former_taps, made) = match made {
            Ok(made) => made,
            Err(e) => {
                if !owner.adopted() {
                    warn_of_rest(datapath.remove_if_last(owner).map_err(Into::into));
                }
                return Err(e);
            }
        };
        let Made {
            port,
            next_hops,
            rule_base,
        } = made;
        let run = rule_base..rule_base + rules.len() as u32;
        let mut attached = Self {
            next_hops,
            former_taps,
            vms: Vec::new(),
            datapath,
            owner,
            port,
            watch,
            in_force: loaded.clone(),
            loaded,
            policies,
            forward_sockets: Vec::new(),
            flow_log,
            pcap,
            metrics,
            users,
            rule_base,
            command_line,
            took_over,
            relayed_rules: run.end - forward_texts(&config).count() as u32..run.end,
            former_rules: vec![run],
            turn: false,
            resolvers: HostResolvers::find(),
            uplink,
            hook,
            told_of_lock: false,
            config,
        };
        match attached.begin() {
            Ok(()) => Ok(attached),
            Err(e) => {
                attached.give_up();
                Err(e)
            }
        }
    }

    fn begin(&mut self) -> anyhow::Result<()> {
        self.port.serve(&self.datapath, self.hook)?;
        self.open_vms()?;
        self.note_taps()?;
        self.set_rates();
        self.write_denied()?;
        self.attach_uplink()?;
        self.refresh_next_hops()?;
        let local = self.network_view().local;
        self.policies.set_local(&local);
        Ok(())
    }

    fn open_vms(&mut self) -> anyhow::Result<()> {
        for config in self.config.vms.clone() {
            let tap = tap_of(&config, self.watch.network())?;
            let what = || format!("opening the row of {}", config.name);
            let device = Device::with_index(tap).with_context(what)?;
            // One that its VMM has brought up already would lead to the host's own stack.
            if !self.is_served(tap).with_context(what)? {
                device.set_up(false).with_context(what)?;
            }
            if let Some(mtu) = self.config.network.mtu {
                device.set_mtu(mtu).with_context(what)?;
            }
            let mtu = device.mtu().with_context(what)?;
            let spec = vm::VmSpec {
                name: config.name.clone(),
                guest: config.ip,
                gateway: self.config.network.gateway,
                prefix_len: self.config.network.prefix_len,
                guest_mac: config.mac,
                gateway_mac: GATEWAY_MAC,
                mtu,
                credits: credits_of(self.config.vms.len()),
                policy: self.policy_number(config.policy),
                tap_ifindex: tap,
                port_ifindex: self.port.ifindex,
            };
            let open = vm::open(self.datapath.maps(), &self.owner, &spec).with_context(what)?;
            self.vms.push(ServedVm {
                config,
                open,
                tap_ifindex: Some(tap),
                mtu,
            });
        }
        Ok(())
    }

    /// Whether a device is a TAP that has a guest's program, whoever put it there.
    fn is_served(&self, ifindex: u32) -> slipgate_control::Result<bool> {
        let attached = self.datapath.attached()?;
        let is_it =
            |a: &attach::Attached| a.program == Program::GuestEgress && a.ifindex == ifindex;
        Ok(attached.iter().any(is_it))
    }

    /// The number under which the guard finds what one of our policies denies. Policies that are put
    /// in force one after the other take turns, so that their lists are apart.
    pub(super) fn policy_number(&self, policy: u32) -> u32 {
        let turn = u32::from(self.turn) << TURN_BIT;
        turn | policy << OWNER_BITS | (self.owner.row() + 1)
    }

    fn is_our_number(&self, number: u32) -> bool {
        number & ((1 << OWNER_BITS) - 1) == self.owner.row() + 1
    }

    /// What the guard may drop on its own, of each policy that a VM has.
    fn write_denied(&self) -> anyhow::Result<()> {
        let deny = &self.datapath.maps().deny;
        let number = |prefix: &DenyPrefix| u32::from_be_bytes(prefix.key.policy);
        deny.remove_if(|prefix, _| self.is_our_number(number(prefix)))?;
        self.add_denied();
        Ok(())
    }

    /// The numbers of policies that VMs have now.
    pub(super) fn denied_numbers(&self) -> BTreeSet<u32> {
        let vms = self.vms.iter();
        vms.map(|vm| self.policy_number(vm.config.policy)).collect()
    }

    /// Removes what was denied under these numbers.
    pub(super) fn forget_denied(&self, numbers: &BTreeSet<u32>) {
        let deny = &self.datapath.maps().deny;
        let removed =
            deny.remove_if(|prefix, _| numbers.contains(&u32::from_be_bytes(prefix.key.policy)));
        // No row names these numbers any more: what stays takes room, and denies nothing.
        if let Err(e) = removed {
            tracing::warn!("removing what the policy before denied from the guard's list: {e}");
        }
    }

    /// Removes what an earlier turn of the numbers that are not in force may have left: they are
    /// about to be used again.
    pub(super) fn clear_other_turn(&self) -> anyhow::Result<()> {
        let other = u32::from(!self.turn);
        let is_other = |number: u32| self.is_our_number(number) && number >> TURN_BIT == other;
        let deny = &self.datapath.maps().deny;
        deny.remove_if(|prefix, _| is_other(u32::from_be_bytes(prefix.key.policy)))
            .context("removing what an earlier policy denied from the guard's list")?;
        Ok(())
    }

    /// Adds what the policies deny to the guard's list.
    pub(super) fn add_denied(&self) {
        let deny = &self.datapath.maps().deny;
        let used: BTreeSet<u32> = self.vms.iter().map(|vm| vm.config.policy).collect();
        let all = used.into_iter().flat_map(|index| {
            let denied = self.policies.of(Some(index)).deny_prefixes();
            denied.into_iter().map(move |denied| (index, denied))
        });
        for (index, (prefix, rule)) in all {
            let key = DenyPrefix {
                prefix_len: 32 + u32::from(prefix.prefix_len()),
                key: DenyKey {
                    policy: self.policy_number(index).to_be_bytes(),
                    remote: prefix.addr().into(),
                },
            };
            // Without room the engine refuses what the guard then lets through.
            if deny
                .insert(&key, &(self.rule_base + rule.0), Insert::Any)
                .is_err()
            {
                tracing::warn!("the deny-list for XDP is full; the engine refuses the rest");
                break;
            }
        }
    }

    /// Takes the forwards' ports of the host.
    pub(super) fn reserve_forwards(&mut self) -> anyhow::Result<()> {
        let forwards = self.config.forwards.iter();
        self.forward_sockets = forwards.map(reserve::reserve).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Goes on with other files of the flow log's and the pcap's names: the old ones were moved
    /// away. What an engine that serves is to be told, with a descriptor each.
    pub(super) fn reopen_files(&mut self) -> anyhow::Result<Vec<(ToEngine, OwnedFd)>> {
        let mut told = Vec::new();
        if let Some(path) = &self.config.flow_log {
            let file = open_flow_log(path)?;
            told.push((ToEngine::FlowLog, file.as_fd().try_clone_to_owned()?));
            self.flow_log = Some(file);
        }
        if let Some(path) = &self.config.pcap {
            let file = open_pcap(path)?;
            told.push((ToEngine::Pcap, file.as_fd().try_clone_to_owned()?));
            self.pcap = Some(file);
        }
        Ok(told)
    }

    /// Before another engine in the place of one that ended: removes what that was in the middle of.
    /// `patience`: how long it waits for other processes that start.
    pub(super) fn clean_after_engine(&mut self, patience: Duration) -> Result<(), Error> {
        let (maps, paths) = (self.datapath.maps(), self.datapath.paths());
        let swept = owner::sweep(maps, paths, &self.owner, patience)?;
        tracing::debug!(?swept, "an engine has ended");
        // The relays of before, which knew other elements, are gone.
        let forwards = forward_texts(&self.config).count() as u32;
        let texts = self.policies.texts().count() as u32;
        let begin = self.rule_base + texts;
        self.relayed_rules = begin..begin + forwards;
        Ok(())
    }

    /// Leads the world's first packets on forwarded ports to the engine. Their sockets are bound by
    /// now: nobody else's port is taken. A forward of loopback is the host's alone, which comes by its
    /// socket: whoever is on the uplink's link could send to that address too.
    pub(super) fn write_forwards(&self) -> anyhow::Result<()> {
        let forwards = &self.datapath.maps().forwards;
        let ours = |target: &ForwardTarget| self.vms.iter().any(|vm| vm.open.id == target.vm);
        forwards.remove_if(|_, target| ours(target))?;
        let from_links = |forward: &&Forward| !forward.host.is_loopback();
        for forward in self.config.forwards.iter().filter(from_links) {
            let vm = &self.vms[forward.vm].open;
            let key = ForwardKey {
                host: forward.host.into(),
                port: forward.host_port,
                protocol: forward.protocol,
                pad: 0,
            };
            let target = ForwardTarget {
                vm: vm.id,
                vm_row: vm.row,
                guest_port: forward.guest_port,
                pad: [0; 6],
            };
            forwards
                .insert(&key, &target, Insert::Any)
                .with_context(|| format!("forwarding port {}", forward.host_port))?;
        }
        Ok(())
    }

    /// The element of `RULES` that a forward's flows show.
    pub(super) fn forward_rule(&self, forward: &Forward) -> u32 {
        let forwards = self.rule_base + self.policies.texts().count() as u32;
        let at = forward_texts(&self.config).position(|text| text == forward_text(forward));
        forwards + at.map_or(0, |at| at as u32)
    }

    pub(super) fn attach_uplink(&self) -> anyhow::Result<()> {
        let Uplink {
            name,
            ifindex,
            has_l2,
        } = &self.uplink;
        if self.is_served(*ifindex)? {
            bail!(
                "--uplink {name}: it is the TAP of a guest that slipgate serves; give the device that \
                 leads to the world"
            );
        }
        self.datapath
            .attach(Program::uplink(*has_l2), *ifindex, self.hook)
            .with_context(|| format!("attaching to the uplink {name}"))
    }

    /// Attaches to a VM's TAP and brings it up.
    pub(super) fn serve_tap(&self, index: usize) -> anyhow::Result<()> {
        let vm = &self.vms[index];
        let Some(ifindex) = vm.tap_ifindex else {
            return Ok(());
        };
        let what = || format!("serving {} on {}", vm.config.name, vm.config.tap);
        xdp::guard(&self.datapath, &self.config, &vm.config.tap, ifindex).with_context(what)?;
        serve::serve_tap(&self.datapath, ifindex, self.hook).with_context(what)
    }

    /// Writes down which TAPs are ours, and until they are shut a predecessor's: what the VMs' rows
    /// say of them is the engine's word.
    pub(super) fn note_taps(&self) -> anyhow::Result<()> {
        let ours = self.vms.iter().filter_map(|vm| vm.tap_ifindex);
        let taps = ours.chain(self.former_taps.iter().copied()).collect();
        Ok(self.owner.note_taps(self.datapath.paths(), &taps)?)
    }

    /// Shuts out VMs of a predecessor that are not to be served any more. The engine has ended
    /// their flows.
    pub(super) fn close_departed(&mut self) -> anyhow::Result<()> {
        self.shut_departed()?;
        let maps = self.datapath.maps();
        let departed: Vec<u32> = vm::rows_of(maps, self.owner.row())
            .filter(|row| self.vms.iter().all(|vm| vm.open.row != *row))
            .collect();
        for row in departed {
            let name = one_line(&vm::name_of(maps, row).unwrap_or_default());
            let what = || format!("closing the row of {name}, which is not served any more");
            vm::close(maps, row).with_context(what)?;
            match self.config.new_vms {
                // Of the name that is ours now.
                true => tracing::info!("ended what an earlier VM of this name had left"),
                false => tracing::info!("{name} is not served any more: its TAP is shut"),
            }
        }
        Ok(())
    }

    /// Takes down the TAPs that only a predecessor served.
    fn shut_departed(&mut self) -> anyhow::Result<()> {
        for tap in std::mem::take(&mut self.former_taps) {
            let is_ours = self.vms.iter().any(|vm| vm.tap_ifindex == Some(tap));
            // An index that came again is another device, without our program.
            if is_ours || !self.is_served(tap)? {
                continue;
            }
            let what =
                || format!("shutting the TAP with index {tap}, which is not served any more");
            serve::shut_tap(&self.datapath, tap).with_context(what)?;
            self.datapath
                .detach(Program::Guard, tap)
                .with_context(what)?;
        }
        self.note_taps()?;
        let paths = self.datapath.paths();
        Ok(self.owner.forget_merged_taps(paths)?)
    }

    pub(super) fn serve_taps(&self) -> anyhow::Result<()> {
        (0..self.vms.len()).try_for_each(|index| self.serve_tap(index))
    }

    /// Has the host route nothing of the TAPs and the port: `sysctl net.ipv4.ip_forward=1` turns it
    /// on for every device.
    pub(super) fn keep_unrouted(&self) {
        let taps = self.vms.iter().filter_map(|vm| vm.tap_ifindex);
        for ifindex in taps.chain([self.port.ifindex]) {
            let kept = Device::with_index(ifindex).and_then(|device| device.set_forwarding(false));
            if let Err(e) = kept {
                // One that is gone: a notice is on its way.
                tracing::debug!("{e}");
            }
        }
    }

    pub(super) fn refresh_next_hops(&mut self) -> anyhow::Result<()> {
        let uplink = self.uplink.ifindex;
        self.next_hops
            .refresh(self.datapath.maps(), self.watch.network(), uplink)?;
        Ok(())
    }

    /// Has each VM have no more than its quotas say.
    pub(super) fn set_rates(&self) {
        for vm in &self.vms {
            let rates = vm.config.limits.rates;
            let rates = rates.is_limited().then_some(rates);
            self.datapath.maps().set_rates(vm.open.row, rates);
        }
    }

    /// What the engine is told of all VMs.
    pub(super) fn vm_specs(&self) -> Vec<VmSpec> {
        self.vms.iter().map(|vm| self.vm_spec(vm)).collect()
    }

    /// What the engine is told of a VM.
    pub(super) fn vm_spec(&self, vm: &ServedVm) -> VmSpec {
        let network = &self.config.network;
        VmSpec {
            id: vm.open.id,
            row: vm.open.row as u16,
            name: vm.config.name.clone(),
            guest: vm.config.ip,
            gateway: network.gateway,
            dns: network.dns,
            prefix_len: network.prefix_len,
            guest_mac: vm.config.mac,
            gateway_mac: GATEWAY_MAC,
            mtu: u16::try_from(vm.mtu).unwrap_or(u16::MAX),
            max_flows: vm.config.limits.max_flows,
            new_flows_per_second: vm.config.limits.new_flows_per_second,
            policy: vm.config.policy,
            dns_per_second: vm.config.limits.dns_per_second,
        }
    }

    /// What the engine is told of the network.
    pub(super) fn network_view(&self) -> NetworkView {
        network_view::view(
            self.watch.network(),
            self.uplink.ifindex,
            self.config.nat_address,
            &self.config.network,
        )
    }

    /// Takes down what a start that failed has made. What a predecessor left stays: its flows go on.
    pub(super) fn give_up(self) {
        if self.owner.adopted() {
            return;
        }
        warn_of_rest(self.detach());
    }

    /// Puts the guard on TAPs whose VMM has turned segmentation off since, or takes it off.
    pub(super) fn look_at_guards(&mut self) {
        let mut locked = None;
        for vm in &self.vms {
            let Some(ifindex) = vm.tap_ifindex else {
                continue;
            };
            match xdp::guard(&self.datapath, &self.config, &vm.config.tap, ifindex) {
                Ok(()) => {}
                // The others would wait for it too.
                Err(e) if e.is_locked() => {
                    locked = Some(e);
                    break;
                }
                Err(e) => tracing::debug!("the guard of {}: {e}", vm.config.tap),
            }
        }
        if let (Some(e), false) = (&locked, self.told_of_lock) {
            tracing::warn!("what TAPs need is looked at later: {e}");
        }
        self.told_of_lock = locked.is_some();
    }

    /// Whether a TAP is there that is to be served and is not.
    pub(super) fn lacks_a_tap(&self) -> bool {
        let network = self.watch.network();
        let is_there = |name: &str| network.link_by_name(name).is_some();
        let mut vms = self.vms.iter();
        vms.any(|vm| vm.tap_ifindex.is_none() && is_there(&vm.config.tap))
    }

    /// Keeps what is in force for a successor.
    pub(super) fn keep_applied(&self) {
        let path = survival::path(&self.datapath.paths().run_dir, self.owner.row());
        let kept = survival::keep(&path, &self.command_line, &self.config, &self.loaded);
        if let Err(e) = kept {
            tracing::warn!("a successor would go on with the command line's policy: {e:#}");
        }
    }

    /// VMs are served: what a predecessor applied, and this one did not take over, is of no use.
    pub(super) fn forget_former(&self) {
        if !self.took_over {
            self.forget_applied();
        }
    }

    fn forget_applied(&self) {
        let path = survival::path(&self.datapath.paths().run_dir, self.owner.row());
        if let Err(e) = survival::forget(&path) {
            tracing::warn!("{e:#}");
        }
    }

    /// Takes everything down: the engine has ended the flows by now. Whether the maps went too.
    pub(super) fn detach(self) -> anyhow::Result<bool> {
        let mut first_error = Ok(());
        let mut note = |done: slipgate_control::Result<()>| {
            if let (Ok(()), Err(e)) = (&first_error, done) {
                first_error = Err(anyhow!(e));
            }
        };
        for vm in &self.vms {
            if let Some(ifindex) = vm.tap_ifindex {
                note(serve::shut_tap(&self.datapath, ifindex));
                note(self.datapath.detach(Program::Guard, ifindex).map(drop));
            }
            note(vm::close(self.datapath.maps(), vm.open.row));
        }
        self.forget_applied();
        note(self.owner.forget_taps(self.datapath.paths()));
        let (row, port) = (self.owner.row(), self.port.ifindex);
        note(self.datapath.detach(Program::EnginePort, port).map(drop));
        drop(self.port);
        note(EnginePort::remove(row).map(drop));
        note(self.next_hops.release());
        let last = self.datapath.remove_if_last(self.owner);
        first_error?;
        Ok(last?)
    }
}

/// What a process makes for itself, whomever it serves.
struct Made {
    port: EnginePort,
    next_hops: NextHops,
    rule_base: u32,
}

impl Made {
    fn new(datapath: &Datapath, owner: &Owner, rules: &[Described]) -> anyhow::Result<Self> {
        datapath.remove_defunct()?;
        let port = EnginePort::open(owner.row()).context("making the engine port")?;
        owner.set_port(datapath.maps(), port.ifindex);
        let writer = rule_texts::Writer {
            paths: datapath.paths(),
            row: owner.row(),
            own: &[],
            kept: &[],
        };
        Ok(Self {
            rule_base: rule_texts::write(datapath.maps(), rules, writer)?,
            next_hops: NextHops::new(owner.row())?,
            port,
        })
    }
}

/// A start that failed says why it did; what of it stays is said besides.
fn warn_of_rest(taken_down: anyhow::Result<bool>) {
    if let Err(e) = taken_down {
        tracing::warn!("taking down what the start had made: {e:#}");
    }
}

/// How many frames each of several VMs may have on their way, and as many from the world: all together
/// no more than the port queues, so that no VM's flood costs another one's frame.
fn credits_of(vms: usize) -> u32 {
    let share = QUEUE_FRAMES / 2 / u32::try_from(vms.max(1)).unwrap_or(u32::MAX);
    share.clamp(1, MOST_CREDITS)
}

/// The policies' rules, and behind them the forwards.
pub(super) fn described(policies: &PolicySet, config: &Config) -> Vec<Described> {
    let forwards = forward_texts(config).map(Described::forward);
    policies.described().chain(forwards).collect()
}

/// One text per flag, whatever its range.
pub(super) fn forward_texts(config: &Config) -> impl Iterator<Item = String> {
    let mut texts: Vec<String> = config.forwards.iter().map(forward_text).collect();
    texts.dedup();
    texts.into_iter()
}

fn forward_text(forward: &Forward) -> String {
    format!("--forward {}", forward.spec)
}

/// The TAP that is to be served: a device of the tun driver with Ethernet frames. Another one's users
/// would not expect to have it taken down and put behind our programs.
fn tap_of(vm: &VmConfig, network: &Network) -> Result<u32, ConfigError> {
    let refused =
        |problem: String, remedy: String| Err(ConfigError::new("--tap", &vm.tap, problem, remedy));
    let Some(link) = network.link_by_name(&vm.tap) else {
        return refused(
            format!("the TAP of {} is not there", vm.name),
            format!(
                "start its VMM first, or make it with `ip tuntap add {} mode tap`",
                vm.tap
            ),
        );
    };
    let is = match link.kind.as_deref() {
        Some("tun") if link.has_l2 => return Ok(link.ifindex),
        Some("tun") => "a TUN device, without Ethernet frames",
        Some(kind) => &format!("a {kind} device"),
        None if link.loopback => "the loopback device",
        None => "no virtual device",
    };
    refused(
        format!("it is {is}, not a TAP"),
        "give the one that the VMM has open, as `ip tuntap` shows it".into(),
    )
}
