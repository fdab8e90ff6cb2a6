//! What a policy file may say. The JSON schema is made from these types, and their comments are its
//! descriptions.
use std::{collections::BTreeMap, fmt, net::Ipv4Addr, ops::Range};

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, de};
use toml::Spanned;

use super::amount::{Amount, Count};

/// The JSON schema of a policy file.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(Document).to_value()
}

/// A policy of slipgate: where guests may go. At its top level it is the policy of all VMs that name
/// none of the named ones.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(title = "slipgate policy")]
pub struct Document {
    /// What happens to a flow that no rule matches. Must be given in every policy.
    #[schemars(with = "Option<DefaultText>")]
    pub default: Option<Spanned<DefaultText>>,
    /// What becomes of live flows that changed rules would not admit.
    pub on_reload: Option<ReloadText>,
    /// Tried in this order; the first that matches decides.
    #[schemars(with = "Vec<RuleEntry>")]
    pub rules: Vec<Spanned<RuleEntry>>,
    /// How much a VM may have.
    pub quotas: Quotas,
    /// How names are told.
    pub dns: Dns,
    /// Ports of the host that lead to a guest.
    #[schemars(with = "Vec<Forward>")]
    pub forward: Vec<Spanned<Forward>>,
    /// Ports of the gateway that lead to the host's 127.0.0.1. None unless listed.
    pub host_loopback: HostLoopback,
    /// Named policies, for VMs that name one.
    #[schemars(with = "BTreeMap<String, NamedPolicy>")]
    pub policy: BTreeMap<Spanned<String>, NamedPolicy>,
    /// Which named policy a VM has, by the VM's name.
    #[schemars(with = "BTreeMap<String, String>")]
    pub vms: BTreeMap<Spanned<String>, Spanned<String>>,
}

/// A policy for the VMs that name it: by `policy=NAME` in `--vm`, by `--policy-name`, or in `[vms]`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NamedPolicy {
    /// What happens to a flow that no rule matches. Must be given in every policy.
    #[schemars(with = "Option<DefaultText>")]
    pub default: Option<Spanned<DefaultText>>,
    /// What becomes of live flows that changed rules would not admit.
    pub on_reload: Option<ReloadText>,
    /// Tried in this order; the first that matches decides.
    #[schemars(with = "Vec<RuleEntry>")]
    pub rules: Vec<Spanned<RuleEntry>>,
    /// How much a VM may have.
    pub quotas: Quotas,
    /// How names are told.
    pub dns: Dns,
    /// Ports of the gateway that lead to the host's 127.0.0.1. None unless listed.
    pub host_loopback: HostLoopback,
}

/// What the default does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DefaultText {
    /// Admitted, unless it is to protected space.
    Allow,
    /// Refused.
    Deny,
}

/// What becomes of live flows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ReloadText {
    /// They end.
    Cut,
    /// They go on.
    Keep,
}

/// How far an inspected HTTP/1 connection is followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HttpText {
    /// Each request is held to the rule.
    Each,
    /// Only the first one is; what follows goes by the kernel.
    First,
}

/// One rule, or several of a kind: exactly one of `allow`, `inspect`, `deny`, `deny_file`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(extend("oneOf" = [
    { "required": ["allow"] },
    { "required": ["inspect"] },
    { "required": ["deny"] },
    { "required": ["deny_file"] },
]))]
pub struct RuleEntry {
    /// Admit flows to CIDR or NAME, `[:PORT[-PORT]][/tcp|udp|icmp]`.
    #[schemars(with = "Option<Patterns>")]
    pub allow: Option<Spanned<Patterns>>,
    /// Admit them, and hold each to the name that it says it is for.
    #[schemars(with = "Option<Patterns>")]
    pub inspect: Option<Spanned<Patterns>>,
    /// Refuse them.
    #[schemars(with = "Option<Patterns>")]
    pub deny: Option<Spanned<Patterns>>,
    /// Refuse what a file lists, one pattern a line; its path is relative to the policy file.
    #[schemars(with = "Option<String>")]
    pub deny_file: Option<Spanned<String>>,
    /// Of `inspect`: whether each request of an HTTP/1 connection is held to the rule, or the first.
    #[schemars(with = "Option<HttpText>")]
    pub http: Option<Spanned<HttpText>>,
    /// Why the rule is there: shown wherever it decides.
    pub comment: Option<String>,
}

