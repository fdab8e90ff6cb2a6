//! Policy settings of a command line, comparable with those of another process.
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use slipgate_policy::{
    Action,
    document::{Amount, Count, Quotas, RuleFlag},
};

use super::{Config, VmFlags};

/// Policy settings of a command line, in a form that a successor of the same version or a later one
/// reads. A new field must be `#[serde(default)]` and absent when unset. A field that an earlier
/// version does not know is an error to it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyFlags {
    /// Absolute path of the policy file; symbolic links are not resolved.
    file: Option<PathBuf>,
    /// Rule flags in the order typed: the flag and its value.
    rules: Vec<(String, PathBuf)>,
    default: Option<String>,
    policy_name: Option<String>,
    /// Quotas by their names in policy files.
    quotas: BTreeMap<String, u64>,
    dns: Vec<String>,
    forwards: Vec<String>,
    /// Permitted host-loopback services, in the form in which they are shown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    host_loopback: Vec<String>,
    /// Whose routes the flows leave by where a policy names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    egress_routes: Option<String>,
    /// Settings of the `--vm` flags, by the VM's name.
    vms: BTreeMap<String, SaidOfVm>,
}

/// Settings of one `--vm` flag.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SaidOfVm {
    policy: Option<String>,
    max_flows: Option<u32>,
}

impl PolicyFlags {
    /// Whether both have the same settings. Policy files are compared by identity, not by path.
    pub fn agrees(&self, other: &Self) -> bool {
        let file = match (&self.file, &other.file) {
            (Some(one), Some(other)) => is_same_file(one, other),
            (None, None) => true,
            _ => false,
        };
        let rest = |said: &Self| Self {
            file: None,
            ..said.clone()
        };
        file && rest(self) == rest(other)
    }
}

impl Config {
    /// Returns the policy settings of the command line.
    pub fn policy_flags(&self) -> PolicyFlags {
        let flags = &self.flags;
        let rule = |rule: &RuleFlag| {
            let (flag, given) = match rule {
                RuleFlag::Match(action, text) => (action.name(), text.into()),
                RuleFlag::DenyFile(path) => ("deny_file", absolute(path)),
            };
            (flag.to_owned(), given)
        };
        let default = flags.default.map(Action::name);
        // A daemon's VMs are no part of its command line.
        let vms = self.vms.iter().filter(|_| !self.is_daemon).map(|vm| {
            let VmFlags { policy, quotas, .. } = vm.flags.clone();
            let max_flows = quotas.max_flows.map(|count| count.0);
            (vm.name.clone(), SaidOfVm { policy, max_flows })
        });
        PolicyFlags {
            file: flags.file.as_deref().map(absolute),
            rules: flags.rules.iter().map(rule).collect(),
            default: default.map(str::to_owned),
            policy_name: flags.policy_name.clone(),
            quotas: self.said_of_quotas(),
            dns: flags.dns.clone(),
            forwards: flags.forwards.clone(),
            host_loopback: flags.host_loopback.iter().map(|e| e.to_string()).collect(),
            egress_routes: flags.egress_routes.map(|routes| routes.name().to_owned()),
            vms: vms.collect(),
        }
    }

    fn said_of_quotas(&self) -> BTreeMap<String, u64> {
        let Quotas {
            max_flows,
            new_flows_per_second,
            tx_bytes_per_second,
            rx_bytes_per_second,
            tx_packets_per_second,
            rx_packets_per_second,
            dns_per_second,
            tx_bytes,
            rx_bytes,
            bytes_per,
            bytes_end,
        } = &self.flags.quotas;
        let count = |count: &Option<Count>| count.map(|count| u64::from(count.0));
        let amount = |amount: &Option<Amount>| amount.map(|amount| amount.0);
        let all = [
            ("max_flows", count(max_flows)),
            ("new_flows_per_second", count(new_flows_per_second)),
            ("tx_bytes_per_second", amount(tx_bytes_per_second)),
            ("rx_bytes_per_second", amount(rx_bytes_per_second)),
            ("tx_packets_per_second", amount(tx_packets_per_second)),
            ("rx_packets_per_second", amount(rx_packets_per_second)),
            ("dns_per_second", count(dns_per_second)),
            ("tx_bytes", amount(tx_bytes)),
            ("rx_bytes", amount(rx_bytes)),
            ("bytes_per", bytes_per.map(|per| per as u64)),
            ("bytes_end", bytes_end.map(|end| end as u64)),
        ];
        let said = all.into_iter();
        said.filter_map(|(name, value)| Some((name.to_owned(), value?)))
            .collect()
    }
}

/// Whether both paths lead to the same file, or are equal.
pub(super) fn is_same_file(one: &Path, other: &Path) -> bool {
    let leads = |path: &Path| fs::canonicalize(path).ok();
    one == other || leads(one).is_some_and(|one| Some(one) == leads(other))
}

/// Returns the absolute path; the path unchanged if the current directory is unknown.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
