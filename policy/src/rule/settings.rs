//! Settings of a policy beside its rules: where each rule was written and why, and how DNS
//! questions are answered.
use std::{fmt, net::SocketAddr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Rule, address_pool::AddressPool, host_loopback::LoopbackPorts, idle::Idle, name::Name,
    nat::NatSettings, sleep::Sleep, timers::Timers,
};

/// How far an inspected HTTP/1 connection is followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Http {
    /// Each request must comply with the rule: the connection stays in the engine.
    #[default]
    Each,
    /// Only the first request must comply; the kernel forwards what follows.
    First,
}

/// Treatment of established flows that changed rules would not admit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnReload {
    /// The flows are ended.
    #[default]
    Cut,
    /// Established flows go on until they end.
    Keep,
}

/// Metadata of a rule.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Note {
    /// `FILE:LINE` where the rule is written; `None`: it was given as a flag.
    pub place: Option<String>,
    /// The user's comment: why the rule exists.
    pub comment: Option<String>,
    /// How far an inspect rule follows HTTP/1 connections.
    pub http: Http,
}

/// A rule with its metadata.
#[derive(Clone, Debug)]
pub struct AnnotatedRule {
    /// The rule in parsed form.
    pub rule: Rule,
    /// Metadata of the rule.
    pub note: Note,
}

impl From<Rule> for AnnotatedRule {
    fn from(rule: Rule) -> Self {
        Self {
            rule,
            note: Note::default(),
        }
    }
}

/// Settings of a policy beside its rules.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Settings {
    /// Name of the policy; `None`: the policy of all VMs that name none.
    pub name: Option<String>,
    /// File that the policy was read from; `None`: it was given by flags alone.
    pub file: Option<String>,
    /// Treatment of established flows that the policy does not admit any more.
    pub on_reload: OnReload,
    /// DNS settings of the policy.
    pub dns: DnsSettings,
    /// Idle time-outs of the policy's flows.
    #[serde(default)]
    pub timers: Timers,
    /// How the translated ports of the policy's flows behave.
    #[serde(default)]
    pub nat: NatSettings,
    /// Source addresses of the policy's flows, one for each VM.
    #[serde(default)]
    pub nat_addresses: AddressPool,
    /// How the policy's flows leave.
    #[serde(default)]
    pub egress: Egress,
    /// Bounds on the packets that are held for a VM while it sleeps.
    #[serde(default)]
    pub sleep: Sleep,
    /// What does not count as activity of a VM.
    #[serde(default)]
    pub idle: Idle,
    /// Ports of the gateway that lead to the host's loopback.
    #[serde(default)]
    pub host_loopback: Vec<LoopbackPorts>,
    /// Whether the policy opens a VM so that the VM's own policy can be learnt. Such a policy
    /// inspects nothing.
    #[serde(default)]
    pub is_learning: bool,
}

impl Settings {
    /// What an error calls the policy: its name, else its file; empty where flags alone gave it.
    pub fn source(&self) -> &str {
        let named = self.name.as_deref().or(self.file.as_deref());
        named.unwrap_or("")
    }
}

/// How flows leave the host.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Egress {
    /// Name of the only device by which they leave; `None`: as for all VMs.
    pub uplink: Option<String>,
    /// Routes by which they leave; `None`: those of the table `main`.
    #[serde(default)]
    pub routes: Option<EgressRoutes>,
}

impl Egress {
    /// Whether flows leave as those of VMs without such settings.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Routes of the host that flows leave by, instead of those of the table `main`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum EgressRoutes {
    /// Those of a routing table, by its number.
    Table(u32),
    /// Those of a VRF, by the name of its device.
    Vrf(String),
    /// Those that the host's rules (`ip rule`) give to packets with this mark. Of the table `main`
    /// only those by the uplink of all VMs.
    Mark(u32),
    /// Those that the host's rules give to packets with this mark (0: without one), by whatever
    /// device.
    Host {
        /// The mark.
        mark: u32,
    },
}

