//! Policy: which destinations a guest may reach. A policy is a list of rules in the order given,
//! safe defaults beneath them, and a default action.
//!
//! # How a destination is judged
//!
//! 1. Rules are tried in the order given; the first that matches decides. A deny file is one rule
//!    at its place, whatever its length.
//! 2. A destination in *protected* space ([`Space`]: the host itself, guests' networks, private,
//!    link-local, metadata, multicast, ...) is opened only by a specific allow: one whose prefix
//!    lies within the most specific protected range around the address. A broader allow
//!    (`0.0.0.0/0`) does not match there. So `--allow 10.0.0.0/8` opens the private network, but
//!    neither the host's own 10.1.2.3 nor a metadata service; `--allow 10.1.2.3` does.
//! 3. If nothing matched, a protected destination is refused; any other gets the default action.
//!
//! Everything is compiled when the policy is made ([`PrefixMap`], a port table per prefix), so a
//! decision costs about the same with one rule and with thousands.
//!
//! # Resolvers that bypass the rules by name
//!
//! Where DNS questions are judged by name, the port of DNS over TLS and QUIC (853) and the
//! addresses of public resolvers are refused in the same way, unless a specific allow opens them:
//! one that gives port 853 alone, or a single address with ports, or the name of a resolver.
//!
//! # Names
//!
//! A rule by name matches a connection only by way of DNS. The engine's name gate refuses questions
//! for names that no rule allows. An answer for an allowed name opens its addresses to the VM that
//! asked, under the rules about that name, for the answer's TTL. A destination is judged by address
//! first; one that a rule by address denies or the safe defaults protect stays refused. Only then
//! is it judged by the names that opened it: one name that allows is enough.
#![deny(unsafe_code)]

mod compile;
#[cfg(test)]
mod cpu_time_test;
mod decide;
pub mod document;
mod explain;
mod plain;
mod resolv_conf;
mod rule;
#[cfg(any(test, feature = "strategies"))]
pub mod strategies;
pub mod tools;

pub use compile::{
    dns_bypass::{is_canary, name_means},
    identity::{Described, Identity, Meaning},
    policy::{PatternRef, Policy},
    protected::Space,
    set::{CompiledError, MOST_POLICIES, PolicySet},
};
pub use decide::{
    exfil_budget::{Asker, Chosen, Exceeded, RecordedAsker},
    host_loopback::Lead,
    inspection::{InspectionRefusal, RefusedCounts},
    token_bucket::TokenBucket,
};
pub use explain::{destination::Explanation, offline::Standing};
pub use plain::{one_line, plain};
pub use resolv_conf::parse_resolv_conf;
pub use rule::{
    Action, Decision, Destination, LocalAddresses, Rule, RuleId,
    address_pool::{AddressPool, MOST_POOL_ADDRESSES, PoolError},
    deny_file::{DenyFile, DenyFileError},
    embedded::embedded,
    host_loopback::{LoopbackError, LoopbackPorts, MOST_LOOPBACK_ENTRIES},
    idle::Idle,
    name::{MAX_LEN as MAX_NAME_LEN, Name},
    name_pattern::{NameError, NamePattern, wire},
    nat::{Filtering, Mapping, NatBehaviour, NatSettings},
    pattern::{Pattern, PatternError},
    prefix_map::PrefixMap,
    settings::{
        AnnotatedRule, CEILING_S, DNS_PORT, DnsSettings, Egress, EgressRoutes, FLOOR_S, Http,
        MAX_RESOLVERS, NewNames, Note, OnReload, Resolvers, Settings,
    },
    sleep::Sleep,
    timers::Timers,
};
