//! The kernel's tables as the engine sees them.
//!
//! The real ones are map descriptors and mapped arrays; `crate::fake` has them in memory.
use slipgate_abi::{
    FlowRef, Ip4, NameKey, NameValue, NextHopRef, SequencesRef, SlotRef, Tuple, VmRef,
    rate::RateRef,
};
use thiserror::Error;

use crate::stats::VmStats;
use slipgate_policy::Described;

/// Why an entry was not inserted.
#[derive(Debug, Error)]
pub enum InsertError {
    /// The tuple is taken (`EEXIST`).
    #[error("the tuple is taken")]
    Exists,
    /// The map is full (`E2BIG`, `ENOMEM`).
    #[error("the flow map is full")]
    Full,
    /// Another error of the kernel's.
    #[error("insertion into the flow map failed")]
    Os(#[source] std::io::Error),
}

/// The map `FLOWS`.
pub trait FlowMap {
    /// Inserts with `BPF_NOEXIST`.
    fn insert_noexist(&mut self, tuple: &Tuple, flow: FlowRef) -> Result<(), InsertError>;
    /// Deletes; `false` when there was no such entry.
    fn remove(&mut self, tuple: &Tuple) -> std::io::Result<bool>;
    /// Looks up.
    fn get(&mut self, tuple: &Tuple) -> std::io::Result<Option<FlowRef>>;
    /// Calls `visit` with every entry; used at adoption only.
    fn for_each(&mut self, visit: &mut dyn FnMut(Tuple, FlowRef)) -> std::io::Result<()>;
}

/// What an element of `NEXT_HOPS` is claimed for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Hop {
    /// The uplink.
    pub ifindex: u32,
    /// Who is next there; unspecified where the link has no neighbours.
    pub neighbour: Ip4,
    /// Largest packet that the route there carries, bytes; 0: as large as the link's.
    pub route_mtu: u32,
}

/// The mapped arrays.
pub trait Tables {
    /// Our row in `OWNERS`.
    fn owner(&self) -> u32;
    /// What slots and generations are unique within: another number whenever the maps are made.
    fn instance(&self) -> u32;
    /// Our epoch in that row.
    fn epoch(&self) -> u32;
    /// The rows of `OWNERS` that other processes have, a bit each.
    fn other_owners(&self) -> u64;
    /// Elements of `SLOTS`.
    fn slots(&self) -> u32;
    /// A slot. `index` is below [`Tables::slots`], else the last one is returned.
    fn slot(&self, index: u32) -> SlotRef;
    /// Where a slot's connection stands in sequence space. `index` as for [`Tables::slot`].
    fn sequences(&self, index: u32) -> SequencesRef;
    /// Claims a free chunk of slots for our row, and says whether its slots have rested; `None` when
    /// all are taken, or those that are left are kept for other processes.
    fn claim_chunk(&mut self, now_ns: u64) -> Option<(std::ops::Range<u32>, bool)>;
    /// Gives back a chunk of ours, by its first slot. All its slots are free, and have rested.
    fn release_chunk(&mut self, first_slot: u32, now_ns: u64);
    /// The chunks that are our row's already (adoption).
    fn own_chunks(&self) -> Vec<std::ops::Range<u32>>;
    /// A VM's row.
    fn vm(&self, row: u16) -> Option<VmRef>;
    /// A VM's rows of `COUNTERS` and `DROPS`. Row 0 is nobody's.
    fn stats(&self, row: u16) -> VmStats;
    /// A VM's row of `RATES`.
    fn rates(&self, row: u16) -> Option<RateRef>;
    /// An element of `NEXT_HOPS`.
    fn next_hop(&self, index: u32) -> Option<NextHopRef>;
    /// The element for a next hop, claimed when there is none yet, whereupon the broker will keep it
    /// fresh. 0 ("let the kernel resolve") when there is none to be had.
    fn next_hop_for(&mut self, hop: Hop) -> u32;
    /// An element of `RULES`, its text cut short; `None` where there is none.
    fn rule(&self, rule: u32) -> Option<Described>;
    /// The elements of `NEXT_HOPS` that are our row's.
    fn own_next_hops(&self) -> Vec<u32>;
    /// Gives one of them back: no slot names it, nor does anything under way.
    fn release_next_hop(&mut self, index: u32);
}

/// An address that DNS opened to a VM by a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RememberedName {
    /// The VM's id.
    pub vm: u32,
    /// The address.
    pub addr: Ip4,
    /// The name in wire form, in lower case, at most 255 octets.
    pub name: Box<[u8]>,
    /// Until when, `CLOCK_MONOTONIC` ns.
    pub expires_ns: u64,
}

impl RememberedName {
    /// From an entry of the map.
    pub fn of(key: &NameKey, value: &NameValue) -> Self {
        Self {
            vm: key.vm,
            addr: key.addr,
            name: value.name().into(),
            expires_ns: value.expires_ns,
        }
    }
}

/// The map `NAMES`: what a successor is to know of DNS. A name that could not be remembered is not
/// opened any less; it is lost when the engine is.
pub trait NameMap {
    /// Inserts, or replaces the entry of this VM, address and name. Whether it is there now.
    fn remember_name(&mut self, name: &RememberedName) -> bool;
    /// Deletes the entry of this VM, address and name (in wire form, in lower case). Whether there
    /// was one.
    fn forget_name(&mut self, vm: u32, addr: Ip4, name: &[u8]) -> bool;
    /// What is remembered of the VMs that are our row's, expired or not; used at adoption.
    fn remembered_names(&self) -> Vec<RememberedName>;
}

/// All of them.
pub trait Datapath: FlowMap + Tables + NameMap {}

impl<T: FlowMap + Tables + NameMap> Datapath for T {}
