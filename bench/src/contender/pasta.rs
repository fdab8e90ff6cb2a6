//! pasta (passt): NAT by host sockets. It makes its own TAP in the guest's namespace.

use std::{
    fs::File,
    os::{fd::AsRawFd, unix::process::CommandExt},
    process::Command,
};

use anyhow::{Context, Result};
use slipgate_testbed::{GUEST_DEVICE, NetNs, World};

use super::{
    Contender, MTU, Stand,
    process::{self, NatProcess},
    world,
};
use crate::machine::Pinning;

/// Default MTU of pasta, bytes, with which it is fastest.
const BEST_MTU: u32 = 65520;
/// Descriptor by which the child finds the guest's namespace. pasta drops CAP_SYS_PTRACE before it
/// opens the namespace, so a path below another process's `/proc` entry would fail.
const NAMESPACE_FD: i32 = 9;

pub(super) struct Pasta {
    name: &'static str,
    mtu: u32,
}

impl Pasta {
    pub(super) fn equal() -> Self {
        Pasta {
            name: "pasta",
            mtu: MTU,
        }
    }

    pub(super) fn best() -> Self {
        Pasta {
            name: "pasta-65520",
            mtu: BEST_MTU,
        }
    }
}

impl Contender for Pasta {
    fn name(&self) -> &'static str {
        self.name
    }

    fn mtu(&self) -> u32 {
        self.mtu
    }

    fn version(&self) -> Result<String> {
        process::version("pasta", "passt")
    }

    fn set_up(&self, pinning: Pinning) -> Result<Stand> {
        let world = World::with(world(false))?;
        let guest = NetNs::new("guest-of-pasta")?;
        let path = guest.path();
        let namespace = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        let mut command = Command::new("pasta");
        // As root it would become nobody, who can't enter the namespace.
        command.args(["--foreground", "--quiet", "--runas", "0"]);
        command.args(["--config-net", "--netns-only", "--no-netns-quit"]);
        command.args(["--ipv4-only", "--ns-ifname", GUEST_DEVICE]);
        command.args(["--address", "10.0.2.15", "--netmask", "24"]);
        command.args(["--gateway", "10.0.2.2", "--mtu", &self.mtu.to_string()]);
        command.args(["--tcp-ports", "none", "--udp-ports", "none"]);
        command.args(["--tcp-ns", "none", "--udp-ns", "none"]);
        command.args(["--netns", &format!("/proc/self/fd/{NAMESPACE_FD}")]);
        let duplicate = move || {
            // SAFETY: dup2 takes numbers only and may be called between fork and exec; the
            // closure holds the descriptor.
            match unsafe { libc::dup2(namespace.as_raw_fd(), NAMESPACE_FD) } {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            }
        };
        // SAFETY: `duplicate` makes a system call only.
        unsafe { command.pre_exec(duplicate) };
        let process = NatProcess::start(&world.host, command, pinning)?;
        Stand::of_process(world, guest, process)
    }
}
