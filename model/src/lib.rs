//! Plain data types that the broker, the engine and the commands share: VMs, flows, the host's
//! network, and the reports of an engine; the look-up of routes in the host's network ([`route`]),
//! because broker and engine must come to the same answers; and the reception of descriptors
//! ([`rights`]), because each way to lose one concerns all who receive them.
//!
//! The messages between the processes are made of these types, and the engine takes and returns
//! them, so nothing is converted on the way. The engine does not know the messages.
#![deny(unsafe_code)]

mod flow_id;
mod flow_tuple;
mod inventory;
mod network;
pub mod rights;
pub mod route;
mod vm;

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
pub use slipgate_abi::{IfIndex, RuleIndex, SlotIndex, VmId, VmRow};

pub use self::{
    flow_id::{FlowId, RelayedId, TranslatedId},
    flow_tuple::{FlowAddresses, FlowTuple, TupleKey},
    inventory::{
        EngineInventory, GuestTcpCounts, LiveRelayed, MappingCounts, NameCounts, RefusedQuestions,
        RefusedSample, RelayedCounts,
    },
    network::{
        FlowUplink, FurtherRoutes, HopShare, HostAddress, Link, NAMESPACE_SOCKETS, NetworkView,
        RouteDomain, RouteEntry, RouteKind, RouteSnapshot, RouteStep, SourceUse, StepAction,
        USERSPACE_GUEST, USERSPACE_PORT,
    },
    vm::{ActivityPage, GuestIpv6, Ipv6Mode, Labels, MacMismatch, Silence, VmSpec},
};

/// Treatment of live flows when the engine stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum OnExit {
    /// Flows stay in the kernel for the next process.
    Keep,
    /// Flows are ended and recorded.
    Detach,
}

/// A guest's DNS question by UDP that has no reply yet.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OpenQuestion {
    /// Id of the VM.
    pub vm: VmId,
    /// Address of the guest; `None`: its IPv4 address.
    #[serde(default)]
    pub guest: Option<IpAddr>,
    /// Port of the guest.
    pub guest_port: u16,
    /// Address that the guest asked.
    pub server: IpAddr,
    /// The DNS message as the guest sent it.
    pub message: Vec<u8>,
}

/// Change of a VM's sleep, as the engine reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SleepChange {
    /// From now on packets for it are held.
    Asleep,
    /// The held packets have been delivered.
    Awake,
    /// Something came for it.
    Knock(Knock),
}

/// A packet that came for a VM that sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Knock {
    /// IP protocol number, such as 6 (TCP).
    pub protocol: u8,
    /// Address and port of the sender.
    pub from: SocketAddr,
    /// Address and port that it was sent to.
    pub to: SocketAddr,
}

/// A VM or a flow, in the engine's terms.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Subject {
    /// A VM with all its flows.
    Vm {
        /// Row of the VM.
        row: VmRow,
    },
    /// A translated flow, by its slot.
    Flow {
        /// Slot of the flow.
        slot: SlotIndex,
        /// Generation of the slot.
        generation: u32,
    },
    /// A relayed flow, by its id.
    Relayed(RelayedId),
}

/// Decision about a flow that a guest might open: the answer to `slipgate why`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, Default)]
pub struct WhyAnswer {
    /// Whether the flow would be admitted.
    pub admitted: bool,
    /// Rule that decides, as typed.
    pub rule: String,
    /// Name of the refusal in `stats`.
    pub refusal: Option<String>,
    /// Outcome for the flow, in words.
    pub outcome: String,
    /// Reasons for the choice of that rule, one sentence per line.
    pub explanation: String,
    /// Route in words: source address, next hop and interface; `None` if no packet would leave.
    pub via: Option<String>,
    /// No decision was made: an address of the name is needed first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lacks_address: bool,
}

/// A kind of lines in the flow log.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum FlowLogEvent {
    /// A flow was admitted.
    FlowStart,
    /// A flow has ended.
    FlowEnd,
    /// A guest's DNS question was answered, or refused.
    Dns,
    /// New flows and questions were refused; one line reports several.
    Refused,
}

impl FlowLogEvent {
    /// Every event, in order.
    pub const ALL: [Self; 4] = [Self::FlowStart, Self::FlowEnd, Self::Dns, Self::Refused];

    /// Returns the name used in records and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FlowStart => "flow_start",
            Self::FlowEnd => "flow_end",
            Self::Dns => "dns",
            Self::Refused => "refused",
        }
    }
}

/// A set of kinds of lines in the flow log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FlowLogEvents(u8);

impl FlowLogEvents {
    /// The set of all events.
    pub const ALL: Self = Self::of(&FlowLogEvent::ALL);

    /// Creates a set of the given events.
    pub const fn of(events: &[FlowLogEvent]) -> Self {
        let mut set = 0;
        let mut at = 0;
        while at < events.len() {
            set |= 1 << events[at] as u8;
            at += 1;
        }
        Self(set)
    }

    /// The set with these bits, in the order of [`FlowLogEvent::ALL`]; other bits are ignored.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & Self::ALL.0)
    }

    /// The set as bits.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Whether the set contains an event.
    pub const fn has(self, event: FlowLogEvent) -> bool {
        self.0 & 1 << event as u8 != 0
    }

    /// The events that are in this set, in the other, or in both.
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl FromIterator<FlowLogEvent> for FlowLogEvents {
    fn from_iter<I: IntoIterator<Item = FlowLogEvent>>(events: I) -> Self {
        let one = |event| Self::of(&[event]);
        events.into_iter().map(one).fold(Self::default(), Self::or)
    }
}
