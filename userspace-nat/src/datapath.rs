//! The kernel's tables as the engine sees them.
//!
//! In a running engine they are map descriptors and mapped arrays; `crate::fake` has them in
//! memory.
use std::net::IpAddr;

use slipgate_abi::{
    Addresses6Ref, EarlyFragmentRef, EarlyTagRef, FirstPacketRef, FlowRef, ForwardKey, ForwardKey6,
    ForwardTarget, NameKey, NameValue, NextHopRef, OwnerRef, Protocol, RuleIndex, SequencesRef,
    SlotIndex, SlotRef, Vm6Ref, VmId, VmRef, VmRow, rate::RateRef,
};
pub use slipgate_model::route::Hop;
use slipgate_model::{FlowAddresses, FlowTuple};
use thiserror::Error;

use crate::stats::VmStats;
use slipgate_policy::Described;

/// Reason why an entry was not inserted.
#[derive(Debug, Error)]
pub enum InsertError {
    /// The tuple is in the map already (`EEXIST`).
    #[error("the tuple is taken")]
    Exists,
    /// The map is full (`E2BIG`, `ENOMEM`).
    #[error("the flow map is full")]
    Full,
    /// Another error of the kernel.
    #[error("insertion into the flow map failed")]
    Os(#[source] std::io::Error),
}

/// The kernel's maps `FLOWS` and `FLOWS6`, as one.
pub trait FlowMap {
    /// Inserts an entry with `BPF_NOEXIST`.
    ///
    /// # Errors
    /// When the tuple is in the map already, the map is full, or the kernel refuses.
    fn insert_noexist(&mut self, tuple: &FlowTuple, flow: FlowRef) -> Result<(), InsertError>;
    /// Deletes an entry. Returns `false` when there was no such entry.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn remove(&mut self, tuple: &FlowTuple) -> std::io::Result<bool>;
    /// Deletes entries in this order. An absent entry is passed over, and so is one that the kernel
    /// refuses to delete.
    ///
    /// # Errors
    /// The first refusal, after all other entries were deleted.
    fn remove_all(&mut self, tuples: &[FlowTuple]) -> std::io::Result<()>;
    /// Looks up an entry.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn get(&mut self, tuple: &FlowTuple) -> std::io::Result<Option<FlowRef>>;
    /// Calls `visit` with some entries, the next ones unless this `begins` a listing; used at
    /// adoption only. An entry that is there all the time is visited once. Returns whether there
    /// are more.
    ///
    /// # Errors
    /// When the kernel can't list the map.
    fn visit_some(
        &mut self,
        begins: bool,
        visit: &mut dyn FnMut(FlowTuple, FlowRef),
    ) -> std::io::Result<bool>;
}

/// The mapped arrays that kernel and engine share.
pub trait Tables {
    /// Returns the row in `OWNERS` of this process.
    fn owner(&self) -> u32;
    /// Returns the number within which slots and generations are unique: a new one each time the
    /// maps are made.
    fn instance(&self) -> u32;
    /// Returns the epoch of this process in its row of `OWNERS`.
    fn epoch(&self) -> u32;
    /// Returns the rows of `OWNERS` that other processes hold, one bit each.
    fn other_owners(&self) -> u64;
    /// Returns the number of elements of `SLOTS`.
    fn slots(&self) -> u32;
    /// Returns the number of VMs that the maps have rows for.
    fn vms(&self) -> u32;
    /// Returns a slot: that of `index` below [`Tables::slots`], else the last one.
    fn slot(&self, index: SlotIndex) -> SlotRef;
    /// Returns the addresses of a slot's flow, if it is of IPv6. `index` as for [`Tables::slot`].
    fn addresses6(&self, index: SlotIndex) -> Addresses6Ref;
    /// Returns the addresses of a slot's flow.
    fn addresses(&self, index: SlotIndex) -> FlowAddresses {
        let live = self.slot(index);
        match live.is_ipv6() {
            false => FlowAddresses {
                guest: live.guest().into(),
                remote: live.remote().into(),
                nat: live.nat().into(),
            },
            true => {
                let six = self.addresses6(index);
                FlowAddresses {
                    guest: six.guest().into(),
                    remote: six.remote().into(),
                    nat: six.nat().into(),
                }
            }
        }
    }
    /// Returns the tuple of a slot's flow on the guest's link.
    fn guest_tuple(&self, index: SlotIndex) -> FlowTuple {
        let (live, addresses) = (self.slot(index), self.addresses(index));
        FlowTuple {
            scope: live.vm(),
            local: addresses.guest,
            remote: addresses.remote,
            local_port: live.guest_port(),
            remote_port: live.remote_port(),
            protocol: live.protocol(),
        }
    }
    /// Returns the tuple of a slot's flow on the world's link.
    fn world_tuple(&self, index: SlotIndex) -> FlowTuple {
        let live = self.slot(index);
        FlowTuple {
            scope: FlowTuple::WORLD,
            local: self.addresses(index).nat,
            local_port: live.nat_port(),
            ..self.guest_tuple(index)
        }
    }
    /// Returns the sequence-space state of a slot's connection. `index` as for [`Tables::slot`].
    fn sequences(&self, index: SlotIndex) -> SequencesRef;
    /// Claims a free chunk of slots for this process, and says whether its slots have rested.
    /// Returns `None` when all chunks are taken, or those that are left are kept for other
    /// processes.
    fn claim_chunk(&mut self, now_ns: u64) -> Option<(std::ops::Range<u32>, bool)>;
    /// Releases a chunk of this process, by its first slot. All its slots are free and have rested.
    fn release_chunk(&mut self, first_slot: SlotIndex, now_ns: u64);
    /// Returns the chunks that this process's row owns already (adoption).
    fn own_chunks(&self) -> Vec<std::ops::Range<u32>>;
    /// Returns a VM's row in `VMS`.
    fn vm(&self, row: VmRow) -> Option<VmRef>;
    /// Returns a VM's row in `VMS6`.
    fn vm6(&self, row: VmRow) -> Option<Vm6Ref>;
    /// Returns this process's row of `OWNERS`.
    fn own_row(&self) -> OwnerRef;
    /// Returns the place of a number in this process's ring of first packets; `None` where there is no
    /// ring.
    fn first_packet(&self, number: u64) -> Option<FirstPacketRef>;
    /// Returns the tag of an early fragment's copy by its place; `None` where none are kept.
    fn early_tag(&self, place: u32) -> Option<EarlyTagRef>;
    /// Returns the copy of an early fragment at a place; `None` as for [`Tables::early_tag`].
    fn early_fragment(&self, place: u32) -> Option<EarlyFragmentRef>;
    /// Returns a VM's rows of `COUNTERS` and `DROPS`. Row 0 counts what belongs to no VM.
    fn stats(&self, row: VmRow) -> VmStats;
    /// Returns the counters for packets that belong to no VM.
    fn nobody(&self) -> VmStats {
        self.stats(VmRow::NOBODY)
    }
    /// Returns a VM's row of `RATES`.
    fn rates(&self, row: VmRow) -> Option<RateRef>;
    /// Returns an element of `NEXT_HOPS`.
    fn next_hop(&self, index: u32) -> Option<NextHopRef>;
    /// Returns the index of the element for a next hop, and claims one when there is none yet; the
    /// broker keeps it fresh from then on. Returns 0 ("let the kernel resolve") when none can be
    /// claimed.
    fn next_hop_for(&mut self, hop: Hop) -> u32;
    /// Returns an element of `RULES`, whose text may be truncated; `None` when there is none.
    fn rule(&self, rule: RuleIndex) -> Option<Described>;
    /// Returns the elements of `NEXT_HOPS` that this process's row owns.
    fn own_next_hops(&self) -> Vec<u32>;
    /// Releases an element of `NEXT_HOPS`. No slot and no frame in flight refers to it.
    fn release_next_hop(&mut self, index: u32);
}

/// Address that DNS opened to a VM by a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RememberedName {
    /// Id of the VM.
    pub vm: VmId,
    /// The address that was opened.
    pub addr: IpAddr,
    /// The name in wire form, in lower case, at most 255 octets.
    pub name: Box<[u8]>,
    /// End of the opening, `CLOCK_MONOTONIC` ns.
    pub expires_ns: u64,
}

