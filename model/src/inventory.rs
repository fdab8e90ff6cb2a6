//! Inventory of an engine: state that the pinned maps do not show.
use std::{net::SocketAddr, num::NonZeroU64, ops::AddAssign};

use serde::{Deserialize, Serialize};
use slipgate_abi::{IfIndex, SlotIndex};
use slipgate_policy::RefusedCounts;

use crate::{Labels, RelayedId};

/// One page of the state that only the engine has: names, refusals and relayed flows.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EngineInventory {
    /// Names of the host's links by which flows may leave, on the first page.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<(IfIndex, String)>,
    /// Labels of each VM that has some, by its name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<(String, Labels)>,
    /// Counts of DNS refusals of each VM, by its name.
    pub vms: Vec<(String, NameCounts)>,
    /// Refusals of each VM since the engine started, with the last of each kind; only the most
    /// frequent kinds of each VM.
    pub refused: Vec<RefusedSample>,
    /// Slot and generation of each flow whose address a DNS answer opened, with the name; by slot.
    pub flows: Vec<(SlotIndex, u32, String)>,
    /// Endpoint-independent mappings of each VM that has some, by its name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mappings: Vec<(String, MappingCounts)>,
    /// What the engine's own TCP toward each VM's guest keeps, by its name, where there is something.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tcp: Vec<(String, GuestTcpCounts)>,
    /// Traffic counts of each VM's relayed flows, by its name.
    #[serde(default)]
    pub relayed: Vec<(String, RelayedCounts)>,
    /// Live relayed flows, by their ids.
    #[serde(default)]
    pub relayed_flows: Vec<LiveRelayed>,
    /// Start of the next page; `None` on the last page.
    pub next: Option<u64>,
    /// Start of the next engine's first page, for who wants to know of VMs only; `None` if there is none,
    /// and from an engine itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_engine: Option<NonZeroU64>,
}

impl EngineInventory {
    /// Start of the next page with VMs: an engine's flows, of which there may be a million, come behind its
    /// VMs and are left out.
    pub fn next_with_vms(&self) -> Option<u64> {
        match self.flows.is_empty() && self.relayed_flows.is_empty() {
            true => self.next,
            false => self.next_engine.map(NonZeroU64::get),
        }
    }
}

/// Counts of a VM's DNS refusals since the engine started, and its open addresses.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NameCounts {
    /// Questions for names that may not be asked for.
    pub refused_names: u64,
    /// Questions for types that may not be asked for.
    pub refused_types: u64,
    /// Answers that led to a name that may not be asked for.
    pub refused_chains: u64,
    /// Answers with a protected address.
    pub rebinding: u64,
    /// Answers refused because the VM had no room for more addresses.
    pub full: u64,
    /// Questions for names of public resolvers that bypass the rules.
    pub elsewhere: u64,
    /// Questions beyond the rate.
    pub over_rate: u64,
    /// Questions for new names beneath wildcards, beyond the VM's limit of their octets.
    pub new_names: u64,
    /// Questions asked again, and first ones for names that rules give themselves, beyond the VM's limit
    /// of what the choice among them says.
    #[serde(default)]
    pub asked_again: u64,
    /// Addresses open by name at present.
    pub open: u64,
    /// Connections and flows under inspect rules that were ended, by reason.
    #[serde(default)]
    pub inspected: RefusedCounts,
    /// Refused names by rule, with the last such name; of the first 16 rules.
    pub refused_by: Vec<RefusedQuestions>,
}

/// A VM's endpoint-independent mappings: its ports that have one of `--eim-ports`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct MappingCounts {
    /// Of UDP, those included whose port rests after their last flow.
    pub udp: u64,
    /// Of TCP, those included whose port rests after their last flow.
    pub tcp: u64,
    /// Those to which others may send than the guest's peers.
    pub open: u64,
}

