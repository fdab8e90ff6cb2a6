//! What a command line says of policies, over what a policy file says.
use std::{
    net::{SocketAddr, SocketAddrV4},
    path::PathBuf,
};

use super::{error::ConfigError, rule_flag::RuleFlag, schema::Quotas};
use crate::{Action, LoopbackPorts, MAX_RESOLVERS, Resolvers as Asked};

/// What the flags of a command line say of policies: its rules come before a policy file's, and its
/// values take the place of the file's.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CliOverrides {
    /// In the order typed.
    pub rules: Vec<RuleFlag>,
    /// `--default`.
    pub default: Option<Action>,
    /// Of all VMs.
    pub quotas: Quotas,
    /// `--dns`, as typed.
    pub dns: Vec<String>,
    /// `--forward`, as typed.
    pub forwards: Vec<String>,
    /// In each policy.
    pub host_loopback: Vec<LoopbackPorts>,
    /// The policy file.
    pub file: Option<PathBuf>,
    /// Of VMs that name none.
    pub policy_name: Option<String>,
}

impl CliOverrides {
    /// Whom questions go to; `None`: nothing was typed.
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

/// A list of resolvers.
pub(super) fn parse_resolvers(given: &[String]) -> Result<Vec<SocketAddr>, ConfigError> {
    if let Some(first) = given.get(MAX_RESOLVERS) {
        return Err(ConfigError::new(
            "--dns",
            first,
            format!("one too many: {MAX_RESOLVERS} are asked at most"),
            "leave out those that are asked last",
        ));
    }
    let each = given
        .iter()
        .map(|given| resolver(given).map(SocketAddr::V4));
    each.collect()
}

/// `A` or `A:P`.
fn resolver(given: &str) -> Result<SocketAddrV4, ConfigError> {
    let parsed = given
        .parse()
        .or_else(|_| given.parse().map(|a| SocketAddrV4::new(a, 53)));
    match parsed {
        Ok(a) if a.port() != 0 && !a.ip().is_unspecified() && !a.ip().is_multicast() => Ok(a),
        _ => Err(ConfigError::new(
            "--dns",
            given,
            "not a resolver's address",
            "give one like 192.0.2.53 or 192.0.2.53:5353, or none",
        )),
    }
}
