//! What of a policy is more than its rules: where each was written and why, and how names are told.
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{Rule, host_loopback::LoopbackPorts, name::Name};

/// How far an inspect rule follows an HTTP/1 connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Http {
    /// Each request is held to the rule: the connection stays in the engine.
    #[default]
    Each,
    /// Only the first one is; the rest goes by the kernel.
    First,
}

/// What becomes of flows that new rules would not admit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnReload {
    /// They end.
    #[default]
    Cut,
    /// They go on.
    Keep,
}

/// What is known of a rule beside it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Note {
    /// `FILE:LINE`; `None`: it was typed as a flag.
    pub place: Option<String>,
    /// Why it is there, as the user says.
    pub comment: Option<String>,
    /// Of an inspect rule.
    pub http: Http,
}

/// A rule and what is known of it.
#[derive(Clone, Debug)]
pub struct Written {
    /// The rule.
    pub rule: Rule,
    /// The rest.
    pub note: Note,
}

impl From<Rule> for Written {
    fn from(rule: Rule) -> Self {
        Self {
            rule,
            note: Note::default(),
        }
    }
}

/// What a policy says beside its rules.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Settings {
    /// Its name; `None`: the one of all VMs that name none.
    pub name: Option<String>,
    /// The file that it was written in; `None`: all of it was typed.
    pub file: Option<String>,
    /// What becomes of flows that it does not admit any more.
    pub on_reload: OnReload,
    /// How names are told.
    pub dns: DnsSettings,
    /// What of the gateway leads to the host's 127.0.0.1.
    #[serde(default)]
    pub host_loopback: Vec<LoopbackPorts>,
    /// Whether a VM is open by it so that its own can be learnt: it inspects nothing.
    #[serde(default)]
    pub is_learning: bool,
}

/// What a policy says of DNS.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DnsSettings {
    /// Whom questions go to.
    pub resolvers: Resolvers,
    /// Record types that may be asked for although they are refused by default (TXT, NULL, ANY),
    /// by number.
    pub types: Vec<u16>,
    /// An answer opens its addresses at least so long, seconds.
    pub ttl_floor_s: u32,
    /// And at most so long, seconds.
    pub ttl_ceiling_s: u32,
    /// Labels of a name that may be asked for, at most.
    pub max_labels: u8,
    /// Octets of each of them, at most.
    pub max_label_octets: u8,
    /// How much may be said by new names beneath wildcards.
    pub new_names: NewNames,
}

impl DnsSettings {
    /// What a name has too much of to be asked for.
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

/// RFC 1035 section 2.3.4.
const LONGEST_LABEL: u8 = 63;
/// As many labels as a name can have: RFC 1035's 255 bytes, two a label, less the root.
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

/// An answer opens its addresses at least so long, seconds: a client connects after it has heard,
/// and may keep an answer with TTL 0 for the connection at hand.
pub const FLOOR_S: u32 = 30;
/// And at most so long, seconds: as long as the resolver keeps an answer itself.
pub const CEILING_S: u32 = 86_400;
/// The port of DNS.
pub const DNS_PORT: u16 = 53;
/// Resolvers of a policy; more are not used.
pub const MAX_RESOLVERS: usize = 8;

/// Whom the questions of a policy's VMs go to.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Resolvers {
    /// The host's own resolvers, as they are now.
    #[default]
    Host,
    /// These, in this order; [`MAX_RESOLVERS`] at most.
    These(Vec<SocketAddr>),
    /// Nobody: every question is refused.
    Nobody,
}

/// How much a VM may say by new names beneath wildcards.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NewNames {
    /// Octets in a minute.
    pub octets_per_minute: u32,
    /// Octets at once, after a quiet time.
    pub burst_octets: u32,
}

impl Default for NewNames {
    /// Some 250 names of common length a minute, each with two types.
    fn default() -> Self {
        Self {
            octets_per_minute: 8 * 1_024,
            burst_octets: 32 * 1_024,
        }
    }
}
