//! The flags of `attach` and `run` where a daemon serves the network namespace: what they say of a
//! VM goes to the daemon, and what they say of the NAT is refused, because the daemon has it for
//! all its VMs. Rules become a policy in the VM's definition.
use std::path::PathBuf;

use clap::{ArgMatches, Command, CommandFactory as _, parser::ValueSource};
use serde_json::json;
use slipgate_broker::{
    Daemon, KeptFlows,
    config::{RunConfig, VmConfig, parse_mac},
};
use slipgate_ipc::client::VmDefinition;
use slipgate_policy::{
    Action,
    document::{ConfigError, RuleFlag, check_rules, forwards, parse_host_loopback},
};

use super::{file::command_alone, network, policy_flags::rule_flags, vm};
use crate::args::{AttachArgs, CommandLine, DefaultRule, Ipv6, NatArgs, OnExit, RunArgs};

/// Flags that are about a VM, about this process, or compared with the daemon's own.
const OF_THE_VM: [&str; 22] = [
    "vm",
    "tap",
    "guest-ip",
    "ipv6",
    "ipv6-prefix",
    "forward",
    "max-flows",
    "new-flows-per-second",
    "tx-bytes-per-second",
    "rx-bytes-per-second",
    "tx-packets-per-second",
    "rx-packets-per-second",
    "dns-per-second",
    "default",
    "allow",
    "inspect",
    "deny",
    "host-loopback",
    "uplink",
    "on-exit",
    "pin-dir",
    "log",
];
/// Of these, those that are about no VM.
const OF_THIS_PROCESS: [&str; 3] = ["on-exit", "pin-dir", "log"];
/// Flags of `run` that are about the machine.
const OF_THE_MACHINE: [&str; 27] = [
    "as",
    "generation",
    "kernel",
    "initrd",
    "restore",
    "disk",
    "vsock",
    "cmdline",
    "cpus",
    "cpu-template",
    "memory",
    "balloon",
    "huge-pages",
    "queues",
    "name",
    "mac",
    "report",
    "jail",
    "console-limit",
    "net-rate-tx",
    "net-rate-rx",
    "on-reboot",
    "cgroup",
    "cpu-max",
    "memory-max",
    "swap-max",
    "pids-max",
];
/// Flags of policies that name files, which only the daemon may read, or resolvers.
const OF_A_POLICY: [&str; 4] = ["policy", "policy-name", "deny-file", "dns"];

/// The VMs of `attach`, as the daemon gets them. `given`: the flags as typed.
///
/// # Errors
/// A flag can't be meant for one VM of a daemon, or its value can't be used.
pub(crate) fn attach(
    args: &AttachArgs,
    given: &ArgMatches,
) -> Result<Vec<VmDefinition>, ConfigError> {
    check_flags("attach", given, &[])?;
    if matches!(args.on_exit, OnExit::Keep) {
        return Err(ConfigError::new(
            "--on-exit",
            "keep",
            "a daemon serves this network namespace, which removes the VM when this command ends",
            "leave it out, or have the daemon keep the VM: slipgate vm add",
        ));
    }
    let network = network::parse(&args.nat)?;
    let vms = vm::parse(&args.vm, &args.tap, &network)?;
    definitions(&args.nat, given, vms)
}

/// The VM of `run`, as the daemon behind `socket` gets it.
///
/// # Errors
/// As [`attach`].
pub(crate) fn run(
    args: &RunArgs,
    given: &ArgMatches,
    config: &RunConfig,
    socket: PathBuf,
) -> Result<Daemon, ConfigError> {
    check_flags("run", given, &OF_THE_MACHINE)?;
    let vms = definitions(&args.nat, given, config.nat.vms.clone())?;
    let vm = vms.into_iter().next();
    let vm = vm.ok_or_else(|| ConfigError::new("--name", "", "no VM", "name it"))?;
    let uplink = args.nat.uplink.clone();
    Ok(Daemon {
        socket,
        vm,
        uplink,
        kept: None,
    })
}

