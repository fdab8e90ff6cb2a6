//! Bodies of requests and responses.
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use hyper::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use slipgate_ipc::{
    client::{GuestIpv6Status, Ipv6Mode, PolicyStatus, Room, VmDefinition, VmState, VmStatus},
    engine::{Silence, WhyAnswer},
};
use slipgate_policy::document::Quotas;

use crate::problem::Problem;

/// Definition of a VM; its name is in the path. What GET shows beside it (`name`, `id`, `state` and the
/// like) may be there, too, and changes nothing.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VmBody {
    /// The TAP that its VMM has open. Absent or empty: none, as in user mode.
    #[serde(default)]
    pub tap: TapChoice,
    /// MAC address of the guest; frames from other addresses are dropped. Absent: any.
    pub mac: Option<String>,
    /// IPv4 address of the guest. Absent: the daemon's `--guest-ip`.
    pub ip: Option<Ipv4Addr>,
    /// Whether the guest has IPv6. Absent: the daemon's `--ipv6`.
    pub ipv6: Option<Ipv6>,
    /// Prefix of the guest's IPv6 addresses, a /64; with `ipv6: routed` also its single address, a
    /// /128. Absent: the daemon's `--ipv6-prefix`, or with `ipv6: routed` one of the daemon's
    /// `--ipv6 routed:PREFIX`.
    pub ipv6_prefix: Option<String>,
    /// Its policy. Absent: the daemon's default policy.
    pub policy: Option<PolicyChoice>,
    /// The only device by which its flows leave; it need not exist yet, and no flow leaves while it
    /// does not. Absent: the daemon's `--uplink`.
    pub uplink: Option<String>,
    /// Its source addresses toward the world, of IPv4, IPv6 or both, each an address or a prefix.
    /// They must be the host's, and are this VM's alone. Absent: those of the policy, or as the
    /// host's routes choose.
    #[serde(default)]
    pub nat_addresses: Vec<String>,
    /// Limits that replace those of the policy.
    #[serde(default)]
    pub quotas: Quotas,
    /// Up to 64 ports of the host that lead to the guest, each in the form
    /// `tcp|udp:[ADDR:]PORT[-PORT]:PORT[-PORT]`.
    #[serde(default)]
    pub forwards: Vec<String>,
    /// Ports of the gateway that lead to the host's loopback, each in the form
    /// `[ADDR:]PORT[-PORT][:PORT[-PORT]][/tcp|udp]`, before those of the policy.
    #[serde(default)]
    pub host_loopback: Vec<String>,
    /// Silence after which the VM is idle, seconds; 0: it is not told. Absent: the daemon's
    /// `--idle-after`.
    pub idle_after: Option<u32>,
    /// Up to 8 labels, which slipgate does not interpret.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// Whether a guest has IPv6.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Ipv6 {
    /// The guest gets no IPv6.
    Off,
    /// It has, translated to the uplink's address.
    Nat,
    /// It has once its uplink leads to IPv6.
    Auto,
    /// It has, with its own addresses: the network routes its prefix to the host.
    Routed,
}

impl From<Ipv6> for Ipv6Mode {
    fn from(mode: Ipv6) -> Self {
        match mode {
            Ipv6::Off => Self::Off,
            Ipv6::Nat => Self::Nat,
            Ipv6::Auto => Self::Auto,
            Ipv6::Routed => Self::Routed,
        }
    }
}

impl From<Ipv6Mode> for Ipv6 {
    fn from(mode: Ipv6Mode) -> Self {
        match mode {
            Ipv6Mode::Off => Self::Off,
            Ipv6Mode::Nat => Self::Nat,
            Ipv6Mode::Auto => Self::Auto,
            Ipv6Mode::Routed => Self::Routed,
        }
    }
}

/// IPv6 of a guest at present.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct GuestIpv6 {
    /// Prefix of its addresses: a /64, or its single address, a /128.
    pub prefix: String,
    /// Address of the gateway and resolver.
    pub gateway: Ipv6Addr,
    /// Addresses that the guest uses, its link-local one first.
    pub addresses: Vec<Ipv6Addr>,
}

impl From<GuestIpv6Status> for GuestIpv6 {
    fn from(ipv6: GuestIpv6Status) -> Self {
        let GuestIpv6Status {
            prefix,
            gateway,
            addresses,
        } = ipv6;
        Self {
            prefix,
            gateway,
            addresses,
        }
    }
}

/// How a request names the TAP of a VM.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum TapChoice {
    /// Its name; it need not exist yet.
    Name(String),
    /// It is passed, open, with the request.
    Passed(PassedTap),
}

/// A TAP whose descriptor comes with the request, by SCM_RIGHTS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PassedTap {
    /// Always true: the field marks the form that passes a descriptor.
    pub descriptor: bool,
}

