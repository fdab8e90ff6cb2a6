//! Where a guest may go: rules in the order typed, safe defaults beneath them, and a default.
//!
//! # How a destination is judged
//!
//! 1. Rules are tried in the order typed; the first that matches decides. A deny file is one rule
//!    at its place, whatever its length.
//! 2. A destination in *protected* space ([`Space`]: the host itself, guests' networks, private,
//!    link-local, metadata, multicast, ...) is opened only by an allow that means it: one whose
//!    prefix lies within the most specific protected range around the address. A broader allow
//!    (`0.0.0.0/0`) does not match there. So `--allow 10.0.0.0/8` opens the private network, and
//!    still neither the host's own 10.1.2.3 nor a metadata service; `--allow 10.1.2.3` does.
//! 3. If nothing matched, a protected destination is refused; any other gets the default.
//!
//! Everything is compiled when the policy is made ([`PrefixMap`], a
//! port table per prefix), so a decision costs about the same with one rule and with thousands.
//!
//! # Resolvers elsewhere
//!
//! Where questions are judged by name, the port of DNS over TLS and QUIC (853) and the addresses of
//! public resolvers are refused in the same way, unless an allow means them: one that gives that
//! very port, or one address and ports; or the very name of a resolver.
//!
//! # Names
//!
//! A rule by name matches a connection only by way of DNS: the engine's name gate refuses questions for names
//! that no rule allows, and an answer for an allowed name opens its addresses to the VM that
//! asked, under the rules about that name, for the answer's TTL. A destination is judged by
//! address first, and what a rule by address denies or the safe defaults protect stays shut; only
//! then by the names that opened it: any name that allows is enough.
#![deny(unsafe_code)]

mod compile;
mod decide;
pub mod document;
mod explain;
mod plain;
mod rule;
#[cfg(any(test, feature = "strategies"))]
pub mod strategies;
pub mod tools;

pub use compile::{
    dns_bypass::{is_canary, name_means},
    identity::{Described, Identity, Meaning},
    policy::{Place, Policy},
    protected::{Space, embedded, shut_v6},
    set::{CompiledError, PolicySet},
};
pub use decide::{
    exfil_budget::{Asker, RecordedAsker},
    host_loopback::Lead,
    token_bucket::TokenBucket,
};
pub use explain::{destination::Explanation, offline::Standing};
pub use plain::{one_line, plain};
pub use rule::{
    Action, Decision, Destination, LocalAddresses, Rule, RuleId,
    deny_file::{DenyFile, DenyFileError},
    host_loopback::{LoopbackError, LoopbackPorts, MOST_LOOPBACK_ENTRIES},
    name::{MAX_LEN as MAX_NAME_LEN, Name},
    name_pattern::{NameError, NamePattern, wire},
    pattern::{Pattern, PatternError},
    prefix_map::PrefixMap,
    settings::{
        CEILING_S, DNS_PORT, DnsSettings, FLOOR_S, Http, MAX_RESOLVERS, NewNames, Note, OnReload,
        Resolvers, Settings, Written,
    },
};
