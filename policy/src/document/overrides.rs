//! Flags of a command line that override a policy file.
use std::{net::SocketAddr, path::PathBuf};

use super::{
    error::ConfigError,
    rule_flag::RuleFlag,
    schema::{Quotas, RoutesOf},
};
use crate::{
    Action, LoopbackPorts, MAX_RESOLVERS, Resolvers as Asked,
    resolv_conf::{is_of_a_link, parse_resolver},
};

/// Policy flags of a command line. Their rules come before a policy file's, and their values
/// replace the file's.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CliOverrides {
    /// Rule flags in the order given.
    pub rules: Vec<RuleFlag>,
    /// Action of `--default`, for flows that no rule matches.
    pub default: Option<Action>,
    /// Quotas of all VMs.
    pub quotas: Quotas,
    /// Values of `--dns`, as given.
    pub dns: Vec<String>,
    /// Values of `--forward`, as given.
    pub forwards: Vec<String>,
    /// Values of `--host-loopback`, which apply to each policy.
    pub host_loopback: Vec<LoopbackPorts>,
    /// Value of `--egress-routes`, for policies that name no routes.
    pub egress_routes: Option<RoutesOf>,
    /// Path of the policy file.
    pub file: Option<PathBuf>,
    /// Name of the policy of VMs that name none.
    pub policy_name: Option<String>,
}

impl CliOverrides {
    /// Returns the resolvers given by `--dns`; `None` if the flag was not given.
    ///
    /// # Errors
    /// A value is not a resolver's address, there are too many, or `none` is not alone.
    pub fn resolvers(&self) -> Result<Option<Asked>, ConfigError> {
        const NONE: &str = "none";
        match &self.dns[..] {
            [] => Ok(None),
            [one] if one == NONE => Ok(Some(Asked::Nobody)),
            some if some.iter().any(|d| d == NONE) => Err(ConfigError::new(
                "--dns",
                NONE,
                "there is another --dns",
                "give resolvers, or none alone to refuse every question",
            )),
            some => parse_resolvers(some).map(|these| Some(Asked::These(these))),
        }
    }
}

/// Parses a list of resolvers' addresses.
pub(super) fn parse_resolvers(given: &[String]) -> Result<Vec<SocketAddr>, ConfigError> {
    if let Some(first) = given.get(MAX_RESOLVERS) {
        return Err(ConfigError::new(
            "--dns",
            first,
            format!("one too many: {MAX_RESOLVERS} are asked at most"),
            "leave out those that are asked last",
        ));
    }
    given.iter().map(|given| resolver(given)).collect()
}

/// Parses a resolver's address, `A`, `A:P`, `[A]` or `[A]:P`.
fn resolver(given: &str) -> Result<SocketAddr, ConfigError> {
    match parse_resolver(given) {
        Some(resolver) if !is_of_a_link(resolver) => Ok(resolver),
        None if !given.contains('%') => Err(ConfigError::new(
            "--dns",
            given,
            "not a resolver's address",
            "give one like 192.0.2.53, 192.0.2.53:5353, 2001:db8::53 or [2001:db8::53]:5353, or none",
        )),
        _ => Err(ConfigError::new(
            "--dns",
            given,
            "an address of one link: questions leave by the link that routes name",
            "give the resolver's global or unique local address, or an IPv4 one",
        )),
    }
}
