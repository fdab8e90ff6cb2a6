//! Sockets that reserve the host ports of forwards and accept connections from the host itself.
use std::{
    fs,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
};

use anyhow::{Context as _, anyhow};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket,
    sockopt,
};
use slipgate_abi::Protocol;
use slipgate_policy::document::Forward;

use crate::{handover::HandedOver, role::Role};

/// Length of a listening socket's backlog.
const BACKLOG: i32 = 1_024;

/// Error: another process or VM has the requested resource. The text names it.
#[derive(thiserror::Error, Debug)]
#[error("{0}")]
pub(crate) struct ResourceTaken(pub(crate) String);

/// Takes a forward's socket over from a predecessor, or makes one. `None`: it has none.
pub(super) fn take_over(
    forward: &Forward,
    handed_over: &mut HandedOver,
) -> anyhow::Result<Option<OwnedFd>> {
    let kind = kind_of(forward);
    let address = SocketAddr::new(forward.host, forward.host_port);
    let handed_over = handed_over.socket(kind, address);
    match handed_over {
        Some(socket) => Ok(Some(socket)),
        None => reserve(forward),
    }
}

fn kind_of(forward: &Forward) -> SockType {
    match forward.protocol == Protocol::Tcp as u8 {
        true => SockType::Stream,
        false => SockType::Datagram,
    }
}

/// Binds a forward's host port, and listens on it if it is TCP's. The socket is non-blocking. `None`: the
/// address is the guest's own, and nobody can bind its ports here.
pub(crate) fn reserve(forward: &Forward) -> anyhow::Result<Option<OwnedFd>> {
    match forward.is_own {
        true => Ok(None),
        false => bound(forward).map(Some),
    }
}

fn bound(forward: &Forward) -> anyhow::Result<OwnedFd> {
    let tcp = forward.protocol == Protocol::Tcp as u8;
    let name = if tcp { "tcp" } else { "udp" };
    let what = || {
        format!(
            "--forward {name}:{}:{}: taking port {} of the host",
            SocketAddr::new(forward.host, forward.host_port),
            forward.guest_port,
            forward.host_port
        )
    };
    let kind = kind_of(forward);
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let family = match forward.host {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    let socket = socket(family, kind, flags, None).with_context(what)?;
    if forward.host.is_ipv6() {
        // The port's IPv4 half is a socket of its own, or another's.
        setsockopt(&socket, sockopt::Ipv6V6Only, &true).with_context(what)?;
    }
    if tcp {
        // Connections of a predecessor may be in TIME-WAIT.
        setsockopt(&socket, sockopt::ReuseAddr, &true).with_context(what)?;
        // Accepted sockets have it too: the engine has urgent data as data, also what came before it
        // accepts.
        setsockopt(&socket, sockopt::OobInline, &true).with_context(what)?;
    }
    let address = SockaddrStorage::from(SocketAddr::new(forward.host, forward.host_port));
    let taken = || {
        let by = holder(name, forward.host, forward.host_port);
        let remedy = "stop that one, or forward another port";
        ResourceTaken(format!("{}: it is taken by {by}; {remedy}", what())).into()
    };
    match bind(socket.as_raw_fd(), &address) {
        Ok(()) => {}
        Err(nix::Error::EADDRINUSE) => return Err(taken()),
        Err(nix::Error::EADDRNOTAVAIL) => {
            return Err(anyhow!(
                "{} is not an address of this host; leave it out for all, or give one that \
                 `ip address` shows",
                forward.host
            )
            .context(what()));
        }
        Err(nix::Error::EACCES) => {
            return Err(anyhow!(forbidden(forward.host_port)).context(what()));
        }
        Err(e) => return Err(e).with_context(what),
    }
    if tcp {
        let backlog = Backlog::new(BACKLOG).with_context(what)?;
        match listen(&socket, backlog) {
            Ok(()) => {}
            Err(nix::Error::EADDRINUSE) => return Err(taken()),
            Err(e) => return Err(e).with_context(what),
        }
    }
    Ok(socket)
}

/// Why a user without the capability may not bind a port, and what to do.
fn forbidden(port: u16) -> String {
    const SETTING: &str = "net.ipv4.ip_unprivileged_port_start";
    let first = fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    let first = first.ok().and_then(|text| text.trim().parse().ok());
    let first: u16 = first.unwrap_or(1_024);
    format!(
        "ports below {first} need CAP_NET_BIND_SERVICE: forward one from {first} on, or have root \
         set {SETTING}={port}"
    )
}

/// Process that holds a port.
#[derive(Debug, PartialEq, Eq)]
enum Holder {
    Process {
        pid: u32,
        command: String,
    },
    /// A process of this user, whose descriptors this process may not read.
    User(u32),
    /// A process that is not visible, for example in another user namespace, or one that has closed
    /// the socket meanwhile.
    Unseen,
}

impl Holder {
    fn of(pid: u32) -> Self {
        let command = command_of(&Path::new("/proc").join(pid.to_string()));
        Self::Process { pid, command }
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Process { pid, command } => write!(f, "{command} (process {pid})"),
            Self::User(uid) => write!(
                f,
                "a process of the user {uid} (`ss -lptun` says which, asked by root)"
            ),
            Self::Unseen => f.write_str("somebody this process can't see"),
        }
    }
}

