//! `--host-loopback [ADDR:]PORT[-PORT][:PORT[-PORT]][/tcp|udp]` and `[host_loopback]`: ports of the
//! gateway that lead to the host's loopback.
use super::{error::ConfigError, file::PolicyFile, load::LoadedPolicies, schema::HostLoopback};
use crate::{LoopbackError, LoopbackPorts};

const FLAG: &str = "--host-loopback";
const FORMS: &str = "give 8080, 9000-9010/udp or 8080:80/tcp (the guest's port, then the host's)";
const ONCE: &str = "give each port once, in flags and file";

/// Parses the values of `--host-loopback`.
///
/// # Errors
/// A value is not an entry, clashes with another one, or there are too many.
pub fn parse(specs: &[String]) -> Result<Vec<LoopbackPorts>, ConfigError> {
    let mut all = Vec::new();
    for spec in specs {
        let entry = spec.parse().map(typed);
        entry
            .and_then(|entry: LoopbackPorts| entry.add_to(&mut all))
            .map_err(|e| ConfigError::new(FLAG, spec, e.to_string(), remedy(&e)))?;
    }
    Ok(all)
}

/// Parses the entries of a VM's definition.
///
/// # Errors
/// As [`parse`].
pub fn loopback_of_vm(specs: &[String]) -> Result<Vec<LoopbackPorts>, ConfigError> {
    let mut all = Vec::new();
    for spec in specs {
        let added = spec
            .parse()
            .and_then(|entry: LoopbackPorts| entry.add_to(&mut all));
        added.map_err(|e| ConfigError::new("host_loopback", spec, e.to_string(), remedy(&e)))?;
    }
    Ok(all)
}

fn typed(entry: LoopbackPorts) -> LoopbackPorts {
    LoopbackPorts {
        typed: true,
        ..entry
    }
}

fn remedy(error: &LoopbackError) -> &'static str {
    match error {
        LoopbackError::Twice(..) => ONCE,
        LoopbackError::TooMany => "give ranges, or let the service listen on fewer",
        LoopbackError::Ours(..) => {
            "give another port of the guest's: 5300:53 leads to the host's 53"
        }
        _ => FORMS,
    }
}

/// Parses the entries of a policy in a file.
pub(super) fn of_file(
    file: &PolicyFile,
    said: &HostLoopback,
) -> Result<Vec<LoopbackPorts>, ConfigError> {
    let mut all = Vec::new();
    for entry in &said.ports {
        let parsed = entry.get_ref().to_string().parse();
        let added = parsed.and_then(|parsed: LoopbackPorts| {
            let address = said.address.as_ref().map(|address| *address.get_ref());
            let address = parsed.address.or(address);
            LoopbackPorts { address, ..parsed }.add_to(&mut all)
        });
        added.map_err(|e| file.error(&entry.span(), e.to_string(), remedy(&e)))?;
    }
    Ok(all)
}

impl LoadedPolicies {
    /// Adds the entries given by flags to each policy, before those of its file.
    ///
    /// # Errors
    /// An entry of the file clashes with a flag, or there are too many.
    pub fn with_host_loopback(mut self, typed: &[LoopbackPorts]) -> Result<Self, ConfigError> {
        for policy in &mut self.policies {
            let mut all = typed.to_vec();
            for entry in policy.settings.host_loopback.drain(..) {
                // Only the file's entry can be wrong: the flags alone were right.
                let text = entry.to_string();
                entry.add_to(&mut all).map_err(|e| {
                    let given = text.split_once(' ').map_or("", |(_, given)| given);
                    let problem = format!("the policy file's entry clashes with a flag: {e}");
                    ConfigError::new(FLAG, given, problem, ONCE)
                })?;
            }
            policy.settings.host_loopback = all;
        }
        Ok(self)
    }
}