impl RememberedName {
    /// Reads an entry of the map `NAMES`.
    pub fn of(key: &NameKey, value: &NameValue) -> Self {
        Self {
            vm: key.id(),
            addr: key.address(),
            name: value.name().into(),
            expires_ns: value.expires_ns,
        }
    }
}

/// The map `NAMES`: openings by DNS, kept for the engine's successor. A name that does not fit in
/// the map is open all the same; it is lost when the engine ends.
pub trait NameMap {
    /// Inserts or replaces the entry of this VM, address and name. Returns whether it is in the
    /// map.
    fn remember_name(&mut self, name: &RememberedName) -> bool;
    /// Deletes the entry of this VM, address and name (in wire form, in lower case). Returns
    /// whether it was in the map.
    fn forget_name(&mut self, vm: VmId, addr: IpAddr, name: &[u8]) -> bool;
    /// Returns the entries of the VMs that this process's row owns, expired or not; used at
    /// adoption.
    fn remembered_names(&self) -> Vec<RememberedName>;
}

/// Key of a port of the host in the map of its family: `FORWARDS`, or `FORWARDS6`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortKey {
    /// Key of `FORWARDS`.
    V4(ForwardKey),
    /// Key of `FORWARDS6`.
    V6(ForwardKey6),
}

impl PortKey {
    /// Key of a port, host order, of an address of the host.
    pub fn new(protocol: Protocol, address: IpAddr, port: u16) -> Self {
        let protocol = protocol as u8;
        match address {
            IpAddr::V4(address) => Self::V4(ForwardKey::new(address.into(), port, protocol)),
            IpAddr::V6(address) => Self::V6(ForwardKey6::new(address.into(), port, protocol)),
        }
    }

