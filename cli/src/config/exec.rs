//! Configuration of `slipgate exec`: the NAT of one command.
use slipgate_broker::{
    ExecConfig, Inside,
    config::{Mode, VmConfig},
};
use slipgate_control::GuestNamespace;
use slipgate_ipc::engine::OnExit;
use slipgate_policy::document::{ConfigError, RuleFlag, check_name};

use super::{network, settled};
use crate::args::{self, ExecArgs, InsideArgs};

/// Checks the flags of `exec`. `order`: the rule flags as typed, see [`super::rule_flags`].
pub(crate) fn exec(args: &ExecArgs, order: Vec<RuleFlag>) -> Result<ExecConfig, ConfigError> {
    let nat = &args.nat;
    let name = match &args.name {
        Some(name) => check_name("--name", name, name)?.to_owned(),
        None => format!("exec-{}", std::process::id()),
    };
    refuse_absent(args)?;
    let network = network::parse(nat)?;
    // No device of the host's has the TAP's name, whatever it is.
    let vm = VmConfig::new(&name, &name, network.guest);
    let vms = Some(vec![vm]);
    let config = settled(Mode::Userspace, nat, network, vms, OnExit::Detach, order)?;
    if let Some(forward) = config.forwards.first() {
        let remedy = "leave it out: a command is not reached from outside yet";
        return Err(ConfigError::new(
            "--forward",
            &forward.spec,
            NOT_YET,
            remedy,
        ));
    }
    Ok(ExecConfig {
        nat: config,
        command: args.command.clone(),
    })
}

const NOT_YET: &str = "`slipgate exec` has it not yet";

/// Refuses flags that mean the kernel's part, or what this mode has not yet.
fn refuse_absent(args: &ExecArgs) -> Result<(), ConfigError> {
    let nat = &args.nat;
    let refused = |flag, given: &dyn std::fmt::Display, problem, remedy| {
        Err(ConfigError::new(flag, given, problem, remedy))
    };
    const KERNELS: &str = "a command has no part of slipgate's in the kernel";
    const LEAVE_OUT: &str = "leave it out";
    if nat.mode == args::Mode::Hybrid {
        return refused("--mode", &"hybrid", KERNELS, LEAVE_OUT);
    }
    if nat.xdp == args::Xdp::On {
        return refused("--xdp", &"on", KERNELS, LEAVE_OUT);
    }
    if nat.bpf_log {
        return refused("--bpf-log", &"", KERNELS, LEAVE_OUT);
    }
    if let Some(address) = &nat.metrics {
        return refused("--metrics", address, NOT_YET, "use `slipgate stats --json`");
    }
    Ok(())
}

/// The flags that `exec` gives to the command's process.
pub(crate) fn inside(args: &InsideArgs) -> Inside {
    Inside {
        fd: args.fd,
        namespace: GuestNamespace {
            guest: args.guest,
            prefix_len: args.prefix,
            gateway: args.gateway,
            dns: args.dns,
            mtu: args.mtu,
        },
        command: args.command.clone(),
    }
}
