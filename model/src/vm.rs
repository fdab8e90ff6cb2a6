//! Description of a VM and its network.
use std::{collections::BTreeMap, net::Ipv4Addr};

use serde::{Deserialize, Serialize};
use slipgate_abi::{VmId, VmRow};

/// Labels of a VM, by key. They mean nothing to slipgate.
pub type Labels = BTreeMap<String, String>;

/// A VM and its network, as the broker describes it to the engine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmSpec {
    /// Id of the VM, never reused.
    pub id: VmId,
    /// Row of the VM in `VMS`, `COUNTERS` and `DROPS`.
    pub row: VmRow,
    /// Name of the VM, given by the user.
    pub name: String,
    /// Labels that records show.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Address of the guest.
    pub guest: Ipv4Addr,
    /// Address of the gateway, which the engine answers for.
    pub gateway: Ipv4Addr,
    /// Address of the resolver, which the engine answers for.
    pub dns: Ipv4Addr,
    /// Prefix length of the guest's network.
    pub prefix_len: u8,
    /// MAC of the guest as configured; `None`: the guest may have any.
    pub guest_mac: Option<[u8; 6]>,
    /// MAC of the gateway.
    pub gateway_mac: [u8; 6],
    /// MTU of the guest's link, L3 bytes.
    pub mtu: u16,
    /// Most live flows at once.
    pub max_flows: u32,
    /// Most flows admitted per second.
    pub new_flows_per_second: u32,
    /// Index of the VM's policy in the process's policies.
    pub policy: u32,
    /// Most DNS questions per second; 0: no limit.
    pub dns_per_second: u32,
    /// Silence after which the VM is idle, seconds; 0: it is not told.
    pub idle_after_s: u32,
    /// Whether the VM was idle when its description was made.
    pub is_idle: bool,
}
