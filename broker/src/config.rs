//! Everything the broker is told, checked: what flags and a policy file say, in plain types.
//!
//! Who makes a [`Config`] has checked each value; [`Config::settle`] works out what follows from the
//! policy file, at the start and each time that it is read again.
mod files;
mod host_loopback;
mod machine;
mod network;
mod policy_flags;
mod reread;
mod settle;
mod vm;

use std::{
    net::{Ipv4Addr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
};

use slipgate_ipc::engine::{FlowLogEvent, OnExit};
use slipgate_policy::document::{CliOverrides, Forward, PolicyFile};

pub use self::{
    files::from_disk,
    machine::{MachineSpec, RunConfig},
    network::GuestNetwork,
    policy_flags::PolicyFlags,
    settle::read_policy_file,
    vm::{VmConfig, VmFlags},
};

/// Everything the NAT was told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// What runs the NAT.
    pub mode: Mode,
    /// The device that leads to the world; `None`: the default route's.
    pub uplink: Option<String>,
    /// The network that guests see.
    pub network: GuestNetwork,
    /// The VMs.
    pub vms: Vec<VmConfig>,
    /// What flags say of policies.
    pub typed: CliOverrides,
    /// The policy file as it was read last.
    pub policy_file: Option<PolicyFile>,
    /// Ports of the host that lead to guests: the flags' and the policy file's.
    pub forwards: Vec<Forward>,
    /// Ports of translated flows.
    pub nat_ports: RangeInclusive<u16>,
    /// Source address; `None`: the route's.
    pub nat_address: Option<Ipv4Addr>,
    /// Slots of the table, a multiple of a chunk.
    pub flow_table: u32,
    /// Where maps are pinned.
    pub pin_dir: PathBuf,
    /// The flow log.
    pub flow_log: Option<PathBuf>,
    /// Which events it has.
    pub flow_log_events: Vec<FlowLogEvent>,
    /// Where Prometheus is answered.
    pub metrics: Option<SocketAddr>,
    /// Where the engine port's frames are written.
    pub pcap: Option<PathBuf>,
    /// Where the guard runs.
    pub xdp: Xdp,
    /// Whether the programs' messages are shown.
    pub bpf_log: bool,
    /// What becomes of flows at the end.
    pub on_exit: OnExit,
    /// The VMs begin with this process: what a predecessor left of their names is others'.
    pub new_vms: bool,
}

/// What runs the NAT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// The best that this host can.
    Auto,
    /// The kernel, with the engine for what is new.
    Hybrid,
}

/// Where the guard runs, which drops by XDP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Xdp {
    /// Where the device offers no TSO, which XDP would cost.
    Auto,
    /// On every TAP.
    On,
    /// On none.
    Off,
}

#[cfg(test)]
#[path = "config_test.rs"]
pub(crate) mod tests;
