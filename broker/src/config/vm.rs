//! A VM that is to be served.
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use slipgate_policy::document::Limits;

/// Configuration of one VM.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmConfig {
    /// Unique name of the VM.
    pub name: String,
    /// The TAP that its VMM has open.
    pub tap: String,
    /// MAC address of the guest; when given, frames from other addresses are dropped.
    pub mac: Option<[u8; 6]>,
    /// IPv4 address of the guest.
    pub ip: Ipv4Addr,
    /// Further settings of its `--vm` flag.
    pub typed: VmFlags,
    /// Index of its policy among the process's policies.
    pub policy: u32,
    /// Quotas of the VM.
    #[serde(skip)]
    pub limits: Limits,
}

/// Policy and quotas given by a `--vm` flag.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VmFlags {
    /// Name of the policy.
    pub policy: Option<String>,
    /// Largest number of flows at once.
    pub max_flows: Option<u32>,
}