impl Default for TapChoice {
    fn default() -> Self {
        Self::Name(String::new())
    }
}

impl TapChoice {
    /// The descriptor that came with the request, if this says so.
    ///
    /// # Errors
    /// One came and this gives a name, or the other way round.
    pub fn with<F>(&self, passed: Option<F>) -> Result<Option<F>, Problem> {
        let detail = match (self, passed) {
            (Self::Passed(PassedTap { descriptor: true }), Some(passed)) => {
                return Ok(Some(passed));
            }
            (Self::Name(_), None) => return Ok(None),
            (Self::Name(_), Some(_)) => {
                "tap: a descriptor came with the request: give {\"descriptor\": true} in place of \
                 a name, or pass none"
            }
            (Self::Passed(_), _) => {
                "tap: give {\"descriptor\": true} and pass that of the open TAP by SCM_RIGHTS, \
                 or give its name"
            }
        };
        Err(Problem::new(StatusCode::BAD_REQUEST, detail))
    }

    /// The name; of a TAP that is passed the broker finds it out.
    fn into_name(self) -> String {
        match self {
            Self::Name(name) => name,
            Self::Passed(_) => String::new(),
        }
    }
}

/// A VM's policy: the name of one that the daemon has, or an object with the keys of
/// `[policy.NAME]` in a policy file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum PolicyChoice {
    /// Name of a policy.
    Name(String),
    /// A policy for VMs with this object alone.
    Inline(Map<String, Value>),
}

impl PolicyChoice {
    /// The name, or the text in TOML.
    fn into_parts(self) -> Result<(Option<String>, Option<String>), Problem> {
        match self {
            Self::Name(name) => Ok((Some(name), None)),
            Self::Inline(policy) => match toml::to_string(&policy) {
                Ok(text) => Ok((None, Some(text))),
                Err(e) => {
                    let detail = format!("policy: a value has no form in a policy file: {e}");
                    Err(Problem::new(StatusCode::BAD_REQUEST, detail))
                }
            },
        }
    }

    /// The choice in a definition, which the broker has checked.
    fn of(policy: Option<String>, inline: Option<String>) -> Option<Self> {
        let own = inline.and_then(|text| toml::from_str(&text).ok());
        own.map(Self::Inline).or(policy.map(Self::Name))
    }
}

/// Changes of a VM's definition (RFC 7396): what is absent stays, and what is null is as if it had
/// never been given.
#[derive(Clone, PartialEq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VmPatch {
    /// Name of another TAP for the VM.
    pub tap: Option<String>,
    /// Another MAC address of the guest.
    pub mac: Option<String>,
    /// Another policy; the keys of an object are merged with those of the VM's own policy.
    pub policy: Option<PolicyChoice>,
    /// Another address of the guest; possible while it has none of its own only.
    pub ip: Option<Ipv4Addr>,
    /// Whether the guest has IPv6; possible to set as it is only.
    pub ipv6: Option<Ipv6>,
    /// Prefix of the guest's IPv6 addresses; possible to set as it is only.
    pub ipv6_prefix: Option<String>,
    /// Another uplink; flows that can't leave by it end.
    pub uplink: Option<String>,
    /// All source addresses that there are to be; flows with another one end, unless its policy
    /// keeps flows.
    pub nat_addresses: Option<Vec<String>>,
    /// Other limits; those that are absent stay.
    pub quotas: Option<Quotas>,
    /// All forwards that there are to be.
    pub forwards: Option<Vec<String>>,
    /// All ports of the host's loopback that there are to be.
    pub host_loopback: Option<Vec<String>>,
    /// Another silence after which it is idle, seconds; 0: it is not told.
    pub idle_after: Option<u32>,
    /// Labels to add or change; `null` removes one.
    pub labels: Option<BTreeMap<String, Option<String>>>,
}

