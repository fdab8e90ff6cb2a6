//! A VM that is to be served.
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use slipgate_policy::document::Limits;

/// One VM.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmConfig {
    /// Unique name.
    pub name: String,
    /// The TAP that its VMM has open.
    pub tap: String,
    /// The guest's MAC; when given, frames from another are dropped.
    pub mac: Option<[u8; 6]>,
    /// The guest's address.
    pub ip: Ipv4Addr,
    /// What `--vm` says beside.
    pub typed: VmFlags,
    /// Place of its policy among the process's.
    pub policy: u32,
    /// What it may have.
    #[serde(skip)]
    pub limits: Limits,
}

/// What `--vm` says of policies and quotas.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VmFlags {
    /// The policy's name.
    pub policy: Option<String>,
    /// Most flows at once.
    pub max_flows: Option<u32>,
}
