//! Command line to checked [`Config`]. Except for reading a policy file, nothing here touches the
//! system: the roles find out what depends on the machine (whether the TAP exists, whether the port
//! is free).
mod disk;
mod file;
pub(crate) mod joined;
mod machine;
mod network;
mod policy_flags;
mod rate;
mod userspace;
mod vm;

use std::{ops::RangeInclusive, path::PathBuf};

use slipgate_abi::maps::{MAX_CHUNKS, MAX_OWNERS, MOST_RULES, MOST_VMS, SLOTS_PER_CHUNK};
use slipgate_broker::config::{
    ApiSocket, Config, GuestNetwork, HostNat, Mode, VmConfig, Xdp, check_device, check_label,
};
use slipgate_ipc::engine::{FlowLogEvent, OnExit};
use slipgate_policy::document::{ConfigError, RuleFlag, address, check_rules, parse_range};

pub(crate) use self::{
    file::{matches, matches_from},
    machine::run,
    policy_flags::rule_flags,
    userspace::{attach_socket, exec, inside},
};
use crate::args::{self, ApiArgs, AttachArgs, NatArgs, ServeArgs};

/// Checks the flags of `attach`. `order`: the rule flags as typed, see [`rule_flags`].
pub(crate) fn attach(args: &AttachArgs, order: Vec<RuleFlag>) -> Result<Config, ConfigError> {
    let nat = &args.nat;
    refuse_api(&args.api)?;
    let network = network::parse(nat)?;
    let vms = vm::parse(&args.vm, &args.tap, &network)?;
    checked(nat, network, Some(vms), on_exit(args.on_exit), order)
}

/// Checks the flags of `serve`. `order`: the rule flags as typed, see [`rule_flags`].
pub(crate) fn serve(args: &ServeArgs, order: Vec<RuleFlag>) -> Result<Config, ConfigError> {
    let nat = &args.nat;
    let network = network::parse(nat)?;
    if let Some(forward) = nat.forward.first() {
        return Err(ConfigError::new(
            "--forward",
            forward,
            "a daemon has no VM at its start",
            "give it with the VM: `slipgate vm add NAME --forward ...`",
        ));
    }
    for key in &args.metrics_label {
        check_label("--metrics-label", key, "")?;
    }
    check_workers(args)?;
    let config = checked(nat, network, None, on_exit(args.on_exit), order)?;
    Ok(Config {
        workers: args.workers,
        api: api_sockets(&args.api)?,
        metrics_labels: args.metrics_label.clone(),
        idle_after: args.idle_after,
        snapshot_dir: snapshot_dir(args)?,
        snapshots_max: within("--snapshots-max", args.snapshots_max, 1, MOST_SNAPSHOTS)? as usize,
        takes_over: args.take_over,
        ..config
    })
}

/// Checks the number of engines, and what several of them can't do.
fn check_workers(args: &ServeArgs) -> Result<(), ConfigError> {
    let refused = |problem: &str, remedy: &str| {
        Err(ConfigError::new("--workers", args.workers, problem, remedy))
    };
    if args.workers == 0 {
        return refused("without an engine no flow is admitted", "give 1 or more");
    }
    if args.workers > MAX_OWNERS as usize {
        let problem = format!("a network namespace has room for {MAX_OWNERS} engines");
        return refused(&problem, "give about one for each CPU that is to spare");
    }
    if args.workers > 1 && args.nat.pcap.is_some() {
        return refused(
            "--pcap writes the frames of one engine to one file",
            "leave --pcap out, and capture a VM: `slipgate capture --vm NAME`",
        );
    }
    Ok(())
}

/// Most that `--snapshots-max` permits.
const MOST_SNAPSHOTS: u32 = 100_000;

/// Checks the directory of `--snapshot-dir`.
fn snapshot_dir(args: &ServeArgs) -> Result<Option<PathBuf>, ConfigError> {
    let Some(dir) = &args.snapshot_dir else {
        return Ok(None);
    };
    // Answers to clients and the descriptions of snapshots say it as text.
    let problem = match dir.is_absolute() {
        true if dir.to_str().is_some() => return Ok(Some(dir.clone())),
        true => "it is no UTF-8",
        false => "it is no absolute path",
    };
    let remedy = "give one, like /var/lib/slipgate/snapshots";
    let dir = dir.display();
    Err(ConfigError::new("--snapshot-dir", dir, problem, remedy))
}

/// Each flag of the API with its value, and whether clients may change anything.
fn api_flags(args: &ApiArgs) -> impl Iterator<Item = (&'static str, &String, bool)> {
    let given = [
        ("--api", &args.api, true),
        ("--api-read", &args.api_read, false),
    ];
    let given = given.into_iter();
    given.filter_map(|(flag, value, may_change)| Some((flag, value.as_ref()?, may_change)))
}

/// Refuses the API beside a TAP: of these VMs a daemon answers.
pub(crate) fn refuse_api(args: &ApiArgs) -> Result<(), ConfigError> {
    let Some((flag, value, _)) = api_flags(args).next() else {
        return Ok(());
    };
    Err(ConfigError::new(
        flag,
        value,
        "in hybrid mode `slipgate serve` answers the API, for all VMs of the network namespace",
        "give it to `slipgate serve`, which then serves this VM, too; or use user mode",
    ))
}

