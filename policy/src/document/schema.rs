//! Contents of a policy file. The JSON schema is made from these types; their comments are its
//! descriptions.
use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, Ipv4Addr},
    ops::Range,
};

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de};
use toml::Spanned;

use super::amount::{Amount, Count};
use crate::{Filtering, Http, Mapping, OnReload};

/// Returns the JSON schema of a policy file.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(Document).to_value()
}

/// A policy of slipgate: where guests may go. The top level is the policy of all VMs that name no
/// other one.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(title = "slipgate policy")]
pub struct Document {
    /// Action for a flow that no rule matches. Must be given in every policy.
    #[schemars(with = "Option<DefaultText>")]
    pub default: Option<Spanned<DefaultText>>,
    /// Treatment of established flows that changed rules would not admit.
    pub on_reload: Option<OnReload>,
    /// Rules, tried in this order; the first that matches decides.
    #[schemars(with = "Vec<RuleEntry>")]
    pub rules: Vec<Spanned<RuleEntry>>,
    /// Resource limits of each VM.
    pub quotas: Quotas,
    /// Resolution of names by DNS.
    pub dns: Dns,
    /// Idle time-outs of flows.
    pub timers: Timers,
    /// How translated ports behave toward the world.
    pub nat: Nat,
    /// Source addresses toward the world, each an address or a prefix, of either family. Every VM
    /// has one of each family for all its flows. They must be this host's own. None: the host's
    /// routes choose.
    #[schemars(with = "Vec<String>")]
    pub nat_addresses: Vec<Spanned<String>>,
    /// How flows leave the host.
    pub egress: Egress,
    /// Bounds on the packets that are held for a VM while it sleeps.
    pub sleep: Sleep,
    /// What does not count as activity of a VM.
    pub idle: Idle,
    /// Ports of the host that lead to a guest.
    #[schemars(with = "Vec<Forward>")]
    pub forward: Vec<Spanned<Forward>>,
    /// Ports of the gateway that lead to the host's loopback. None by default.
    pub host_loopback: HostLoopback,
    /// Named policies, for the VMs that name one.
    #[schemars(with = "BTreeMap<String, NamedPolicy>")]
    pub policy: BTreeMap<Spanned<String>, NamedPolicy>,
    /// Name of the policy of each VM, by the VM's name.
    #[schemars(with = "BTreeMap<String, String>")]
    pub vms: BTreeMap<Spanned<String>, Spanned<String>>,
}

impl Document {
    /// Returns what the top level says, as a named policy says it.
    pub(super) fn top_level(&self) -> NamedPolicy {
        NamedPolicy {
            default: self.default.clone(),
            on_reload: self.on_reload,
            rules: self.rules.clone(),
            quotas: self.quotas,
            dns: self.dns.clone(),
            timers: self.timers.clone(),
            nat: self.nat.clone(),
            nat_addresses: self.nat_addresses.clone(),
            egress: self.egress.clone(),
            sleep: self.sleep.clone(),
            idle: self.idle.clone(),
            host_loopback: self.host_loopback.clone(),
        }
    }
}

/// A policy for the VMs that name it: `policy=NAME` in `--vm`, `--policy-name`, or `[vms]`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NamedPolicy {
    /// Action for a flow that no rule matches. Must be given in every policy.
    #[schemars(with = "Option<DefaultText>")]
    pub default: Option<Spanned<DefaultText>>,
    /// Treatment of established flows that changed rules would not admit.
    pub on_reload: Option<OnReload>,
    /// Rules, tried in this order; the first that matches decides.
    #[schemars(with = "Vec<RuleEntry>")]
    pub rules: Vec<Spanned<RuleEntry>>,
    /// Resource limits of each VM.
    pub quotas: Quotas,
    /// Resolution of names by DNS.
    pub dns: Dns,
    /// Idle time-outs of flows.
    pub timers: Timers,
    /// How translated ports behave toward the world.
    pub nat: Nat,
    /// Source addresses toward the world, each an address or a prefix, of either family. Every VM
    /// has one of each family for all its flows. They must be this host's own. None: the host's
    /// routes choose.
    #[schemars(with = "Vec<String>")]
    pub nat_addresses: Vec<Spanned<String>>,
    /// How flows leave the host.
    pub egress: Egress,
    /// Bounds on the packets that are held for a VM while it sleeps.
    pub sleep: Sleep,
    /// What does not count as activity of a VM.
    pub idle: Idle,
    /// Ports of the gateway that lead to the host's loopback. None by default.
    pub host_loopback: HostLoopback,
}

/// Action for a flow that no rule matches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DefaultText {
    /// The flow is admitted, unless its destination is in protected space.
    Allow,
    /// The flow is refused.
    Deny,
}

