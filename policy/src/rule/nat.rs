//! How translated ports behave toward the world, in the terms of RFC 4787.
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use slipgate_abi::Protocol;

/// Which flows of one port of a guest share a translated port (RFC 4787 section 4.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mapping {
    /// None: each destination sees another port.
    #[default]
    AddressAndPortDependent,
    /// All: every destination sees the same port, one of `--eim-ports`.
    EndpointIndependent,
}

/// Who may send to a translated port that has endpoint-independent mapping (RFC 4787 section 5).
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Filtering {
    /// An address and port to which the guest has sent.
    #[default]
    AddressAndPortDependent,
    /// Any port of an address to which the guest has sent from this port.
    AddressDependent,
    /// Anybody to whom the rules let the guest send.
    EndpointIndependent,
}

impl Filtering {
    /// Returns the name, as in a policy file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AddressAndPortDependent => "address-and-port-dependent",
            Self::AddressDependent => "address-dependent",
            Self::EndpointIndependent => "endpoint-independent",
        }
    }

    /// Whether others than the destinations of the guest's own flows may send.
    pub const fn lets_others_in(self) -> bool {
        !matches!(self, Self::AddressAndPortDependent)
    }
}

/// Behaviour of the translated ports of one protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NatBehaviour {
    /// Which flows share a translated port.
    pub mapping: Mapping,
    /// Who may send to a shared port.
    pub filtering: Filtering,
    /// Whether the guest reaches other guests, and itself, by their translated addresses (RFC 4787
    /// REQ-9), and they it.
    pub hairpin: bool,
}

impl NatBehaviour {
    /// Whether mapping is endpoint-independent.
    pub const fn is_mapped(self) -> bool {
        matches!(self.mapping, Mapping::EndpointIndependent)
    }

    /// Whether packets to translated addresses of this host are led back in.
    pub const fn hairpins(self) -> bool {
        self.is_mapped() && self.hairpin
    }

    /// Whether others than the destinations of the guest's own flows may send to a translated port.
    pub const fn lets_others_in(self) -> bool {
        self.is_mapped() && self.filtering.lets_others_in()
    }
}

/// Behaviour of the translated ports of a policy's VMs, by protocol, of either family.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NatSettings {
    /// Behaviour of UDP's ports.
    pub udp: NatBehaviour,
    /// Behaviour of TCP's ports.
    pub tcp: NatBehaviour,
}

impl NatSettings {
    /// Returns the behaviour of a protocol's ports. ICMP has none of its own.
    pub const fn of(&self, protocol: Protocol) -> NatBehaviour {
        match protocol {
            Protocol::Udp => self.udp,
            Protocol::Tcp => self.tcp,
            Protocol::Icmp | Protocol::Icmpv6 => NatBehaviour {
                mapping: Mapping::AddressAndPortDependent,
                filtering: Filtering::AddressAndPortDependent,
                hairpin: false,
            },
        }
    }

    /// Whether a protocol has endpoint-independent mapping.
    pub const fn is_mapped(&self) -> bool {
        self.udp.is_mapped() || self.tcp.is_mapped()
    }
}