/// A VM with its present state.
#[derive(Clone, PartialEq, Debug, Serialize, JsonSchema)]
pub struct Vm {
    /// Name of the VM.
    pub name: String,
    /// Id of the VM, never reused in this network namespace.
    pub id: u32,
    /// waiting (there is no TAP of its name), starting, served, frozen, or asleep.
    #[schemars(extend("enum" = ["waiting", "starting", "served", "frozen", "asleep"]))]
    pub state: &'static str,
    /// Whether it is idle, if that is looked for.
    pub idle: bool,
    /// Its last packets and live flows; only in answers to GET.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activity: Option<Activity>,
    /// Number of definitions that it has had since the daemon started.
    pub generation: u64,
    /// Number of the engine that serves it, from 0 (`slipgate serve --workers`).
    pub worker: u32,
    /// Name of its TAP; empty: it has none, as in user mode.
    pub tap: String,
    /// MAC address that the guest must use, if one is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// IPv4 address of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip: Option<Ipv4Addr>,
    /// Whether the guest has IPv6, if the definition says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6>,
    /// Prefix of the guest's IPv6 addresses, if the definition says one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ipv6_prefix: Option<String>,
    /// IPv6 of the guest at present.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_ipv6: Option<GuestIpv6>,
    /// Its policy, if it has another than the daemon's default policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyChoice>,
    /// The only device by which its flows leave, if it names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uplink: Option<String>,
    /// Whether that device does not exist now, so that no flow leaves.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lacks_uplink: bool,
    /// Source addresses toward the world that are its alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nat_addresses: Vec<String>,
    /// Limits that replace those of its policy.
    pub quotas: Quotas,
    /// Ports of the host that lead to the guest.
    pub forwards: Vec<String>,
    /// Those that are not served, because others had their ports when the daemon started; the same
    /// PUT takes them when they are free.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unserved_forwards: Vec<String>,
    /// Ports of the gateway that lead to the host's loopback, before those of its policy.
    pub host_loopback: Vec<String>,
    /// Silence after which it is idle, seconds, if it says one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_after: Option<u32>,
    /// Labels of the VM: free text by key.
    pub labels: BTreeMap<String, String>,
    /// Whether it is served for as long as the command that brought it runs.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub tied: bool,
}

/// Last packets of a VM that count as its activity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Activity {
    /// Time since the guest's last packet, ms; null if it has sent none.
    pub last_from_guest_ms: Option<u64>,
    /// Time since the last packet to the guest, ms; null if there was none.
    pub last_to_guest_ms: Option<u64>,
    /// Number of live flows, without those that the engine relays.
    pub flows: u64,
}

impl From<Silence> for Activity {
    fn from(silence: Silence) -> Self {
        Self {
            last_from_guest_ms: silence.last_from_guest_ms,
            last_to_guest_ms: silence.last_to_guest_ms,
            flows: silence.flows,
        }
    }
}

/// Answer of the health check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Health {
    /// Version of the slipgate that runs.
    pub version: &'static str,
    /// Number of VMs that the daemon serves.
    pub vms: usize,
    /// Number of VMs whose TAP is up.
    pub served: usize,
    /// Number of VMs that there can be, in all slipgate processes of the network namespace
    /// (`--max-vms`).
    pub max_vms: u32,
    /// Number of rules in force, three of each policy's own included.
    pub rules: u32,
    /// Number of rules that there can be, likewise (`--max-rules`).
    pub max_rules: u32,
    /// Devices at which somebody else's program runs before slipgate's, and may keep packets from it.
    pub displaced: Vec<String>,
}

/// Number of flows that were ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Cut {
    /// Number of flows that the request ended.
    pub flows: u64,
}

/// Bounds of a capture; without them it ends with the client, or with what is captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CaptureBody {
    /// Number of packets after which it ends.
    #[schemars(range(min = 1))]
    pub packets: Option<u64>,
    /// Time after which it ends, seconds.
    #[schemars(range(min = 1))]
    pub seconds: Option<u64>,
}

/// A policy that was put.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Policy {
    /// Name of the policy.
    pub name: String,
    /// Number of times that a policy of this name was put since the daemon started.
    pub generation: u64,
    /// Its text, in TOML.
    pub text: String,
}

/// A policy is in force.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct PolicyPut {
    /// Number of times that a policy of this name was put since the daemon started.
    pub generation: u64,
    /// Number of flows that were cut.
    pub cut: u64,
    /// Number of flows of the VMs that it concerns that continue.
    pub kept: u64,
}

/// Query parameters of the request `why`: a VM and a destination.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WhyQuery {
    /// Address that the guest would connect to.
    pub address: IpAddr,
    /// Port that the guest would connect to.
    #[serde(default)]
    pub port: u16,
    /// tcp (the default), udp or icmp.
    pub proto: Option<String>,
    /// Name that the guest would have asked for before.
    pub name: Option<String>,
}

/// Decision about a flow.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Why {
    /// Whether the flow would be admitted.
    pub admitted: bool,
    /// The rule that decides.
    pub rule: String,
    /// Reason of a refusal, as in `refused` of the counters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
    /// Fate of the flow, in words: admitted, relayed or refused.
    pub outcome: String,
    /// How the decision comes about, in sentences.
    pub explanation: String,
    /// Source address, next hop and interface of an admitted flow that leaves the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub via: Option<String>,
}

/// Parameters of the list of flows.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FlowsQuery {
    /// Only this VM's flows.
    pub vm: Option<String>,
}

/// What [`Vm`] has besides a definition.
const OF_STATE: [&str; 11] = [
    "name",
    "id",
    "state",
    "idle",
    "activity",
    "generation",
    "worker",
    "guest_ipv6",
    "lacks_uplink",
    "unserved_forwards",
    "tied",
];

