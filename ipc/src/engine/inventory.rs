//! What an engine knows and the pinned maps do not show.
use std::{net::SocketAddrV4, ops::AddAssign};

use serde::{Deserialize, Serialize};
use slipgate_policy::RefusedCounts;

use super::RelayedId;

/// A page of what an engine knows by name.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EngineInventory {
    /// What was refused in each VM's DNS, by the VM's name.
    pub vms: Vec<(String, NameCounts)>,
    /// What was refused of them since the engine began, with the last of each kind; of each VM the
    /// most frequent kinds.
    pub refused: Vec<RefusedSample>,
    /// Slot, generation and the name that opened its address, by slot.
    pub flows: Vec<(u32, u32, String)>,
    /// What was relayed for each VM, by its name.
    #[serde(default)]
    pub relayed: Vec<(String, RelayedCounts)>,
    /// The relayed flows that live, by their ids.
    #[serde(default)]
    pub relayed_flows: Vec<LiveRelayed>,
    /// There is more, from here.
    pub next: Option<u64>,
}

/// What was refused in a VM's DNS, since the engine began.
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
    /// Answers for which there was no room.
    pub full: u64,
    /// Questions for names of resolvers elsewhere.
    pub elsewhere: u64,
    /// Questions beyond the rate.
    pub over_rate: u64,
    /// Questions for new names beneath a wildcard, beyond what a VM may say by them.
    pub new_names: u64,
    /// Addresses open by name, now.
    pub open: u64,
    /// Connections and flows under inspect rules that were ended, by reason.
    #[serde(default)]
    pub inspected: RefusedCounts,
    /// Refused names by rule, with the last such name; of the first 16 rules.
    pub refused_by: Vec<RefusedQuestions>,
}

/// Questions that one rule refused.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RefusedQuestions {
    /// The rule as typed.
    pub rule: String,
    /// How many.
    pub questions: u64,
    /// The last one's name.
    pub last: String,
}

/// What was refused of a VM for one reason by one rule, since the engine began, with the last such
/// flow or question.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RefusedSample {
    /// The VM's name.
    pub vm: String,
    /// The reason, as in `refused` of `stats`; or a reason of DNS.
    pub reason: String,
    /// The rule as typed, where one refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// How many.
    pub count: u64,
    /// How long ago the last one was, ms.
    pub last_ms_ago: u64,
    /// tcp, udp or icmp.
    pub proto: String,
    /// The guest's end of the last one.
    pub guest: SocketAddrV4,
    /// The other end.
    pub remote: SocketAddrV4,
}

/// What was relayed for a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RelayedCounts {
    /// Flows that live.
    pub flows: u64,
    /// Flows that have begun.
    pub begun: u64,
    /// Of those, how many have ended.
    pub ended: u64,
    /// From the guest.
    pub tx_packets: u64,
    /// L3.
    pub tx_bytes: u64,
    /// To the guest.
    pub rx_packets: u64,
    /// L3.
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

/// A relayed flow that lives.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LiveRelayed {
    /// Its id.
    pub id: RelayedId,
    /// The VM's name.
    pub vm: String,
    /// IP protocol number.
    pub protocol: u8,
    /// The guest's end.
    pub guest: SocketAddrV4,
    /// The peer's.
    pub remote: SocketAddrV4,
    /// What the peer sees, or the engine's end toward the host's loopback.
    pub nat: Option<SocketAddrV4>,
    /// The service on the host's loopback.
    pub host: Option<SocketAddrV4>,
    /// Whether the world opened it, by a forward.
    pub inbound: bool,
    /// What let it in; empty for DNS.
    pub rule: String,
    /// TCP's phase; of others whether they were answered.
    pub state: String,
    /// Packets and L3 bytes from the guest.
    pub tx: (u64, u64),
    /// To the guest.
    pub rx: (u64, u64),
    /// Since it began, ms.
    pub age_ms: u64,
    /// Since its last packet, ms.
    pub idle_ms: u64,
}
