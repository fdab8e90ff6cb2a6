//! NAT by host sockets: pasta and slirp4netns, each with the MTU of all and with its fastest. They
//! make their own TAP in the guest's namespace.

use std::{
    env,
    ffi::{CStr, CString, OsStr},
    os::unix::{ffi::OsStrExt as _, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use nix::{
    fcntl::{OFlag, open},
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::stat::Mode,
};
use slipgate_testbed::{GUEST_DEVICE, NetNs, world_ipv6};

use super::{
    Contender, LARGEST_MTU, MTU, Stand, make_world,
    process::{self, NatProcess},
};
use crate::machine::Pinning;

/// Variable that names another pasta than that on `PATH`.
const PASTA: &str = "SLIPGATE_PASTA";
/// Where pasta finds the guest's namespace, in a mount namespace of its own. It drops CAP_SYS_PTRACE
/// before it opens the namespace, and a current one closes all descriptors, so a path in `/proc` would
/// fail.
const MOUNT_POINT: &CStr = c"/mnt";
const NAMESPACE: &CStr = c"/mnt/guest";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Program {
    /// The rootless NAT of the project passt.
    Pasta,
    /// The one that [`PASTA`] names.
    NamedPasta,
    /// A rootless NAT that uses libslirp.
    Slirp4netns,
}

pub(crate) struct UserMode {
    name: &'static str,
    program: Program,
    mtu: u32,
    /// Ports of the host's that pasta leads to the guest, as it writes them.
    ports: &'static str,
}

/// The first two with the MTU of all.
pub(crate) const ALL: [UserMode; 4] = [
    UserMode::new("pasta", Program::Pasta, MTU),
    UserMode::new("slirp4netns", Program::Slirp4netns, MTU),
    UserMode::new("pasta-65520", Program::Pasta, LARGEST_MTU),
    UserMode::new("slirp4netns-65520", Program::Slirp4netns, LARGEST_MTU),
];

/// The pasta that a variable names, with either MTU.
pub(crate) const CURRENT: [UserMode; 2] = [
    UserMode::new("pasta-current", Program::NamedPasta, MTU),
    UserMode::new("pasta-current-65520", Program::NamedPasta, LARGEST_MTU),
];

impl UserMode {
    const fn new(name: &'static str, program: Program, mtu: u32) -> Self {
        Self {
            name,
            program,
            mtu,
            ports: "none",
        }
    }

    /// pasta that leads ports of the host's to the guest.
    pub(crate) const fn forwarding(name: &'static str, ports: &'static str) -> Self {
        Self {
            ports,
            ..Self::new(name, Program::Pasta, MTU)
        }
    }

    fn pasta(&self, program: &Path, guest: &NetNs, ipv6: bool) -> Result<Command> {
        let path = guest.path();
        let namespace = CString::new(path.as_os_str().as_bytes())?;
        let mut command = Command::new(program);
        // As root it would become nobody, who can't enter the namespace.
        command.args(["--foreground", "--quiet", "--runas", "0"]);
        command.args(["--config-net", "--netns-only", "--no-netns-quit"]);
        if !ipv6 {
            command.arg("--ipv4-only");
        }
        // Its IPv6 address and route are the host's, which it copies.
        command.args(["--ns-ifname", GUEST_DEVICE]);
        command.args(["--address", "10.0.2.15", "--netmask", "24"]);
        command.args(["--gateway", "10.0.2.2", "--mtu", &self.mtu.to_string()]);
        command.args(["--tcp-ports", self.ports, "--udp-ports", "none"]);
        command.args(["--tcp-ns", "none", "--udp-ns", "none"]);
        command
            .arg("--netns")
            .arg(OsStr::from_bytes(NAMESPACE.to_bytes()));
        let mount = move || Ok(mount_namespace(&namespace)?);
        // SAFETY: `mount` makes system calls only.
        unsafe { command.pre_exec(mount) };
        Ok(command)
    }

    fn slirp4netns(&self, guest: &NetNs) -> Command {
        let mut command = Command::new("slirp4netns");
        command.args(["--configure", "--netns-type=path"]);
        command.arg(format!("--mtu={}", self.mtu));
        command.arg(guest.path()).arg(GUEST_DEVICE);
        command
    }
}

impl Contender for UserMode {
    fn name(&self) -> &'static str {
        self.name
    }

    fn mtu(&self) -> u32 {
        self.mtu
    }

    fn version(&self) -> Result<String> {
        match self.program {
            Program::Pasta => process::version("pasta", "passt"),
            Program::NamedPasta => process::version_of(&named_pasta()?),
            Program::Slirp4netns => process::version("slirp4netns", "slirp4netns"),
        }
    }

    fn has_ipv6(&self) -> bool {
        // slirp4netns calls its IPv6 experimental.
        self.program == Program::Pasta && self.mtu == MTU
    }

    fn set_up(&self, pinning: Pinning, ipv6: bool) -> Result<Stand> {
        let world = make_world(false, ipv6)?;
        let guest = NetNs::new(&format!("guest-of-{}", self.name))?;
        if ipv6 {
            // Its device is made later, and has the default.
            world_ipv6::enable(&guest, &[])?;
        }
        let command = match self.program {
            Program::Pasta => self.pasta(Path::new("pasta"), &guest, ipv6)?,
            Program::NamedPasta => self.pasta(&named_pasta()?, &guest, ipv6)?,
            Program::Slirp4netns => self.slirp4netns(&guest),
        };
        let process = NatProcess::start(&world.host, command, pinning)?;
        let stand = Stand::of_process(world, guest, process)?;
        if ipv6 {
            stand.await_ipv6()?;
        }
        Ok(stand)
    }
}

/// Mounts a network namespace at [`NAMESPACE`], for this process and its children alone.
fn mount_namespace(namespace: &CStr) -> nix::Result<()> {
    const NONE: Option<&CStr> = None;
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(
        NONE,
        c"/",
        NONE,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        NONE,
    )?;
    mount(NONE, MOUNT_POINT, Some(c"tmpfs"), MsFlags::empty(), NONE)?;
    drop(open(NAMESPACE, OFlag::O_CREAT, Mode::S_IRUSR)?);
    mount(Some(namespace), NAMESPACE, NONE, MsFlags::MS_BIND, NONE)
}

fn named_pasta() -> Result<PathBuf> {
    let named = env::var_os(PASTA).map(PathBuf::from);
    let named = named.with_context(|| format!("{PASTA} names no binary"))?;
    check_reach(&named)?;
    Ok(named)
}

/// Checks that a named pasta is found behind the mount at [`MOUNT_POINT`].
fn check_reach(named: &Path) -> Result<()> {
    // One that is missing is named where it is started.
    let file = named.canonicalize().unwrap_or_default();
    let hidden = Path::new(OsStr::from_bytes(MOUNT_POINT.to_bytes()));
    // A path may lead through it to a file elsewhere.
    let through = std::path::absolute(named)?;
    ensure!(
        ![&*file, &*through]
            .iter()
            .any(|path| path.starts_with(hidden)),
        "{PASTA}={} is below {}, where the benchmark mounts a file system of its own for it: copy it \
         elsewhere",
        named.display(),
        hidden.display()
    );
    Ok(())
}

#[cfg(test)]
#[path = "user_mode_test.rs"]
mod tests;
