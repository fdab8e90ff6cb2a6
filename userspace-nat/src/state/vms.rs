//! The VMs that the engine serves.
use std::collections::{HashMap, VecDeque};

use slipgate_abi::{VmId, VmRow};
use slipgate_model::Labels;

use super::credits;
use crate::{
    quota::{self, TokenBucket, WorldsRate},
    record::VmText,
    reply::Answers,
    vm::{VmNet, VmSpec},
};

/// Router advertisements that a guest gets by asking, per second, and at once: a guest asks three
/// times at its start (RFC 4861 section 10).
const ADVERTISEMENTS_PER_SECOND: u32 = 2;
const ADVERTISEMENTS_AT_ONCE: u32 = 10;
/// Most removed VMs whose names are kept.
const MOST_DEPARTED: usize = 4_096;

/// State that the engine keeps of a VM.
#[derive(Clone, Debug)]
pub(crate) struct VmState {
    pub(crate) net: VmNet,
    pub(crate) new_flows: TokenBucket,
    /// Part of the rate of new flows that the world may use.
    pub(crate) from_world: WorldsRate,
    pub(crate) answers: Answers,
    /// Router advertisements that the guest may ask for.
    pub(crate) advertisements: TokenBucket,
    /// Answers about flows that are cut, and those for which `answers` has no allowance.
    pub(crate) cut_answers: Answers,
    /// Whether the engine carries the VM's new flows, for a capture.
    pub(crate) is_captured: bool,
    pub(crate) collect_after_ns: [u64; 2],
    /// Connections to, and exchanges with, the host's loopback, as of the VM's last packet.
    pub(crate) loopback_flows: u32,
    /// Credits of the guest's frames, and of the world's.
    pub(super) credits: [credits::Snapshot; 2],
}

impl VmState {
    fn new(net: VmNet) -> Self {
        let (new_flows, from_world) = rates(&net);
        Self {
            new_flows,
            from_world,
            net,
            answers: Answers::new(),
            advertisements: TokenBucket::new(ADVERTISEMENTS_PER_SECOND, ADVERTISEMENTS_AT_ONCE),
            cut_answers: Answers::about_cuts(),
            is_captured: false,
            collect_after_ns: [0; 2],
            loopback_flows: 0,
            credits: Default::default(),
        }
    }
}

/// Returns the rate limit of all new flows, and that of flows that the world opens. A burst of one
/// second's worth is allowed: a browser's or a build's burst is no attack.
fn rates(net: &VmNet) -> (TokenBucket, WorldsRate) {
    let all = net.new_flows_per_second;
    let world = quota::worlds_share(all);
    (TokenBucket::new(all, all), WorldsRate::new(world))
}

/// The VMs, by row and by id, and the names of recently removed VMs.
#[derive(Debug)]
pub(crate) struct VmTable {
    vms: Vec<Option<Box<VmState>>>,
    rows: HashMap<VmId, VmRow>,
    /// Names and labels of VMs that went lately, for the records of their last flows.
    departed: VecDeque<(VmId, String, Labels)>,
    pub(super) all_credits: credits::AllCredits,
}

impl VmTable {
    /// `most`: number of VMs that there may be.
    pub(super) fn new(most: u32) -> Self {
        Self {
            vms: (0..=most).map(|_| None).collect(),
            rows: HashMap::new(),
            departed: VecDeque::new(),
            all_credits: credits::AllCredits::new(),
        }
    }

    /// Takes out a VM's state while a packet is handled; [`VmTable::put`] returns it. `None` when
    /// the row does not belong to that VM (any more).
    pub(crate) fn take(&mut self, row: VmRow, id: VmId) -> Option<Box<VmState>> {
        self.vms
            .get_mut(usize::from(row.get()))?
            .take_if(|vm| vm.net.id == id)
    }

    /// The same by id.
    pub(crate) fn take_by_id(&mut self, id: VmId) -> Option<Box<VmState>> {
        let row = *self.rows.get(&id)?;
        self.take(row, id)
    }

    pub(crate) fn put(&mut self, vm: Box<VmState>) {
        let row = usize::from(vm.net.row.get());
        self.vms[row] = Some(vm);
    }

    /// Returns a VM by its row.
    pub(crate) fn get(&self, row: VmRow) -> Option<&VmState> {
        self.vms.get(usize::from(row.get()))?.as_deref()
    }

    pub(crate) fn get_mut(&mut self, row: VmRow) -> Option<&mut VmState> {
        self.vms.get_mut(usize::from(row.get()))?.as_deref_mut()
    }

    /// Returns a VM by its id.
    pub(crate) fn by_id(&self, id: VmId) -> Option<&VmState> {
        self.get(*self.rows.get(&id)?)
    }

    /// Returns the id of the VM in a row.
    pub(crate) fn id_of(&self, row: VmRow) -> Option<VmId> {
        self.get(row).map(|vm| vm.net.id)
    }

    /// Sets whether the engine, instead of the kernel, carries the flows that a VM opens from now
    /// on.
    pub(crate) fn capture_new_flows(&mut self, row: VmRow, captured: bool) {
        if let Some(vm) = self.get_mut(row) {
            vm.is_captured = captured;
        }
    }

    /// Returns the number of rows, whether they have a VM or not.
    pub(super) fn row_count(&self) -> usize {
        self.vms.len()
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Adds a VM, or replaces the description of the one with the same id and keeps the state of
    /// its rate limits. Returns `false` when there is no such row.
    pub(super) fn set(&mut self, net: VmNet) -> bool {
        let Some(place) = self.vms.get_mut(usize::from(net.row.get())) else {
            return false;
        };
        self.rows.insert(net.id, net.row);
        match place {
            Some(vm) if vm.net.id == net.id => {
                if vm.net.new_flows_per_second != net.new_flows_per_second {
                    (vm.new_flows, vm.from_world) = rates(&net);
                }
                vm.net = net;
            }
            _ => *place = Some(Box::new(VmState::new(net))),
        }
        true
    }

    /// Removes a VM. Returns whether it was in that row.
    pub(super) fn remove(&mut self, row: VmRow, id: VmId) -> bool {
        self.rows.remove(&id);
        let Some(vm) = self.take(row, id) else {
            return false;
        };
        if self.departed.len() >= MOST_DEPARTED {
            self.departed.pop_front();
        }
        let VmSpec { name, labels, .. } = &*vm.net;
        self.departed.push_back((id, name.clone(), labels.clone()));
        true
    }

    /// Returns a VM's name, also for a while after its removal; empty when it is not known.
    pub(crate) fn name_of(&self, id: VmId) -> &str {
        self.text_of(id).name
    }

    /// Returns what records show of a VM, also for a while after its removal.
    pub(crate) fn text_of(&self, id: VmId) -> VmText<'_> {
        let departed = || self.departed.iter().find(|(departed, ..)| *departed == id);
        let known = self.by_id(id).map(|vm| (&vm.net.name, &vm.net.labels));
        let known = known.or_else(|| departed().map(|(_, name, labels)| (name, labels)));
        known.map_or_else(VmText::default, |(name, labels)| VmText {
            name,
            labels: (!labels.is_empty()).then_some(labels),
        })
    }
}