/// The sockets of `--api` and `--api-read`.
fn api_sockets(args: &ApiArgs) -> Result<Vec<ApiSocket>, ConfigError> {
    let sockets = api_flags(args).map(|(flag, value, may_change)| {
        let (path, group) = match value.split_once(',') {
            None => (value.as_str(), None),
            Some((path, rest)) => (path, Some(rest.strip_prefix("group=").unwrap_or_default())),
        };
        if !path.starts_with('/') || group.is_some_and(str::is_empty) {
            return Err(ConfigError::new(
                flag,
                value,
                "not an absolute path, or not group= behind it",
                "give one like /run/slipgate-api.sock,group=slipgate",
            ));
        }
        Ok(ApiSocket {
            path: path.into(),
            group: group.map(str::to_owned),
            may_change,
        })
    });
    sockets.collect()
}

/// Checks the NAT's flags, which all commands that run it share. `vms`: `None` for a daemon.
fn checked(
    nat: &NatArgs,
    network: GuestNetwork,
    vms: Option<Vec<VmConfig>>,
    on_exit: OnExit,
    order: Vec<RuleFlag>,
) -> Result<Config, ConfigError> {
    let mode = match nat.mode {
        args::Mode::Auto => Mode::Auto,
        args::Mode::Hybrid => Mode::Hybrid,
        args::Mode::Userspace => {
            return Err(ConfigError::new(
                "--mode",
                "userspace",
                "only `slipgate run`, `slipgate exec` and `slipgate attach --socket` have it",
                "use --mode hybrid, which needs CAP_NET_ADMIN and CAP_BPF (see `slipgate doctor`)",
            ));
        }
    };
    settled(mode, nat, network, vms, on_exit, order)
}

/// Checks the flags but for the mode, which stands.
fn settled(
    mode: Mode,
    nat: &NatArgs,
    network: GuestNetwork,
    vms: Option<Vec<VmConfig>>,
    on_exit: OnExit,
    order: Vec<RuleFlag>,
) -> Result<Config, ConfigError> {
    if let Some(uplink) = &nat.uplink {
        check_device("--uplink", uplink, uplink)?;
    }
    let is_daemon = vms.is_none();
    let vms = vms.unwrap_or_default();
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
    let mut config = Config {
        mode,
        uplink: nat.uplink.clone(),
        network,
        vms,
        is_daemon,
        workers: 1,
        takes_over: false,
        flags: policy_flags::overrides(nat, order)?,
        named_policies: Default::default(),
        // By `settle`.
        base_file: None,
        forwards: Vec::new(),
        nat_ports: ports("--nat-ports", &nat.nat_ports)?,
        eim_ports: (nat.eim_ports.as_deref())
            .map(|given| ports("--eim-ports", given))
            .transpose()?,
        nat_address: nat
            .nat_address
            .as_ref()
            .map(|a| address("--nat-address", a))
            .transpose()?,
        host_nat: match nat.host_nat {
            args::HostNat::Refuse => HostNat::Refuse,
            args::HostNat::Share => HostNat::Share,
        },
        flow_table: flow_table(nat.flow_table)?,
        max_vms: within("--max-vms", nat.max_vms, 1, MOST_VMS)?,
        max_rules: within("--max-rules", nat.max_rules, LEAST_RULES, MOST_RULES)?,
        pin_dir: nat.pin_dir.clone(),
        flow_log: nat.flow_log.clone(),
        metrics: nat.metrics,
        metrics_labels: Vec::new(),
        api: Vec::new(),
        snapshot_dir: None,
        snapshots_max: 0,
        idle_after: 0,
        flow_log_events: nat.flow_log_events.iter().map(event).collect(),
        pcap: nat.pcap.clone(),
        xdp: match nat.xdp {
            args::Xdp::Auto => Xdp::Auto,
            args::Xdp::On => Xdp::On,
            args::Xdp::Off => Xdp::Off,
        },
        bpf_log: nat.bpf_log,
        on_exit,
        new_vms: false,
    };
    config.settle()?;
    Ok(config)
}

fn on_exit(typed: args::OnExit) -> OnExit {
    match typed {
        args::OnExit::Detach => OnExit::Detach,
        args::OnExit::Keep => OnExit::Keep,
    }
}

fn event(typed: &args::FlowLogEvent) -> FlowLogEvent {
    match typed {
        args::FlowLogEvent::FlowStart => FlowLogEvent::FlowStart,
        args::FlowLogEvent::FlowEnd => FlowLogEvent::FlowEnd,
        args::FlowLogEvent::Dns => FlowLogEvent::Dns,
        args::FlowLogEvent::Refused => FlowLogEvent::Refused,
    }
}

pub(crate) fn ports(flag: &'static str, given: &str) -> Result<RangeInclusive<u16>, ConfigError> {
    let range = parse_range(given).filter(|r| r.len() > 1);
    range.ok_or_else(|| {
        ConfigError::new(
            flag,
            given,
            "not a range of ports",
            "give two ports from 1 to 65535, like 61000-65535",
        )
    })
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

/// The least `--max-rules`: a policy's own, and the forwards'.
const LEAST_RULES: u32 = 16;

fn within(flag: &'static str, given: u32, least: u32, most: u32) -> Result<u32, ConfigError> {
    if (least..=most).contains(&given) {
        return Ok(given);
    }
    let near = given.clamp(least, most);
    Err(ConfigError::new(
        flag,
        given,
        format!("not from {least} to {most}"),
        format!("give {near}"),
    ))
}

#[cfg(test)]
#[path = "config_test.rs"]
pub(crate) mod tests;

#[cfg(test)]
#[path = "config/host_loopback_test.rs"]
mod host_loopback_tests;

#[cfg(test)]
#[path = "config/policy_flags_test.rs"]
mod policy_flags_tests;

#[cfg(test)]
#[path = "config/settle_test.rs"]
mod settle_tests;