impl AddAssign for MappingCounts {
    fn add_assign(&mut self, other: Self) {
        self.udp += other.udp;
        self.tcp += other.tcp;
        self.open += other.open;
    }
}

/// What the engine's own TCP toward a guest keeps: of flows of user mode, and of relayed flows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct GuestTcpCounts {
    /// Bytes that count at present for segments of the guest that are kept: those behind a gap, and what a
    /// socket that is full did not take.
    pub kept_bytes: u64,
    /// Segments that were not kept since the engine started, for the connection or the VM had no room. The
    /// guest sends them again.
    pub not_kept: u64,
    /// Segments with urgent data since the engine started. Their data was delivered in its place.
    pub urgent: u64,
}

impl AddAssign for GuestTcpCounts {
    fn add_assign(&mut self, other: Self) {
        self.kept_bytes += other.kept_bytes;
        self.not_kept += other.not_kept;
        self.urgent += other.urgent;
    }
}

/// Questions that one rule refused.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RefusedQuestions {
    /// The rule as typed.
    pub rule: String,
    /// Number of refused questions.
    pub questions: u64,
    /// Name in the last refused question.
    pub last: String,
}

/// Refusals of a VM for one reason by one rule since the engine started, with the last such flow or
/// question.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RefusedSample {
    /// Name of the VM.
    pub vm: String,
    /// The reason, as in `refused` of `stats`; or a reason of DNS.
    pub reason: String,
    /// The rule as typed, where a rule refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Number of refusals since the engine started.
    pub count: u64,
    /// Time since the last refusal, ms.
    pub last_ms_ago: u64,
    /// Protocol: `tcp`, `udp` or `icmp`.
    pub proto: String,
    /// Address and port of the guest in the last refusal.
    pub guest: SocketAddr,
    /// Address and port of the peer in the last refusal.
    pub remote: SocketAddr,
}

/// Traffic of a VM's relayed flows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RelayedCounts {
    /// Flows that are live now.
    pub flows: u64,
    /// Flows that have begun since the engine started.
    pub begun: u64,
    /// Flows among `begun` that have ended.
    pub ended: u64,
    /// Packets from the guest.
    pub tx_packets: u64,
    /// Bytes from the guest, in IP packets.
    pub tx_bytes: u64,
    /// Packets to the guest.
    pub rx_packets: u64,
    /// Bytes to the guest, in IP packets.
    pub rx_bytes: u64,
}

impl AddAssign for RelayedCounts {
    fn add_assign(&mut self, other: Self) {
        self.flows += other.flows;
        self.begun += other.begun;
        self.ended += other.ended;
        self.tx_packets += other.tx_packets;
        self.tx_bytes += other.tx_bytes;
        self.rx_packets += other.rx_packets;
        self.rx_bytes += other.rx_bytes;
    }
}

/// A live relayed flow.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LiveRelayed {
    /// Id of the flow.
    pub id: RelayedId,
    /// Name of the VM.
    pub vm: String,
    /// IP protocol number, such as 6 (TCP).
    pub protocol: u8,
    /// Address and port of the guest.
    pub guest: SocketAddr,
    /// Address and port of the peer.
    pub remote: SocketAddr,
    /// Source that the peer sees, or the engine's end toward the host's loopback.
    pub nat: Option<SocketAddr>,
    /// The service on the host's loopback.
    pub host: Option<SocketAddr>,
    /// Whether the flow was opened from outside, through a forward.
    pub inbound: bool,
    /// Rule that admitted the flow; empty for DNS.
    pub rule: String,
    /// Phase of a TCP connection; for other protocols, whether the peer has answered.
    pub state: String,
    /// Packets and L3 bytes from the guest.
    pub tx: (u64, u64),
    /// Packets and L3 bytes to the guest.
    pub rx: (u64, u64),
    /// Time since the flow began, ms.
    pub age_ms: u64,
    /// Time since its last packet, ms.
    pub idle_ms: u64,
}
