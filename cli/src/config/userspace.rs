//! Configuration of the user-mode engine: of `slipgate exec`, of `slipgate attach --socket` and
//! `--vhost-user`, and of `slipgate run --mode userspace`.
use std::path::Path;

use slipgate_broker::{
    ExecConfig, GuestSocket, Inside, SocketConfig,
    config::{Config, Mode, VmConfig},
};
use slipgate_control::{GuestNamespace, NamespaceIpv6};
use slipgate_ipc::engine::{GuestProtocol, OnExit};
use slipgate_policy::document::{ConfigError, RuleFlag, check_name};

use super::{api_sockets, network, settled};
use crate::args::{self, ApiArgs, AttachArgs, ExecArgs, InsideArgs, NatArgs};

/// Checks the flags of `exec`. `order`: the rule flags as typed, see [`super::rule_flags`].
pub(crate) fn exec(args: &ExecArgs, order: Vec<RuleFlag>) -> Result<ExecConfig, ConfigError> {
    let name = match &args.name {
        Some(name) => check_name("--name", name, name)?.to_owned(),
        None => format!("exec-{}", std::process::id()),
    };
    Ok(ExecConfig {
        nat: of_one(&args.nat, &args.api, &name, None, order)?,
        command: args.command.clone(),
    })
}

/// Checks the flags of `attach --socket`, `--vhost-user` and `--fd`. `order`: the rule flags as typed.
pub(crate) fn attach_socket(
    args: &AttachArgs,
    order: Vec<RuleFlag>,
) -> Result<SocketConfig, ConfigError> {
    if args.on_exit == args::OnExit::Keep {
        let problem = "flows end with the engine here";
        return Err(ConfigError::new("--on-exit", "keep", problem, LEAVE_OUT));
    }
    let given = args.name.as_deref();
    let (socket, name) = match (&args.vhost_user, &args.socket, args.fd) {
        (None, None, Some(fd)) => {
            let name = match given {
                Some(name) => check_name("--name", name, name)?.to_owned(),
                None => format!("guest-{}", std::process::id()),
            };
            (GuestSocket::Inherited(fd), name)
        }
        (by_rings, by_frames, _) => {
            let (flag, protocol, path) = match (by_rings, by_frames) {
                (Some(path), _) => (VHOST_USER, GuestProtocol::VhostUser, path.clone()),
                (None, path) => {
                    let path = path.clone().unwrap_or_default();
                    (SOCKET, GuestProtocol::Frames, path)
                }
            };
            let name = name_of(flag, given, &path)?;
            let is_for_one = args.one_off;
            let socket = GuestSocket::At {
                flag,
                protocol,
                path,
                is_for_one,
            };
            (socket, name)
        }
    };
    Ok(SocketConfig {
        nat: of_one(&args.nat, &args.api, &name, None, order)?,
        socket,
        pid_file: args.pid_file.clone(),
    })
}

const SOCKET: &str = "--socket";
const VHOST_USER: &str = "--vhost-user";

/// The name that was given, or that of the socket's file.
fn name_of(flag: &'static str, given: Option<&str>, path: &Path) -> Result<String, ConfigError> {
    if let Some(name) = given {
        return Ok(check_name("--name", name, name)?.to_owned());
    }
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    match check_name(flag, &path.to_string_lossy(), &name) {
        Ok(name) => Ok(name.to_owned()),
        Err(e) => {
            let problem = format!("{}, as the VM would be called", e.problem);
            let remedy = "name the VM: --name NAME";
            Err(ConfigError::new(flag, path.display(), problem, remedy))
        }
    }
}

/// The NAT of one guest. `mac`: the only one that its frames may have.
pub(super) fn of_one(
    nat: &NatArgs,
    api: &ApiArgs,
    name: &str,
    mac: Option<[u8; 6]>,
    order: Vec<RuleFlag>,
) -> Result<Config, ConfigError> {
    refuse_absent(nat)?;
    let network = network::parse(nat)?;
    // No device of the host's has this name, whatever it is.
    let vm = VmConfig {
        mac,
        ..VmConfig::new(name, name, network.guest)
    };
    let vms = Some(vec![vm]);
    let config = settled(Mode::Userspace, nat, network, vms, OnExit::Detach, order)?;
    Ok(Config {
        api: api_sockets(api)?,
        ..config
    })
}

pub(super) const NOT_YET: &str = "the user-mode engine has it not yet";
pub(super) const LEAVE_OUT: &str = "leave it out";

/// Refuses flags that mean the kernel's part.
fn refuse_absent(nat: &NatArgs) -> Result<(), ConfigError> {
    let refused = |flag, given: &dyn std::fmt::Display, problem, remedy| {
        Err(ConfigError::new(flag, given, problem, remedy))
    };
    const KERNELS: &str = "the user-mode engine has no part in the kernel";
    if nat.mode == args::Mode::Hybrid {
        return refused("--mode", &"hybrid", KERNELS, LEAVE_OUT);
    }
    if matches!(nat.ipv6, args::Ipv6::Routed(_)) {
        const SOCKETS: &str = "the user-mode engine's sockets have the host's addresses";
        const NAT: &str = "give nat or auto, or run in hybrid mode";
        return refused("--ipv6", &"routed", SOCKETS, NAT);
    }
    if nat.xdp == args::Xdp::On {
        return refused("--xdp", &"on", KERNELS, LEAVE_OUT);
    }
    if nat.bpf_log {
        return refused("--bpf-log", &"", KERNELS, LEAVE_OUT);
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
            ipv6: args
                .guest6
                .zip(args.gateway6)
                .map(|(guest, gateway)| NamespaceIpv6 { guest, gateway }),
        },
        covered: args.cover.clone(),
        makes_sockets: args.sockets,
        command: args.command.clone(),
    }
}
