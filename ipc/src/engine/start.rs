//! What an engine is started with, and what of it changes together.
use std::{
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::OwnedFd,
};

use serde::{Deserialize, Serialize};
use slipgate_policy::LocalAddresses;

use super::NetworkView;

/// How the engine is to work.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Start<F = OwnedFd> {
    /// The maps, in the order of their layout.
    pub maps: Vec<F>,
    /// The engine port.
    pub port: F,
    /// The flow log, if there is one.
    pub flow_log: Option<F>,
    /// The file for `--pcap`, if there is one.
    pub pcap: Option<F>,
    /// The owner's locks: to be kept open until the engine ends.
    pub locks: Vec<F>,
    /// Row in `OWNERS`.
    pub owner_row: u32,
    /// Epoch in that row.
    pub epoch: u32,
    /// Which events the flow log has.
    pub flow_log_events: Vec<FlowLogEvent>,
    /// The VMs, whose rows are filled already.
    pub vms: Vec<VmSpec>,
    /// The policies in force: a memory file of what `PolicySet::to_bytes` made.
    pub policies: F,
    /// Where this owner's rules begin in `RULES`.
    pub rule_base: u32,
    /// The forwards' texts, which follow the policies' there.
    pub forward_texts: Vec<String>,
    /// The host's resolvers.
    pub resolvers: Vec<SocketAddrV4>,
    /// First and last port of translated flows.
    pub nat_ports: (u16, u16),
    /// Ports among these that sockets of the host hold: IP protocol and port.
    pub reserved_ports: Vec<(u8, u16)>,
    /// The host's network.
    pub network: NetworkView,
    /// Level of messages on stderr.
    pub log: String,
}

/// A kind of lines in the flow log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlowLogEvent {
    /// A flow was admitted.
    FlowStart,
    /// A flow has ended.
    FlowEnd,
    /// A guest's DNS question was answered, or refused.
    Dns,
    /// New flows and questions were refused.
    Refused,
}

/// Policies that are to be in force from now on.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Policies<F = OwnedFd> {
    /// Returned with the answer.
    pub id: u64,
    /// The policies: a memory file of what `PolicySet::to_bytes` made.
    pub policies: F,
    /// Where their texts begin in `RULES`; behind them are the forwards', which stay.
    pub rule_base: u32,
    /// What the rules protect on this host.
    pub local: LocalAddresses,
    /// All VMs, with their policy and quotas.
    pub vms: Vec<VmSpec>,
    /// VMs, by id, whose refused flows are all cut, whatever their policy says of reloads.
    pub strictly: Vec<u32>,
}

/// A VM and its network.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmSpec {
    /// Its id, never reused.
    pub id: u32,
    /// Its row in `VMS`, `COUNTERS`, `DROPS`.
    pub row: u16,
    /// The name given by the user.
    pub name: String,
    /// The guest's address.
    pub guest: Ipv4Addr,
    /// The gateway's address, which is the engine's.
    pub gateway: Ipv4Addr,
    /// The resolver's address, which is the engine's.
    pub dns: Ipv4Addr,
    /// Prefix length of the guest's network.
    pub prefix_len: u8,
    /// The guest's MAC as configured; `None`: whatever it has.
    pub guest_mac: Option<[u8; 6]>,
    /// The gateway's MAC.
    pub gateway_mac: [u8; 6],
    /// The guest link's MTU, L3 bytes.
    pub mtu: u16,
    /// Most flows at once.
    pub max_flows: u32,
    /// Most flows admitted in a second.
    pub new_flows_per_second: u32,
    /// Index of its policy among the process's.
    pub policy: u32,
    /// Most questions asked of DNS in a second; 0: no limit.
    pub dns_per_second: u32,
}

/// A port of the host that leads to a guest.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ForwardSocket<F = OwnedFd> {
    /// The bound socket that reserves the port.
    pub socket: F,
    /// The VM's id.
    pub vm: u32,
    /// The VM's row.
    pub vm_row: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// The host's address, or 0.0.0.0 for any, and the port.
    pub host: SocketAddrV4,
    /// The guest's port.
    pub guest_port: u16,
    /// Element of `RULES` that its flows show.
    pub rule: u32,
}
