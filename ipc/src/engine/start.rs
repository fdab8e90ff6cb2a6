//! Settings that an engine starts with, and the parts that later change together.
use std::{net::SocketAddr, os::fd::OwnedFd};

use serde::{Deserialize, Serialize};
use slipgate_model::{FlowLogEvent, NetworkView, OpenQuestion, RuleIndex, VmId, VmRow, VmSpec};
use slipgate_policy::LocalAddresses;

use crate::descriptors::maps_descriptors;

/// Settings that an engine starts with.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Start<F = OwnedFd> {
    /// The maps, in the order of their layout.
    pub maps: Vec<F>,
    /// Device descriptor of the engine port; of the user-mode engine: its guest's link.
    pub port: F,
    /// Settings of the user-mode engine; `None`: the kernel translates.
    pub userspace: Option<UserspaceStart>,
    /// If the guest is a network namespace of this host: a connected socket of sequenced packets, at
    /// whose other end a process there makes sockets.
    pub namespace: Option<F>,
    /// The flow log, if there is one.
    pub flow_log: Option<F>,
    /// The file of `--pcap`, if there is one.
    pub pcap: Option<F>,
    /// The owner's locks: to be kept open until the engine ends.
    pub locks: Vec<F>,
    /// This owner's row in `OWNERS`.
    pub owner_row: u32,
    /// Epoch in that row.
    pub epoch: u32,
    /// Kinds of events that the flow log records.
    pub flow_log_events: Vec<FlowLogEvent>,
    /// VMs to serve; their rows are already filled.
    pub vms: Vec<VmSpec>,
    /// Policies in force: a memory file with the output of `PolicySet::to_bytes`.
    pub policies: F,
    /// Where the forwards' rules begin in `RULES`. Those of the policies are numbered by theirs.
    pub forward_rules: RuleIndex,
    /// Texts of the forwards, as the user wrote them, for reports.
    pub forward_texts: Vec<String>,
    /// Resolvers of the host.
    pub resolvers: Vec<SocketAddr>,
    /// First and last port of translated flows.
    pub nat_ports: (u16, u16),
    /// First and last port of endpoint-independent mappings; `None`: there are none.
    pub eim_ports: Option<(u16, u16)>,
    /// Ports among both that sockets of the host hold: IP protocol and port.
    pub reserved_ports: Vec<(u8, u16)>,
    /// Network of the host.
    pub network: NetworkView,
    /// Questions that a predecessor left without a reply.
    pub open_questions: Vec<OpenQuestion>,
    /// Level of messages on stderr.
    pub log: String,
}

/// The guest's link of a user-mode engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum UserspaceStart {
    /// The queue of a TAP.
    Tap {
        /// Whether it takes UDP GSO frames.
        takes_uso: bool,
    },
    /// A listening stream socket, non-blocking, to which a VMM connects.
    Socket {
        /// Protocol that the VMM uses on it.
        protocol: GuestProtocol,
        /// Whether it is shut down when the first guest has gone.
        is_for_one: bool,
    },
    /// A connected stream socket, at whose other end a VMM exchanges frames as on an accepted
    /// [`GuestProtocol::Frames`] one. It is shut down when the guest has gone.
    Connected,
    /// A connected socket of sequenced packets, whose other end the network card of slipgate's VMM has.
    Packets,
    /// A connected stream socket, non-blocking, on which slipgate's VMM gives the rings of its network
    /// card by vhost-user.
    Rings,
    /// None: an engine of this row has died. This one records the flows that it had, says how many, and
    /// ends.
    RecordOrphans,
}

/// Protocol of a VMM on its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum GuestProtocol {
    /// Frames, each preceded by its length: QEMU's `-netdev stream`, passt's protocol.
    Frames,
    /// vhost-user: the VMM gives the rings of its guest's network card.
    VhostUser,
}

/// New policies to put in force.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Policies<F = OwnedFd> {
    /// Number that the answer returns.
    pub id: u64,
    /// Policies that are new, changed or removed: a memory file with the output of
    /// `PolicySet::changes_to_bytes`.
    pub policies: F,
    /// Addresses of this host that the rules protect.
    pub local: LocalAddresses,
    /// Every VM that has one of these policies, had one, or gets another one.
    pub vms: Vec<VmSpec>,
    /// Ids of VMs whose refused flows are all cut, whatever their policy says about reloads.
    pub strictly: Vec<VmId>,
}

/// A port of the host that leads to a guest, or a port of a guest's own address.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ForwardSocket<F = OwnedFd> {
    /// The bound socket that reserves the port; `None`: the address is the guest's own, and packets come
    /// without translation.
    pub socket: Option<F>,
    /// Id of the VM.
    pub vm: VmId,
    /// Row of the VM.
    pub vm_row: VmRow,
    /// IP protocol number: 6 (TCP) or 17 (UDP).
    pub protocol: u8,
    /// The host's address, or 0.0.0.0 or `::` for any, and the port. Of the guest's own addresses one, or
    /// the first of its /64 for all of these.
    pub host: SocketAddr,
    /// Port of the guest.
    pub guest_port: u16,
    /// Index in `RULES` of the rule that its flows show.
    pub rule: RuleIndex,
}

maps_descriptors!(struct Start {
    maps: all, port: fd, userspace, namespace: optional, flow_log: optional, pcap: optional, locks: all, owner_row, epoch,
    flow_log_events, vms, policies: fd, forward_rules, forward_texts, resolvers, nat_ports, eim_ports,
    reserved_ports, network, open_questions, log,
});
maps_descriptors!(struct Policies { id, policies: fd, local, vms, strictly });
maps_descriptors!(struct ForwardSocket {
    socket: optional, vm, vm_row, protocol, host, guest_port, rule,
});