/// One pattern, or a list of them.
#[derive(Clone, PartialEq, Eq, Debug, JsonSchema)]
#[schemars(untagged)]
pub enum Patterns {
    /// One.
    One(String),
    /// Several, tried in this order.
    Many(#[schemars(with = "Vec<String>")] Vec<Spanned<String>>),
}

impl Patterns {
    /// Each with its place; `whole`: the place of all.
    pub fn each(&self, whole: Range<usize>) -> Vec<(&str, Range<usize>)> {
        match self {
            Self::One(one) => vec![(one, whole)],
            Self::Many(many) => many
                .iter()
                .map(|text| (text.get_ref().as_str(), text.span()))
                .collect(),
        }
    }
}

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Patterns;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a pattern, or a list of patterns")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Patterns, E> {
                Ok(Patterns::One(text.to_owned()))
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Patterns, A::Error> {
                let mut many = Vec::new();
                while let Some(one) = seq.next_element()? {
                    many.push(one);
                }
                Ok(Patterns::Many(many))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// How much a VM may have. An amount is a number, or a text like "10M" (millions) or "64Ki".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Quotas {
    /// Flows at once.
    pub max_flows: Option<Count>,
    /// New flows per second on average, and as many at once.
    pub new_flows_per_second: Option<Count>,
    /// L3 bytes per second from the guest; 0: no limit.
    pub tx_bytes_per_second: Option<Amount>,
    /// L3 bytes per second to the guest; 0: no limit.
    pub rx_bytes_per_second: Option<Amount>,
    /// Packets per second from the guest, large ones counted as on the wire; 0: no limit.
    pub tx_packets_per_second: Option<Amount>,
    /// Packets per second to the guest; 0: no limit.
    pub rx_packets_per_second: Option<Amount>,
    /// Questions to DNS per second.
    pub dns_per_second: Option<Count>,
}

/// Whom questions go to, what may be asked for, and how answers are told.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Dns {
    /// Who is asked, `A` or `A:PORT`, in this order; or `"host"`, the host's own resolvers as they
    /// are; or `"none"`, and every question is refused. A named policy that does not say it has what
    /// the file's top level says, and else `"host"`.
    #[schemars(with = "Option<Resolvers>")]
    pub resolvers: Option<Spanned<Resolvers>>,
    /// Record types that may be asked for although they are refused with `default = "deny"`.
    pub types: Vec<RecordType>,
    /// An answer opens its addresses at least so long, seconds (30).
    pub ttl_floor_s: Option<u32>,
    /// And at most so long, seconds (86400).
    #[schemars(with = "Option<u32>")]
    pub ttl_ceiling_s: Option<Spanned<u32>>,
    /// Labels that a name which is asked for may have (127).
    #[schemars(range(min = 1, max = 127))]
    #[schemars(with = "Option<u8>")]
    pub max_labels: Option<Spanned<u8>>,
    /// Octets that each of its labels may have (63).
    #[schemars(range(min = 1, max = 63))]
    #[schemars(with = "Option<u8>")]
    pub max_label_octets: Option<Spanned<u8>>,
    /// Octets that a VM may say in a minute by asking for new names beneath wildcards (8Ki).
    pub new_name_octets_per_minute: Option<Count>,
    /// And at once, after a quiet time (32Ki).
    pub new_name_burst_octets: Option<Count>,
}

/// A record type by which a guest and a server could say anything to each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum RecordType {
    /// Text.
    Txt,
    /// Anything (RFC 1035).
    Null,
    /// All there is.
    Any,
}

impl RecordType {
    /// Its number.
    pub const fn number(self) -> u16 {
        match self {
            Self::Txt => 16,
            Self::Null => 10,
            Self::Any => 255,
        }
    }
}

/// Who is asked.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a list of resolvers' addresses, \"host\" or \"none\""
)]
pub enum Resolvers {
    /// In a word.
    Word(ResolversWord),
    /// These, in this order.
    These(Vec<String>),
}

/// `"host"`, `"none"`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResolversWord {
    /// The host's own.
    Host,
    /// Every question is refused.
    None,
}

/// Ports of the host that lead to a guest.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Forward {
    /// The VM; may be left out when there is one.
    pub vm: Option<String>,
    /// TCP or UDP.
    pub protocol: ForwardProtocol,
    /// The host's address [default: all].
    pub address: Option<Ipv4Addr>,
    /// The host's port, or a range `"9000-9010"`.
    pub host_port: Ports,
    /// The guest's port, or a range of the same length [default: the host's].
    pub guest_port: Option<Ports>,
}

impl Forward {
    /// As `--forward` has it.
    pub fn spec(&self) -> String {
        let vm = self.vm.as_ref().map(|vm| format!("{vm}="));
        let protocol = match self.protocol {
            ForwardProtocol::Tcp => "tcp",
            ForwardProtocol::Udp => "udp",
        };
        let address = self.address.map(|address| format!("{address}:"));
        let (host, guest) = (&self.host_port, self.guest_port.as_ref());
        format!(
            "{}{protocol}:{}{host}:{}",
            vm.unwrap_or_default(),
            address.unwrap_or_default(),
            guest.unwrap_or(host)
        )
    }
}

/// Ports of the gateway that lead to the host's 127.0.0.1.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HostLoopback {
    /// Where guests connect to, an address of their network [default: the gateway's].
    #[schemars(with = "Option<Ipv4Addr>")]
    pub address: Option<Spanned<Ipv4Addr>>,
    /// What leads there: the guest's ports, and the host's where they differ.
    #[schemars(with = "Vec<LoopbackEntry>")]
    pub ports: Vec<Spanned<LoopbackEntry>>,
}

/// A port, or a text `[ADDR:]PORT[-PORT][:PORT[-PORT]][/tcp|udp]`: the guest's ports, then the
/// host's. Without a protocol both are meant.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a port, or ports like \"9000-9010\" or \"8080:80/tcp\""
)]
pub enum LoopbackEntry {
    /// One port, the same on both sides.
    One(u16),
    /// As the flag has it.
    Text(String),
}

impl fmt::Display for LoopbackEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(port) => port.fmt(f),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// A forward's protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ForwardProtocol {
    /// Connections.
    Tcp,
    /// Datagrams.
    Udp,
}

/// A port, or a range.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a port, or a range of ports like \"9000-9010\"")]
pub enum Ports {
    /// One.
    One(u16),
    /// `A-B`.
    Range(String),
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(port) => port.fmt(f),
            Self::Range(range) => f.write_str(range),
        }
    }
}
