//! VMs and policies that clients give to a daemon while it serves.
use std::{collections::BTreeMap, net::Ipv4Addr};

use serde::{Deserialize, Serialize};
use slipgate_model::VmId;
use slipgate_policy::document::Quotas;

/// Largest number of labels of a VM.
pub const MAX_LABELS: usize = 8;
/// Longest key or value of a label, bytes.
pub const MAX_LABEL_BYTES: usize = 63;

/// Largest number of forwarded ports of a VM: their sockets go to the engine in one message.
pub const MAX_VM_FORWARDS: usize = 64;

/// Definition of a VM, as a client gives it. The daemon checks every value.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmDefinition {
    /// Unique name of the VM.
    pub name: String,
    /// Name of the TAP that its VMM has open; it need not exist yet.
    pub tap: String,
    /// MAC address of the guest, as text; frames from other addresses are dropped. `None`: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// IPv4 address of the guest; `None`: the daemon's `--guest-ip`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<Ipv4Addr>,
    /// Name of its policy; `None`: the daemon's default policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Limits that replace those of the policy.
    #[serde(default, skip_serializing_if = "is_default")]
    pub quotas: Quotas,
    /// Ports of the host that lead to the guest, in the form of `--forward`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<String>,
    /// Silence after which the VM is idle, seconds; 0: it is not told. `None`: the daemon's
    /// `--idle-after`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_after: Option<u32>,
    /// Labels for people and platforms; the daemon does not interpret them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Whether it is served for as long as a client lives: [`ClientRequest::ServeVm`]. The daemon
    /// sets it.
    ///
    /// [`ClientRequest::ServeVm`]: super::ClientRequest::ServeVm
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tied: bool,
}

fn is_default(quotas: &Quotas) -> bool {
    *quotas == Quotas::default()
}

/// The network that guests see, as DHCP tells them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GuestNetwork {
    /// Address of guests that have none of their own.
    pub guest: Ipv4Addr,
    /// Prefix length, bits.
    pub prefix_len: u8,
    /// The gateway.
    pub gateway: Ipv4Addr,
    /// The resolver.
    pub dns: Ipv4Addr,
    /// L3 bytes; `None`: as the TAP has it.
    pub mtu: Option<u32>,
}

/// A VM of a daemon, with its present state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmStatus {
    /// The definition in force.
    #[serde(flatten)]
    pub definition: VmDefinition,
    /// Id of the VM, never reused in this network namespace.
    pub id: VmId,
    /// Number of definitions that it has had since the daemon started.
    pub generation: u64,
    /// Present state.
    pub state: VmState,
    /// Whether it is idle.
    #[serde(default)]
    pub idle: bool,
}

/// State of a VM in a daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// No TAP with its name exists.
    Waiting,
    /// The engine is receiving the VM; its TAP is still down.
    Starting,
    /// Its TAP is up, and its guest is served.
    Served,
    /// All its packets are dropped until it is thawed.
    Frozen,
}

impl VmState {
    /// Name of the state, as it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Starting => "starting",
            Self::Served => "served",
            Self::Frozen => "frozen",
        }
    }
}

/// Effect of a request on a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmChange {
    /// The VM is new.
    Created,
    /// The VM existed, and has another definition now.
    Changed,
    /// The VM existed with this definition.
    Unchanged,
}

/// A policy that was put by a client.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PolicyStatus {
    /// Name of the policy.
    pub name: String,
    /// Number of times that a policy of this name was put since the daemon started.
    pub generation: u64,
    /// Text of the policy, in TOML.
    pub text: String,
}