    /// Whether it is no port, but a prefix or an address that is routed to a VM.
    pub fn is_routed(&self) -> bool {
        matches!(self, Self::V6(key) if key.is_routed())
    }

    /// Returns the address of the host.
    pub fn address(&self) -> IpAddr {
        match self {
            Self::V4(key) => key.host.into(),
            Self::V6(key) => IpAddr::V6(key.host.into()),
        }
    }

    /// Returns the port, host order.
    pub const fn port(&self) -> u16 {
        match self {
            Self::V4(key) => key.port,
            Self::V6(key) => key.port,
        }
    }

    /// Returns the protocol; `None` if it is none that has flows.
    pub const fn protocol(&self) -> Option<Protocol> {
        Protocol::from_number(match self {
            Self::V4(key) => key.protocol,
            Self::V6(key) => key.protocol,
        })
    }
}

/// The maps `FORWARDS` and `FORWARDS6`, as far as they have ports of endpoint-independent mappings.
/// Those of forwards are the broker's.
pub trait ForwardMap {
    /// Has the programs hand over first packets to a port for a VM. It is no error if they do so
    /// already.
    ///
    /// # Errors
    /// When the port leads elsewhere, the map is full, or the kernel refuses.
    fn open_port(&mut self, port: &PortKey, target: ForwardTarget) -> Result<(), InsertError>;
    /// Has the programs leave first packets to a port to the host, if it leads to this VM.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn close_port(&mut self, port: &PortKey, vm: VmId) -> std::io::Result<()>;
    /// Closes all ports that `unwanted` names; used at adoption only.
    ///
    /// # Errors
    /// When the map can't be listed, or the kernel refuses.
    fn close_ports(
        &mut self,
        unwanted: &dyn Fn(&PortKey, &ForwardTarget) -> bool,
    ) -> std::io::Result<()>;
}

/// Flow map, arrays, name map and ports together.
pub trait Datapath: FlowMap + Tables + NameMap + ForwardMap {}

impl<T: FlowMap + Tables + NameMap + ForwardMap> Datapath for T {}