/// One rule, or several with the same action: exactly one of `allow`, `inspect`, `deny`,
/// `deny_file`.
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
    /// Admit flows to these, and require that the name each gives is allowed too.
    #[schemars(with = "Option<Patterns>")]
    pub inspect: Option<Spanned<Patterns>>,
    /// Refuse flows to these.
    #[schemars(with = "Option<Patterns>")]
    pub deny: Option<Spanned<Patterns>>,
    /// Refuse flows to the patterns in a file, one per line. The path is relative to the policy
    /// file.
    #[schemars(with = "Option<String>")]
    pub deny_file: Option<Spanned<String>>,
    /// With `inspect`: whether each request of an HTTP/1 connection must comply with the rule, or
    /// the first only.
    #[schemars(with = "Option<Http>")]
    pub http: Option<Spanned<Http>>,
    /// Reason for the rule, shown wherever it decides.
    pub comment: Option<String>,
}

/// One pattern, or a list of them.
#[derive(Clone, PartialEq, Eq, Debug, JsonSchema)]
#[schemars(untagged)]
pub enum Patterns {
    /// One pattern, as a string.
    One(String),
    /// Several patterns, tried in this order.
    Many(#[schemars(with = "Vec<String>")] Vec<Spanned<String>>),
}

impl Patterns {
    /// Returns each pattern with its place in the file. `whole`: the place of the value.
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

/// Resource limits of each VM. An amount is a number, or a text like "10M" (millions) or "64Ki".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Quotas {
    /// Maximum number of concurrent flows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_flows: Option<Count>,
    /// New flows per second: average rate, and burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_flows_per_second: Option<Count>,
    /// L3 bytes per second from the guest; 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tx_bytes_per_second: Option<Amount>,
    /// L3 bytes per second to the guest; 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rx_bytes_per_second: Option<Amount>,
    /// Packets per second from the guest, large ones counted as the segments on the wire; 0: no
    /// limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tx_packets_per_second: Option<Amount>,
    /// Packets per second to the guest; 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rx_packets_per_second: Option<Amount>,
    /// DNS questions per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_per_second: Option<Count>,
    /// L3 bytes from the guest in all, or per day; 0: no budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tx_bytes: Option<Amount>,
    /// L3 bytes to the guest in all, or per day; 0: no budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rx_bytes: Option<Amount>,
    /// Time for which these budgets are: all of the VM's, or each day (UTC).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per: Option<BytesPer>,
    /// Consequence of a spent budget, besides that new flows are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_end: Option<BytesEnd>,
}

/// Time for which a budget of bytes is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BytesPer {
    /// As long as slipgate knows the VM.
    All,
    /// A calendar day, UTC.
    Day,
}

/// Consequence of a spent budget of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BytesEnd {
    /// Nothing passes beyond it, and flows are cut.
    Cut,
    /// Established flows go on.
    Refuse,
    /// Nothing passes beyond it, and the VM is frozen.
    Freeze,
}

impl Quotas {
    /// These limits, and where one is not given, that of `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            max_flows: self.max_flows.or(other.max_flows),
            new_flows_per_second: self.new_flows_per_second.or(other.new_flows_per_second),
            tx_bytes_per_second: self.tx_bytes_per_second.or(other.tx_bytes_per_second),
            rx_bytes_per_second: self.rx_bytes_per_second.or(other.rx_bytes_per_second),
            tx_packets_per_second: self.tx_packets_per_second.or(other.tx_packets_per_second),
            rx_packets_per_second: self.rx_packets_per_second.or(other.rx_packets_per_second),
            dns_per_second: self.dns_per_second.or(other.dns_per_second),
            tx_bytes: self.tx_bytes.or(other.tx_bytes),
            rx_bytes: self.rx_bytes.or(other.rx_bytes),
            bytes_per: self.bytes_per.or(other.bytes_per),
            bytes_end: self.bytes_end.or(other.bytes_end),
        }
    }
}

/// Resolvers, permitted questions, and lifetimes of answers.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Dns {
    /// Resolvers, `A` or `A:PORT` (of IPv6 `[A]:PORT`), in this order; or `"host"`: the host's own
    /// resolvers, as currently configured; or `"none"`: every question is refused. A named policy
    /// without this key has that of the file's top level; the default is `"host"`.
    #[schemars(with = "Option<Resolvers>")]
    pub resolvers: Option<Spanned<Resolvers>>,
    /// Record types that may be asked for although they are refused with `default = "deny"`.
    pub types: Vec<RecordType>,
    /// Shortest time for which an answer opens its addresses, seconds (30).
    pub ttl_floor_s: Option<u32>,
    /// Longest time for which an answer opens its addresses, seconds (86400).
    #[schemars(with = "Option<u32>")]
    pub ttl_ceiling_s: Option<Spanned<u32>>,
    /// Maximum number of labels of a name that is asked for (127).
    #[schemars(range(min = 1, max = 127))]
    #[schemars(with = "Option<u8>")]
    pub max_labels: Option<Spanned<u8>>,
    /// Maximum length of each of its labels, octets (63).
    #[schemars(range(min = 1, max = 63))]
    #[schemars(with = "Option<u8>")]
    pub max_label_octets: Option<Spanned<u8>>,
    /// Octets that a VM may convey per minute by asking for new names beneath wildcards, and as many
    /// by its choice among names asked for before (8Ki).
    pub new_name_octets_per_minute: Option<Count>,
    /// Burst of these octets after an idle period (32Ki).
    pub new_name_burst_octets: Option<Count>,
}