impl EgressRoutes {
    /// Returns the mark with which the host's rules are asked for routes; `None`: they are not.
    pub const fn mark(&self) -> Option<u32> {
        match self {
            Self::Table(_) | Self::Vrf(_) => None,
            Self::Mark(mark) | Self::Host { mark } => Some(*mark),
        }
    }
}

impl fmt::Display for EgressRoutes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(number) => write!(f, "table {number}"),
            Self::Vrf(device) => write!(f, "VRF {device}"),
            Self::Mark(mark) => write!(f, "mark {mark:#x}"),
            Self::Host { mark: 0 } => f.write_str("the host"),
            Self::Host { mark } => write!(f, "the host with mark {mark:#x}"),
        }
    }
}

/// DNS settings of a policy.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DnsSettings {
    /// Resolvers that questions are forwarded to.
    pub resolvers: Resolvers,
    /// Numbers of the record types that may be asked for although they are refused by default (TXT,
    /// NULL, ANY).
    pub types: Vec<u16>,
    /// Shortest time for which an answer opens its addresses, seconds.
    pub ttl_floor_s: u32,
    /// Longest time for which an answer opens its addresses, seconds.
    pub ttl_ceiling_s: u32,
    /// Maximum number of labels of a name that may be asked for.
    pub max_labels: u8,
    /// Maximum length of each label, octets.
    pub max_label_octets: u8,
    /// Rate limit of new names beneath wildcards.
    pub new_names: NewNames,
}

impl DnsSettings {
    /// Returns the limit that the name exceeds, in words; `None`: the name is within the limits.
    pub fn too_much(&self, name: Name<'_>) -> Option<String> {
        let most = usize::from(self.max_labels);
        if name.labels().count() > most {
            return Some(format!("a name of more than {most} labels"));
        }
        let longest = name.labels().map(<[u8]>::len).max().unwrap_or(0);
        let most = usize::from(self.max_label_octets);
        (longest > most).then(|| format!("a label of more than {most} octets"))
    }
}

/// Maximum length of a label, octets (RFC 1035 section 2.3.4).
const LONGEST_LABEL: u8 = 63;
/// Maximum number of labels in a name: RFC 1035's 255 octets, two per label, less the root.
const MOST_LABELS: u8 = 127;

impl Default for DnsSettings {
    fn default() -> Self {
        Self {
            resolvers: Resolvers::Host,
            types: Vec::new(),
            ttl_floor_s: FLOOR_S,
            ttl_ceiling_s: CEILING_S,
            max_labels: MOST_LABELS,
            max_label_octets: LONGEST_LABEL,
            new_names: NewNames::default(),
        }
    }
}

/// Default of [`DnsSettings::ttl_floor_s`], seconds: a client connects some time after it has the
/// answer, and may keep an answer with TTL 0 for the connection at hand.
pub const FLOOR_S: u32 = 30;
/// Default of [`DnsSettings::ttl_ceiling_s`], seconds: as long as the resolver itself caches an
/// answer.
pub const CEILING_S: u32 = 86_400;
/// Port of DNS (RFC 1035 section 4.2).
pub const DNS_PORT: u16 = 53;
/// Maximum number of resolvers of a policy.
pub const MAX_RESOLVERS: usize = 8;

/// Resolvers that the questions of a policy's VMs are forwarded to.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Resolvers {
    /// The host's resolvers, as currently configured.
    #[default]
    Host,
    /// The given resolvers, in this order; [`MAX_RESOLVERS`] at most.
    These(Vec<SocketAddr>),
    /// No resolver: every question is refused.
    Nobody,
}

/// Rate limit of the octets that a VM can convey by asking for new names beneath wildcards, and of
/// those that it can by its choice among questions asked before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NewNames {
    /// Average rate, octets per minute.
    pub octets_per_minute: u32,
    /// Burst after an idle period, octets.
    pub burst_octets: u32,
}

impl Default for NewNames {
    /// Some 250 names of common length per minute, each with two types.
    fn default() -> Self {
        Self {
            octets_per_minute: 8 * 1_024,
            burst_octets: 32 * 1_024,
        }
    }
}
