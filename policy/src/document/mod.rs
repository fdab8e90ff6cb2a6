//! Policy documents: TOML files and the flags that override them, their meaning, and errors that
//! give the place in the file.
mod amount;
mod choice;
mod egress;
mod error;
mod file;
mod forward;
mod host_loopback;
mod idle;
mod load;
mod meaning;
mod named;
mod nat;
mod overrides;
mod place;
mod rule_flag;
mod schema;
mod sleep;
mod timers;

pub use self::{
    amount::{Amount, Count},
    choice::{VmChoice, policy_of},
    egress::{NAT_ADDRESSES, pool_of_vm},
    error::ConfigError,
    file::PolicyFile,
    forward::{Forward, address, check_clashes, forwards_of_vm, parse_range},
    host_loopback::{loopback_of_vm, parse as parse_host_loopback},
    load::{LoadedPolicies, LoadedPolicy, LoadedRule, Reader, RuleText},
    meaning::{
        Limits, check_dns, check_file, check_name, check_vms, forwards, has_top_level,
        limits_in_file, policy_in_file, quotas_named,
    },
    named::{PutPolicy, check_inline, check_named, inline_name, is_inline},
    overrides::CliOverrides,
    rule_flag::{RuleFlag, check_rules},
    schema::{Document, HostLoopback, Quotas, RoutesOf, schema},
};