/// Idle time-outs of flows, seconds.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Timers {
    /// Of an established TCP connection (7440).
    #[schemars(range(min = 7440, max = 604_800), with = "Option<u32>")]
    pub tcp_established_s: Option<Spanned<u32>>,
    /// Of a TCP connection that is not established yet (240).
    #[schemars(range(min = 240, max = 604_800), with = "Option<u32>")]
    pub tcp_opening_s: Option<Spanned<u32>>,
    /// Of a TCP connection that was closed by one side or both, or reset (240).
    #[schemars(range(min = 240, max = 604_800), with = "Option<u32>")]
    pub tcp_closing_s: Option<Spanned<u32>>,
    /// Of a UDP flow (300).
    #[schemars(range(min = 120, max = 604_800), with = "Option<u32>")]
    pub udp_s: Option<Spanned<u32>>,
    /// Of an ICMP query (60).
    #[schemars(range(min = 60, max = 604_800), with = "Option<u32>")]
    pub icmp_s: Option<Spanned<u32>>,
}

/// How translated ports behave toward the world, by protocol, in the terms of RFC 4787. For both
/// families, in hybrid mode; needs `--eim-ports`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Nat {
    /// Behaviour of UDP's ports.
    pub udp: NatOfProtocol,
    /// Behaviour of TCP's ports.
    pub tcp: NatOfProtocol,
}

/// How flows leave the host.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Egress {
    /// The only device by which flows leave, for VMs that name none of their own. None: the uplink
    /// of all VMs.
    #[schemars(with = "Option<String>")]
    pub uplink: Option<Spanned<String>>,
    /// Routing table whose routes the flows leave by, its number or the device of a VRF. None: the
    /// table main.
    #[schemars(with = "Option<EgressTable>")]
    pub table: Option<Spanned<EgressTable>>,
    /// Mark, from 1 on, by which the host's rules (`ip rule`) choose the routes. Not together with a
    /// table.
    #[schemars(with = "Option<u32>")]
    pub mark: Option<Spanned<u32>>,
    /// Whose routes the flows leave by, where no table is given. None: those of `--egress-routes`,
    /// or of the uplink.
    #[schemars(with = "Option<RoutesOf>")]
    pub routes: Option<Spanned<RoutesOf>>,
}

/// Whose routes flows leave by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RoutesOf {
    /// Those of the table main by the uplink of all VMs.
    Uplink,
    /// Those that the host's own packets would take, by whatever device: its rules (`ip rule`) and all
    /// their tables.
    Host,
}

impl RoutesOf {
    /// Returns the name that policy files and flags have for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uplink => "uplink",
            Self::Host => "host",
        }
    }
}

/// A routing table of the host.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "the number of a routing table, or the name of a VRF's device"
)]
pub enum EgressTable {
    /// Number of the table.
    Number(u32),
    /// The VRF that it belongs to, by the name of the device.
    Vrf(String),
}

/// Behaviour of the translated ports of one protocol.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NatOfProtocol {
    /// Whether all destinations see the same port of a guest's port (address-and-port-dependent:
    /// they do not).
    pub mapping: Option<Mapping>,
    /// Who may send to such a port (address-and-port-dependent: whom the guest has sent to). Every
    /// peer must be one to which the rules let the guest send.
    #[schemars(with = "Option<Filtering>")]
    pub filtering: Option<Spanned<Filtering>>,
    /// Whether guests of the host reach each other, and forwards, by their translated addresses (true
    /// where all destinations see the same port). Both guests' policies must say so.
    #[schemars(with = "Option<bool>")]
    pub hairpin: Option<Spanned<bool>>,
}

/// Bounds on the packets that are held for a VM while it sleeps (`slipgate sleep`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Sleep {
    /// Most frames held (128).
    #[schemars(range(min = 1, max = 1000), with = "Option<u32>")]
    pub packets: Option<Spanned<u32>>,
    /// Most bytes of these (262144).
    #[schemars(range(min = 1, max = 16_777_216), with = "Option<u32>")]
    pub bytes: Option<Spanned<u32>>,
    /// Time for which each is held, seconds (60).
    #[schemars(range(min = 1, max = 3600), with = "Option<u32>")]
    pub patience_s: Option<Spanned<u32>>,
}

