//! VMs and policies that clients give to a daemon while it serves.
use std::{
    collections::BTreeMap,
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
pub use slipgate_model::Ipv6Mode;
use slipgate_model::VmId;
use slipgate_policy::document::Quotas;

/// Largest number of labels of a VM.
pub const MAX_LABELS: usize = 8;
/// Longest key or value of a label, bytes.
pub const MAX_LABEL_BYTES: usize = 63;

/// Largest number of forwarded ports of a VM: their sockets go to the engine in one message.
pub const MAX_VM_FORWARDS: usize = 64;

/// Definition of a VM, as a client gives it. The daemon checks every value.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, Default)]
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
    /// Whether the guest has IPv6; `None`: the daemon's `--ipv6`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Mode>,
    /// Prefix of the guest's IPv6 addresses as text, a /64, or with `routed` its single address, a
    /// /128; `None`: the daemon's `--ipv6-prefix`, or one of its pool of routed ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6_prefix: Option<String>,
    /// Name of its policy; `None`: the daemon's default policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Text of a policy for this VM, in place of `policy`: TOML, with the keys of `[policy.NAME]` in a
    /// policy file. VMs with the same text share one policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inline_policy: Option<String>,
    /// Name of the only device by which its flows leave; it need not exist yet. `None`: the
    /// daemon's `--uplink`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<String>,
    /// Source addresses toward the world, each an address or a prefix, which are this VM's alone;
    /// none: those of its policy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nat_addresses: Vec<String>,
    /// Limits that replace those of the policy.
    #[serde(default, skip_serializing_if = "is_default")]
    pub quotas: Quotas,
    /// Ports of the host that lead to the guest, in the form of `--forward`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<String>,
    /// Ports of the gateway that lead to the host's loopback, in the form of `--host-loopback`,
    /// before those of its policy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_loopback: Vec<String>,
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

impl VmDefinition {
    /// A VM of which nothing but the name and the TAP is said.
    pub fn new(name: impl Into<String>, tap: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            tap: tap.into(),
            ..Self::default()
        }
    }

    /// Version of the definition.
    pub fn version(&self) -> Version {
        Version::of(&serde_json::to_vec(self).unwrap_or_default())
    }
}

/// Version of a definition or policy: the first bytes of its SHA-256 digest. So a version is never
/// that of another content, whatever was removed or restarted in between.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Version(u64);

impl Version {
    /// Version of this content.
    pub fn of(content: &[u8]) -> Self {
        let digest = Sha256::digest(content);
        let first: [u8; 8] = std::array::from_fn(|at| digest[at]);
        Self(u64::from_be_bytes(first))
    }

    /// Reads what `Display` has written: 16 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let is_hex = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let number = is_hex.then(|| u64::from_str_radix(text, 16).ok());
        number.flatten().map(Self)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Condition of a change: what it may replace.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replaces {
    /// No condition: replaces what there is, or adds.
    #[default]
    Anything,
    /// Nothing: it must be new.
    Nothing,
    /// Any version: it must exist.
    Existing,
    /// One of these versions.
    AnyOf(Vec<Version>),
}

impl Replaces {
    /// Whether the condition holds. `now`: the present version; `None`: there is none.
    pub fn permits(&self, now: Option<Version>) -> bool {
        match self {
            Self::Anything => true,
            Self::Nothing => now.is_none(),
            Self::Existing => now.is_some(),
            Self::AnyOf(versions) => now.is_some_and(|now| versions.contains(&now)),
        }
    }
}

fn is_default(quotas: &Quotas) -> bool {
    *quotas == Quotas::default()
}

/// The network that guests see, as DHCP tells them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GuestNetwork {
    /// Address of guests that have none of their own.
    pub guest: Ipv4Addr,
    /// Length of the network's prefix, bits.
    pub prefix_len: u8,
    /// Address of the gateway, which slipgate answers for.
    pub gateway: Ipv4Addr,
    /// Address of the resolver, which slipgate answers for.
    pub dns: Ipv4Addr,
    /// L3 bytes; `None`: as the TAP has it.
    pub mtu: Option<u32>,
}

/// Whether the host's own NAT and sockets keep clear of guests' tuples.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostNatStatus {
    /// Name of the uplink of VMs that name none.
    pub uplink: String,
    /// Ranges of translated source ports, first and last of each.
    pub ports: Vec<(u16, u16)>,
    /// Whether the host's rules could be read.
    pub is_known: bool,
    /// What the host's NAT or sockets share with guests, in sentences with a remedy; there may be more.
    pub shared: Vec<String>,
    /// Names of further devices by which VMs' flows leave: their own uplinks, and those of their policies'
    /// routes.
    #[serde(default)]
    pub further_uplinks: Vec<String>,
    /// Number of ports, of TCP and of UDP, that guests' new flows leave to connections of the host's NAT.
    #[serde(default)]
    pub left_alone: usize,
}

impl HostNatStatus {
    /// Whether VMs' flows leave by a device besides the uplink of all.
    pub fn has_further(&self, name: &str) -> bool {
        self.further_uplinks.iter().any(|it| it == name)
    }
}

/// A VM of a daemon, with its present state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmStatus {
    /// The definition in force.
    #[serde(flatten)]
    pub definition: VmDefinition,
    /// Id of the VM, never reused in this network namespace.
    pub id: VmId,
    /// Number of the engine that serves it, from 0 (`slipgate serve --workers`).
    #[serde(default)]
    pub worker: u32,
    /// Number of definitions that it has had since the daemon started.
    pub generation: u64,
    /// Present state of the VM.
    pub state: VmState,
    /// Whether it is idle.
    #[serde(default)]
    pub idle: bool,
    /// Whether the uplink of the definition does not exist, so that no flow leaves.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lacks_uplink: bool,
    /// IPv6 of the guest at present; `None`: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_ipv6: Option<GuestIpv6Status>,
    /// Forwards of the definition that are not served, because others had their ports when the
    /// daemon started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unserved_forwards: Vec<String>,
}

/// IPv6 of a VM's guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GuestIpv6Status {
    /// Prefix of its addresses.
    pub prefix: String,
    /// Address of the gateway and resolver.
    pub gateway: Ipv6Addr,
    /// Addresses that the guest uses, its link-local one first.
    pub addresses: Vec<Ipv6Addr>,
}

/// Use and bounds of the daemon's limited resources.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Room {
    /// VMs: the daemon's, and `--max-vms` of the network namespace.
    pub vms: Filled,
    /// Rules in force for the daemon, and `--max-rules` of the network namespace.
    pub rules: Filled,
}

/// Something limited: how many there are, and how many there can be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Filled {
    /// How many there are.
    pub used: u32,
    /// How many there can be, all slipgate processes of the network namespace together.
    pub most: u32,
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
    /// Packets for it are held until it is resumed.
    Asleep,
}

impl VmState {
    /// Name of the state, as it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Starting => "starting",
            Self::Served => "served",
            Self::Frozen => "frozen",
            Self::Asleep => "asleep",
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