/// The machine of `run --as` is that of a VM which the daemon behind `socket` keeps, one of `served`.
///
/// # Errors
/// There is no such VM, it is not kept, the machine does not fit it, or a flag says of the VM or the NAT
/// what the daemon has.
pub(crate) fn run_as(
    args: &RunArgs,
    given: &ArgMatches,
    config: &mut RunConfig,
    socket: PathBuf,
    served: Vec<VmDefinition>,
) -> Result<Daemon, ConfigError> {
    let name = config.nat.vms[0].name.clone();
    check_flags("run", given, &OF_THE_MACHINE)?;
    for long in OF_THE_VM
        .into_iter()
        .filter(|long| !OF_THIS_PROCESS.contains(long))
    {
        let id = long.replace('-', "_");
        let is_there = given.try_contains_id(&id).unwrap_or(false);
        if is_there && given.value_source(&id) == Some(ValueSource::CommandLine) {
            let problem = format!("with --as the VM {name} has what the daemon has of it");
            let remedy = "leave it out, and use `slipgate vm set`";
            let flag = Box::leak(format!("--{long}").into_boxed_str());
            return Err(ConfigError::new(flag, "(given)", problem, remedy));
        }
    }
    let refused =
        |problem: String, remedy: String| ConfigError::new("--as", &name, problem, remedy);
    let names: Vec<String> = served.iter().map(|vm| vm.name.clone()).collect();
    let Some(vm) = served.into_iter().find(|vm| vm.name == name) else {
        let there = match names.is_empty() {
            true => "none".to_owned(),
            false => names.join(", "),
        };
        return Err(refused(
            format!("the daemon serves no such VM; there is {there}"),
            "give one of these, or add it first (`slipgate vm add`)".to_owned(),
        ));
    };
    if vm.tied {
        return Err(refused(
            "it goes with the command that brought it".to_owned(),
            format!("keep it (`slipgate vm keep {name}`), and end that command"),
        ));
    }
    let mac = vm
        .mac
        .as_deref()
        .map(|text| parse_mac("--as", text, text))
        .transpose()?;
    match mac {
        Some(mac) if config.machine.restore.is_none() => config.machine.mac = mac,
        Some(mac) if mac != config.machine.mac => {
            let text = |mac: [u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
            let (its, saved) = (text(mac), text(config.machine.mac));
            return Err(refused(
                format!("its MAC address is {its}, and that of the snapshot's machine {saved}"),
                format!(
                    "restore a snapshot of its own machine, or `slipgate vm set {name} --mac {saved}`"
                ),
            ));
        }
        _ => {}
    }
    config.set_tap(&vm.tap);
    Ok(Daemon {
        socket,
        vm,
        uplink: None,
        kept: Some(match args.restore.is_some() && !args.generation {
            true => KeptFlows::GoOn,
            false => KeptFlows::End,
        }),
    })
}

/// The VMs as the daemon gets them.
fn definitions(
    nat: &NatArgs,
    given: &ArgMatches,
    vms: Vec<VmConfig>,
) -> Result<Vec<VmDefinition>, ConfigError> {
    let names: Vec<&str> = vms.iter().map(|vm| vm.name.as_str()).collect();
    let forwards = forwards(&nat.forward, None, &names)?;
    let is_given = |id| given.value_source(id) == Some(ValueSource::CommandLine);
    let guest_ip = network::parse(nat)?.guest;
    let own = own_policy(nat, given)?;
    parse_host_loopback(&nat.host_loopback)?;
    let of_vm = |(at, vm): (usize, &VmConfig)| {
        let ours = forwards.iter().filter(|forward| forward.vm == at);
        let specs = ours.map(|forward| {
            let spec = forward.spec.split_once('=');
            spec.map_or(&*forward.spec, |(_, spec)| spec).to_owned()
        });
        let mut specs: Vec<String> = specs.collect();
        specs.dedup();
        let has_own_ip = vm.ip != guest_ip || is_given("guest_ip");
        VmDefinition {
            ip: has_own_ip.then_some(vm.ip),
            ipv6: is_given("ipv6").then(|| (&nat.ipv6).into()),
            ipv6_prefix: match &nat.ipv6 {
                Ipv6::Routed(Some(prefix)) => Some(prefix.clone()),
                _ => nat.ipv6_prefix.clone(),
            },
            quotas: vm.flags.quotas.or(nat.quotas.quotas()),
            forwards: specs,
            host_loopback: nat.host_loopback.clone(),
            inline_policy: own.clone(),
            ..vm.definition()
        }
    };
    let definitions: Vec<VmDefinition> = vms.iter().enumerate().map(of_vm).collect();
    let named = definitions.iter().find_map(|vm| vm.policy.as_ref());
    if let (Some(name), Some(_)) = (named, &own) {
        return Err(ConfigError::new(
            "--vm",
            format!("policy={name}"),
            "a daemon serves this network namespace, and rules are not added to its policy",
            "give the rules alone, or a policy that has them (slipgate policy put NAME FILE)",
        ));
    }
    Ok(definitions)
}

/// The text of a policy with the rules and the default of the flags; `None`: neither is given.
fn own_policy(nat: &NatArgs, given: &ArgMatches) -> Result<Option<String>, ConfigError> {
    let rules = rule_flags(given);
    if rules.is_empty() && nat.default.is_none() {
        return Ok(None);
    }
    check_rules(&rules)?;
    let rules = rules.iter().filter_map(|rule| match rule {
        RuleFlag::Match(action, text) => Some(match action {
            Action::Allow => json!({ "allow": text }),
            Action::Inspect => json!({ "inspect": text }),
            Action::Deny => json!({ "deny": text }),
        }),
        // Refused above.
        RuleFlag::DenyFile(_) => None,
    });
    let default = match nat.default {
        Some(DefaultRule::Deny) => "deny",
        Some(DefaultRule::Allow) | None => "allow",
    };
    let policy = json!({ "default": default, "rules": rules.collect::<Vec<_>>() });
    let text = toml::to_string(&policy).map_err(|e| {
        ConfigError::new("--default", default, e.to_string(), "give a policy by name")
    })?;
    Ok(Some(text))
}

/// Checks that no flag was typed that the daemon has for all its VMs. `others`: flags of the
/// command that are its own.
fn check_flags(command: &str, given: &ArgMatches, others: &[&str]) -> Result<(), ConfigError> {
    let among_all = || CommandLine::command().find_subcommand(command).cloned();
    let command_line = command_alone(command).or_else(among_all);
    let flags = command_line.as_ref().map(Command::get_arguments);
    for flag in flags.into_iter().flatten() {
        let (id, Some(long)) = (flag.get_id().as_str(), flag.get_long()) else {
            continue;
        };
        let is_given = given.value_source(id) == Some(ValueSource::CommandLine);
        if !is_given || OF_THE_VM.contains(&long) || others.contains(&long) {
            continue;
        }
        let (problem, remedy) = match OF_A_POLICY.contains(&long) {
            true => (
                "a daemon serves this network namespace, which reads no file for a client",
                "give it the policy (slipgate policy put NAME FILE) and the VM its name (--vm \
                 ...,policy=NAME), or give --own",
            ),
            false => (
                "a daemon serves this network namespace, and has that for all its VMs",
                "leave it out, or give --own, for processes of this VM's own",
            ),
        };
        let typed = given.get_raw(id).into_iter().flatten();
        let typed: Vec<_> = typed.map(|value| value.to_string_lossy()).collect();
        let flag = Box::leak(format!("--{long}").into_boxed_str());
        return Err(ConfigError::new(flag, typed.join(" "), problem, remedy));
    }
    Ok(())
}

#[cfg(test)]
#[path = "joined_test.rs"]
mod tests;