/// What does not count as activity of a VM, for events and figures of idle VMs.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Idle {
    /// Packets that keep no VM busy. None by default: all count that the guest sends, and all that it
    /// accepts.
    pub ignores: Vec<Ignored>,
}

/// Packets that keep no VM busy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Ignored {
    /// TCP keep-alives, of either side, and their answers.
    Keepalive,
    /// What the guest sends and is refused: by a rule, a quota, or for want of a route.
    Refused,
}

/// A record type by which a guest and a server could exchange arbitrary data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum RecordType {
    /// Text strings (RFC 1035).
    Txt,
    /// Arbitrary data (RFC 1035).
    Null,
    /// All records of a name.
    Any,
}

impl RecordType {
    /// Returns the number of the type.
    pub const fn number(self) -> u16 {
        match self {
            Self::Txt => 16,
            Self::Null => 10,
            Self::Any => 255,
        }
    }
}

/// Resolvers that questions are forwarded to.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a list of resolvers' addresses, \"host\" or \"none\""
)]
pub enum Resolvers {
    /// A word that stands for resolvers.
    Word(ResolversWord),
    /// Addresses of resolvers, in this order.
    These(Vec<String>),
}

/// A word in the place of a list of resolvers: `"host"` or `"none"`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResolversWord {
    /// The host's own resolvers.
    Host,
    /// No resolver: every question is refused.
    None,
}

/// Ports of the host that lead to a guest.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Forward {
    /// Name of the VM; may be omitted if there is only one.
    pub vm: Option<String>,
    /// Protocol of the ports: TCP or UDP.
    pub protocol: ForwardProtocol,
    /// Address of the host [default: all]; `"own"`: the guest's own addresses of IPv6.
    pub address: Option<ForwardAddress>,
    /// Port of the host, or a range `"9000-9010"`.
    pub host_port: Ports,
    /// Port of the guest, or a range of the same length [default: the host's].
    pub guest_port: Option<Ports>,
}

impl Forward {
    /// Returns the forward as the value of `--forward`.
    pub fn spec(&self) -> String {
        let vm = self.vm.as_ref().map(|vm| format!("{vm}="));
        let protocol = match self.protocol {
            ForwardProtocol::Tcp => "tcp",
            ForwardProtocol::Udp => "udp",
        };
        let address = self.address.map(|address| match address {
            ForwardAddress::Word(ForwardWord::Own) => "own:".to_owned(),
            ForwardAddress::This(IpAddr::V4(address)) => format!("{address}:"),
            ForwardAddress::This(IpAddr::V6(address)) => format!("[{address}]:"),
        });
        let (host, guest) = (&self.host_port, self.guest_port.as_ref());
        format!(
            "{}{protocol}:{}{host}:{}",
            vm.unwrap_or_default(),
            address.unwrap_or_default(),
            guest.unwrap_or(host)
        )
    }
}

/// Address that the world connects to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "an IP address or \"own\"")]
pub enum ForwardAddress {
    /// A word that stands for addresses.
    Word(ForwardWord),
    /// An address of the host, or of the guest's routed prefix.
    This(IpAddr),
}

/// A word in the place of an address: `"own"`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ForwardWord {
    /// All addresses of the guest's routed prefix, without translation.
    Own,
}

/// Ports of the gateway that lead to the host's loopback.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HostLoopback {
    /// Address that guests connect to, in their network [default: the gateway's].
    #[schemars(with = "Option<Ipv4Addr>")]
    pub address: Option<Spanned<Ipv4Addr>>,
    /// Ports that lead there: the guest's, and the host's where they differ.
    #[schemars(with = "Vec<LoopbackEntry>")]
    pub ports: Vec<Spanned<LoopbackEntry>>,
}

/// A port, or a text `[ADDR:]PORT[-PORT][:PORT[-PORT]][/tcp|udp]`: the guest's ports, then the
/// host's. Without a protocol, both TCP and UDP.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a port, or ports like \"9000-9010\" or \"8080:80/tcp\""
)]
pub enum LoopbackEntry {
    /// One port, the same on both sides.
    One(u16),
    /// An entry in the form of the flag.
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

/// Protocol of a forward.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ForwardProtocol {
    /// Forwards TCP connections.
    Tcp,
    /// Forwards UDP datagrams.
    Udp,
}

/// A port, or a range of ports.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a port, or a range of ports like \"9000-9010\"")]
pub enum Ports {
    /// One port, as a number.
    One(u16),
    /// A range `A-B` of ports.
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