impl VmBody {
    /// The definition in a body for a VM of this name, without the state that GET shows beside it.
    ///
    /// # Errors
    /// The body has another form, or is of another VM.
    pub fn without_state(mut body: Value, name: &str) -> Result<Self, String> {
        if let Value::Object(fields) = &mut body {
            if fields.get("name").is_some_and(|of| of != name) {
                return Err(format!("name: the path is of the VM {name:?}"));
            }
            for field in OF_STATE {
                fields.remove(field);
            }
        }
        serde_json::from_value(body).map_err(|e| e.to_string())
    }

    /// The definition of a VM of this name.
    ///
    /// # Errors
    /// The policy contains what has no form in TOML.
    pub fn named(self, name: String) -> Result<VmDefinition, Problem> {
        let Self {
            tap,
            mac,
            ip,
            ipv6,
            ipv6_prefix,
            policy,
            uplink,
            nat_addresses,
            quotas,
            forwards,
            host_loopback,
            idle_after,
            labels,
        } = self;
        let (policy, inline_policy) = match policy.map(PolicyChoice::into_parts) {
            Some(parts) => parts?,
            None => (None, None),
        };
        Ok(VmDefinition {
            name,
            tap: tap.into_name(),
            mac,
            ip,
            ipv6: ipv6.map(Into::into),
            ipv6_prefix,
            policy,
            inline_policy,
            uplink,
            nat_addresses,
            quotas,
            forwards,
            host_loopback,
            idle_after,
            labels,
            tied: false,
        })
    }
}

impl From<VmDefinition> for VmBody {
    fn from(vm: VmDefinition) -> Self {
        let VmDefinition {
            name: _,
            tap,
            mac,
            ip,
            ipv6,
            ipv6_prefix,
            policy,
            inline_policy,
            uplink,
            nat_addresses,
            quotas,
            forwards,
            host_loopback,
            idle_after,
            labels,
            tied: _,
        } = vm;
        Self {
            tap: TapChoice::Name(tap),
            mac,
            ip,
            ipv6: ipv6.map(Into::into),
            ipv6_prefix,
            policy: PolicyChoice::of(policy, inline_policy),
            uplink,
            nat_addresses,
            quotas,
            forwards,
            host_loopback,
            idle_after,
            labels,
        }
    }
}

/// Applies a merge patch (RFC 7396, section 2).
pub(crate) fn merge(target: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    if let Value::Object(target) = target {
        for (key, value) in patch {
            match value {
                Value::Null => drop(target.remove(&key)),
                value => merge(target.entry(key).or_insert(Value::Null), value),
            }
        }
    }
}

impl From<VmStatus> for Vm {
    fn from(vm: VmStatus) -> Self {
        let VmDefinition {
            name,
            tap,
            mac,
            ip,
            ipv6,
            ipv6_prefix,
            policy,
            inline_policy,
            uplink,
            nat_addresses,
            quotas,
            forwards,
            host_loopback,
            idle_after,
            labels,
            tied,
        } = vm.definition;
        Self {
            name,
            id: vm.id.get(),
            generation: vm.generation,
            worker: vm.worker,
            state: vm.state.name(),
            idle: vm.idle,
            activity: None,
            tap,
            mac,
            ip,
            ipv6: ipv6.map(Into::into),
            ipv6_prefix,
            guest_ipv6: vm.guest_ipv6.map(Into::into),
            policy: PolicyChoice::of(policy, inline_policy),
            uplink,
            nat_addresses,
            quotas,
            forwards,
            lacks_uplink: vm.lacks_uplink,
            unserved_forwards: vm.unserved_forwards,
            host_loopback,
            idle_after,
            labels,
            tied,
        }
    }
}

impl Health {
    /// The health of a daemon with these VMs, whose programs are not the first at these devices.
    pub fn of(vms: &[VmStatus], room: Room, displaced: Vec<String>) -> Self {
        let is_up = |vm: &&VmStatus| {
            matches!(
                vm.state,
                VmState::Served | VmState::Frozen | VmState::Asleep
            )
        };
        Self {
            version: env!("CARGO_PKG_VERSION"),
            vms: vms.len(),
            served: vms.iter().filter(is_up).count(),
            max_vms: room.vms.most,
            rules: room.rules.used,
            max_rules: room.rules.most,
            displaced,
        }
    }
}

impl From<WhyAnswer> for Why {
    fn from(answer: WhyAnswer) -> Self {
        Self {
            admitted: answer.admitted,
            rule: answer.rule,
            refusal: answer.refusal,
            outcome: answer.outcome,
            explanation: answer.explanation,
            via: answer.via,
        }
    }
}

impl From<PolicyStatus> for Policy {
    fn from(policy: PolicyStatus) -> Self {
        Self {
            name: policy.name,
            generation: policy.generation,
            text: policy.text,
        }
    }
}
