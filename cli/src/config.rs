//! What was typed, made into one checked [`Config`]. But for reading a policy file, nothing here
//! touches the system: what depends on the machine (does the TAP exist, is the port free) is found
//! out by the roles.
mod anew;
mod file;
mod host_loopback;
mod machine;
mod network;
mod rules;
mod said;
mod settle;
mod vm;

use std::{
    net::{Ipv4Addr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
};

use slipgate_abi::maps::{MAX_CHUNKS, SLOTS_PER_CHUNK};
use slipgate_policy::document::{
    CliOverrides, ConfigError, Forward, Limits, PolicyFile, RuleFlag, check_rules, parse_range,
};
use userspace_nat::record::{Event, Events};

pub(crate) use self::{
    file::from_disk,
    machine::{MachineSpec, RunConfig},
    network::GuestNetwork,
    rules::rule_flags,
    said::Said,
    settle::read_policy_file,
    vm::VmConfig,
};
use crate::args::{AttachArgs, FlowLogEvent, Mode, NatArgs, OnExit, Xdp};

/// Everything the NAT was told, checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Config {
    pub(crate) mode: Mode,
    /// `None`: the default route's.
    pub(crate) uplink: Option<String>,
    pub(crate) network: GuestNetwork,
    pub(crate) vms: Vec<VmConfig>,
    /// What flags say of policies.
    pub(crate) typed: CliOverrides,
    /// As it was read last.
    pub(crate) policy_file: Option<PolicyFile>,
    pub(crate) forwards: Vec<Forward>,
    pub(crate) nat_ports: RangeInclusive<u16>,
    /// Source address; `None`: the route's.
    pub(crate) nat_address: Option<Ipv4Addr>,
    /// Slots of the table, a multiple of a chunk.
    pub(crate) flow_table: u32,
    pub(crate) pin_dir: PathBuf,
    pub(crate) flow_log: Option<PathBuf>,
    pub(crate) flow_log_events: Events,
    /// Where Prometheus is answered.
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) pcap: Option<PathBuf>,
    pub(crate) xdp: Xdp,
    pub(crate) bpf_log: bool,
    pub(crate) on_exit: OnExit,
    /// The VMs begin with us: what a predecessor left of their names is others'.
    pub(crate) new_vms: bool,
}

impl Config {
    /// Checks what `attach` was told. `order`: the rule flags as typed, see [`rule_flags`].
    pub(crate) fn new(args: &AttachArgs, order: Vec<RuleFlag>) -> Result<Self, ConfigError> {
        let nat = &args.nat;
        let network = GuestNetwork::new(nat)?;
        let vms = vm::parse(&args.vm, &args.tap, &network)?;
        Self::checked(nat, network, vms, args.on_exit, order)
    }

    /// Checks what is said of the NAT, whosever its VMs are.
    fn checked(
        nat: &NatArgs,
        network: GuestNetwork,
        vms: Vec<VmConfig>,
        on_exit: OnExit,
        order: Vec<RuleFlag>,
    ) -> Result<Self, ConfigError> {
        if nat.mode == Mode::Userspace {
            return Err(ConfigError::new(
                "--mode",
                "userspace",
                "it is not there yet",
                "use --mode hybrid, which needs CAP_NET_ADMIN and CAP_BPF (see `slipgate doctor`)",
            ));
        }
        if let Some(uplink) = &nat.uplink {
            vm::check_device("--uplink", uplink, uplink)?;
        }
        if let Some(vm) = vms.iter().find(|v| nat.uplink.as_ref() == Some(&v.tap)) {
            return Err(ConfigError::new(
                "--uplink",
                &vm.tap,
                format!("it is the TAP of {}", vm.name),
                "give the device that leads to the world",
            ));
        }
        if let Some(address) = nat.metrics.filter(|address| address.port() == 0) {
            return Err(ConfigError::new(
                "--metrics",
                address,
                "nobody would know the port",
                "give one, like 127.0.0.1:9600",
            ));
        }
        check_rules(&order)?;
        let mut config = Self {
            mode: nat.mode,
            uplink: nat.uplink.clone(),
            network,
            vms,
            typed: settle::overrides(nat, order)?,
            // By `settle`.
            policy_file: None,
            forwards: Vec::new(),
            nat_ports: nat_ports(&nat.nat_ports)?,
            nat_address: nat
                .nat_address
                .as_ref()
                .map(|a| network::address("--nat-address", a))
                .transpose()?,
            flow_table: flow_table(nat.flow_table)?,
            pin_dir: nat.pin_dir.clone(),
            flow_log: nat.flow_log.clone(),
            metrics: nat.metrics,
            flow_log_events: nat.flow_log_events.iter().map(event).collect(),
            pcap: nat.pcap.clone(),
            xdp: nat.xdp,
            bpf_log: nat.bpf_log,
            on_exit,
            new_vms: false,
        };
        config.settle()?;
        Ok(config)
    }
}

fn event(typed: &FlowLogEvent) -> Event {
    match typed {
        FlowLogEvent::FlowStart => Event::FlowStart,
        FlowLogEvent::FlowEnd => Event::FlowEnd,
        FlowLogEvent::Dns => Event::Dns,
        FlowLogEvent::Refused => Event::Refused,
    }
}

fn nat_ports(given: &str) -> Result<RangeInclusive<u16>, ConfigError> {
    let range = parse_range(given).filter(|r| r.len() > 1);
    range.ok_or_else(|| {
        ConfigError::new(
            "--nat-ports",
            given,
            "not a range of ports",
            "give two ports from 1 to 65535, like 61000-65535",
        )
    })
}

fn check_nat_ports(range: &RangeInclusive<u16>, forwards: &[Forward]) -> Result<(), ConfigError> {
    if let Some(f) = forwards.iter().find(|f| range.contains(&f.host_port)) {
        return Err(ConfigError::new(
            "--nat-ports",
            format!("{}-{}", range.start(), range.end()),
            format!("it covers port {}, which is forwarded", f.host_port),
            "forward another port, or give another range",
        ));
    }
    Ok(())
}

fn flow_table(slots: u32) -> Result<u32, ConfigError> {
    let most = MAX_CHUNKS * SLOTS_PER_CHUNK;
    if slots == 0 || slots > most || !slots.is_multiple_of(SLOTS_PER_CHUNK) {
        let near = slots.clamp(1, most).next_multiple_of(SLOTS_PER_CHUNK);
        return Err(ConfigError::new(
            "--flow-table",
            slots,
            format!("not a multiple of {SLOTS_PER_CHUNK} up to {most}"),
            format!("give {near}"),
        ));
    }
    Ok(slots)
}

#[cfg(test)]
#[path = "config_test.rs"]
pub(crate) mod tests;