/// Returns the process that has a socket on this port, found by its inode in /proc. Rather another than
/// this one, which may have the port for other addresses.
fn holder(protocol: &str, host: IpAddr, port: u16) -> Holder {
    // A socket of IPv6 may hold a port of IPv4, too.
    let tables = match host {
        IpAddr::V4(_) => vec![protocol.to_owned(), format!("{protocol}6")],
        IpAddr::V6(_) => vec![format!("{protocol}6")],
    };
    let sockets: Vec<(u64, u32)> = tables
        .iter()
        .filter_map(|table| fs::read_to_string(format!("/proc/thread-self/net/{table}")).ok())
        .flat_map(|text| sockets_in(&text, protocol == "tcp", host, port))
        .collect();
    let Some((_, user)) = sockets.first() else {
        return Holder::Unseen;
    };
    let inodes = sockets.iter().map(|(inode, _)| format!("socket:[{inode}]"));
    let inodes: Vec<String> = inodes.collect();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut is_this_one = false;
    for process in processes {
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let Ok(fds) = fs::read_dir(process.path().join("fd")) else {
            continue;
        };
        let has = fds
            .flatten()
            .filter_map(|fd| fs::read_link(fd.path()).ok())
            .any(|target| {
                inodes
                    .iter()
                    .any(|inode| target.as_os_str() == inode.as_str())
            });
        if has && pid == std::process::id() {
            is_this_one = true;
        } else if has {
            let holder = Holder::of(pid);
            // Who started an engine is the one to stop.
            let is_engine = matches!(
                &holder,
                Holder::Process { command, .. } if command == Role::Engine.title()
            );
            let broker = is_engine.then(|| parent_of(pid)).flatten();
            return broker.map_or(holder, Holder::of);
        }
    }
    match is_this_one {
        true => Holder::of(std::process::id()),
        false => Holder::User(*user),
    }
}

fn parent_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    parent.trim().parse().ok().filter(|pid| *pid > 1)
}

/// Returns the name of a process: the last part of its first argument, because that is what
/// slipgate's own processes set and their `comm` is `exe`; else `comm`.
fn command_of(process: &Path) -> String {
    let read = |file| fs::read(process.join(file)).unwrap_or_default();
    let arguments = read("cmdline");
    let first = arguments
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    let first = String::from_utf8_lossy(first);
    let name = first.rsplit('/').next().unwrap_or_default();
    let named = [name.trim(), String::from_utf8_lossy(&read("comm")).trim()]
        .into_iter()
        .find(|name| !name.is_empty())
        .unwrap_or("a process")
        .to_owned();
    // Anybody may call himself anything.
    named
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// Inodes and users of sockets bound to the port on this address or on any. The table's format is
/// `Documentation/networking/proc_net_tcp.rst`; of TCP only listening ones (state 0A) hold a port
/// against SO_REUSEADDR.
fn sockets_in(table: &str, tcp: bool, host: IpAddr, port: u16) -> Vec<(u64, u32)> {
    let mut sockets = Vec::new();
    for line in table.lines().skip(1) {
        let fields: Vec<_> = line.split_whitespace().collect();
        let (Some(local), Some(state), Some(user), Some(inode)) =
            (fields.get(1), fields.get(3), fields.get(7), fields.get(9))
        else {
            continue;
        };
        let Some((address, local_port)) = local.split_once(':') else {
            continue;
        };
        if u16::from_str_radix(local_port, 16) != Ok(port) || (tcp && *state != "0A") {
            continue;
        }
        // The address is in native order, as one word or four.
        let octets: Vec<u8> = (0..address.len() / 8)
            .filter_map(|word| u32::from_str_radix(address.get(word * 8..word * 8 + 8)?, 16).ok())
            .flat_map(u32::to_ne_bytes)
            .collect();
        let bound = match (host, octets[..].last_chunk(), octets[..].first_chunk()) {
            (IpAddr::V4(_), Some(last), _) => Some(IpAddr::from(*last as [u8; 4])),
            (IpAddr::V6(_), _, Some(all)) => Some(IpAddr::from(*all as [u8; 16])),
            _ => None,
        };
        let any = address.bytes().all(|b| b == b'0') || host.is_unspecified();
        if any || bound == Some(host) {
            sockets.extend(inode.parse().ok().zip(user.parse().ok()));
        }
    }
    sockets
}

#[cfg(test)]
#[path = "reserve_test.rs"]
mod tests;
