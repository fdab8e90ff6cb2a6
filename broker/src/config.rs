//! Checked configuration of the broker: flags and policy file, in plain types.
//!
//! The constructor of a [`Config`] has checked each value. [`Config::settle`] derives the rest from
//! the policy file, at the start and each time that the file is read again.
mod api;
mod files;
mod host_loopback;
mod machine;
mod network;
mod policy_flags;
mod reread;
mod routed;
mod settle;
mod vm;

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
};

use slipgate_ipc::engine::{FlowLogEvent, OnExit};
use slipgate_policy::document::{CliOverrides, Forward, PolicyFile, PutPolicy};

pub(crate) use self::machine::{mac_text, other_writers};
pub use self::{
    api::ApiSocket,
    files::from_disk,
    machine::{
        CgroupSpec, DiskSpec, MAX_DISKS, MachineSpec, OWN_SNAPSHOT, RunConfig, SNAPSHOT_FILES,
        SavedBase, SavedMachine, VmmBounds, VsockSpec, check_snapshot_dir,
    },
    network::{GuestNetwork, MIN_MTU6, check_ipv6_prefix},
    policy_flags::PolicyFlags,
    routed::{check_routed_pool, check_routed_prefix, prefix_in_pool},
    settle::read_policy_file,
    vm::{VmConfig, VmFlags, check_device, check_label, check_tap, parse_mac},
};

/// Complete configuration of the NAT.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Mode in which the NAT runs.
    pub mode: Mode,
    /// Uplink device; `None`: the device of the default route.
    pub uplink: Option<String>,
    /// The network that guests see.
    pub network: GuestNetwork,
    /// VMs that the process serves.
    pub vms: Vec<VmConfig>,
    /// Whether VMs are added and removed by requests (`slipgate serve`), not by the command line.
    pub is_daemon: bool,
    /// Number of engines that share out the VMs, one at least.
    pub workers: usize,
    /// Whether a daemon takes over from one that serves the network namespace.
    pub takes_over: bool,
    /// Policy settings of the flags.
    pub flags: CliOverrides,
    /// Policies that clients gave to a daemon, by name; among them those that VMs' definitions
    /// contain. They take the places of the policy file's.
    pub named_policies: BTreeMap<String, PutPolicy>,
    /// The policy file as last read.
    pub base_file: Option<PolicyFile>,
    /// Forwarded ports of the host, from the flags and the policy file.
    pub forwards: Vec<Forward>,
    /// Source ports of translated flows.
    pub nat_ports: RangeInclusive<u16>,
    /// Source ports of flows with endpoint-independent mapping, which policies ask for; `None`: none
    /// may ask.
    pub eim_ports: Option<RangeInclusive<u16>>,
    /// Source address; `None`: the route's.
    pub nat_address: Option<Ipv4Addr>,
    /// Treatment of the host's own NAT and sockets that may use the same tuples.
    pub host_nat: HostNat,
    /// Number of slots of the flow table, a multiple of a chunk.
    pub flow_table: u32,
    /// Number of VMs that the maps have room for, all processes of the network namespace together.
    pub max_vms: u32,
    /// Number of rules that the maps have room for, likewise.
    pub max_rules: u32,
    /// Directory where maps are pinned.
    pub pin_dir: PathBuf,
    /// Path of the flow log.
    pub flow_log: Option<PathBuf>,
    /// Events that the flow log records.
    pub flow_log_events: Vec<FlowLogEvent>,
    /// Listening address for Prometheus.
    pub metrics: Option<SocketAddr>,
    /// Keys of the VMs' labels that Prometheus gets.
    pub metrics_labels: Vec<String>,
    /// Sockets on which a daemon answers the API.
    pub api: Vec<ApiSocket>,
    /// Directory in which clients of the API have snapshots made; `None`: none.
    pub snapshot_dir: Option<PathBuf>,
    /// Most snapshots in it: beyond that none is made.
    pub snapshots_max: usize,
    /// Silence after which a VM is idle that says nothing else, seconds; 0: it is not told.
    pub idle_after: u32,
    /// File to which the engine port's frames are written.
    pub pcap: Option<PathBuf>,
    /// Whether and where the XDP guard runs.
    pub xdp: Xdp,
    /// Whether the log messages of the BPF programs are shown.
    pub bpf_log: bool,
    /// Treatment of live flows at the end.
    pub on_exit: OnExit,
    /// Whether the VMs begin with this process, so that a predecessor's state under their names
    /// belongs to other VMs.
    pub new_vms: bool,
}

/// Mode in which the NAT runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// The best mode that this host supports.
    Auto,
    /// The kernel translates; the engine handles the first packets of flows.
    Hybrid,
    /// The engine translates, and sockets of its own lead to the world.
    Userspace,
}

/// Treatment, at the start, of the host's own NAT or sockets that may use ports of
/// [`Config::nat_ports`] with the guests' source address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostNat {
    /// The start fails with an error that names them.
    Refuse,
    /// The conflict is logged, and the ports are shared.
    Share,
}

/// TAPs on which the guard runs, an XDP program that drops frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Xdp {
    /// The guard runs where the device offers no TSO, which XDP would disable.
    Auto,
    /// The guard runs on every TAP.
    On,
    /// The guard runs on no TAP.
    Off,
}

#[cfg(test)]
#[path = "config_test.rs"]
pub(crate) mod tests;
