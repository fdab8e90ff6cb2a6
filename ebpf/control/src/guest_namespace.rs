//! A network namespace for one command, with a TAP as its only way out: `slipgate exec`.
//!
//! The calling process enters a user namespace of its own, in which its user and group keep their
//! numbers, and in it a network and a mount namespace. It has every capability there until it executes
//! the command, and none outside.
mod ipv6;

use std::{
    ffi::{CStr, CString},
    fs, io,
    net::Ipv4Addr,
    os::{
        fd::OwnedFd,
        unix::{
            ffi::OsStrExt as _,
            fs::{DirBuilderExt as _, FileTypeExt as _},
        },
    },
    path::{Path, PathBuf},
};

pub use self::ipv6::NamespaceIpv6;
use crate::{
    Error, Result,
    device::{Device, request, sockaddr},
    tap::{open_queue, queue_for_frames},
};

/// Name of the TAP in the namespace.
const TAP: &str = "tap0";

/// Addresses of the namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestNamespace {
    /// Address of the TAP.
    pub guest: Ipv4Addr,
    /// Prefix length of its network.
    pub prefix_len: u8,
    /// Address of the router, slipgate's.
    pub gateway: Ipv4Addr,
    /// The resolver that `/etc/resolv.conf` names.
    pub dns: Ipv4Addr,
    /// MTU of the TAP, L3 bytes.
    pub mtu: u32,
    /// IPv6; `None`: the namespace has none.
    pub ipv6: Option<NamespaceIpv6>,
}

/// The TAP's other end.
#[derive(Debug)]
pub struct GuestDevice {
    /// Descriptor, non-blocking: each read and write is a 10-byte `virtio_net_hdr` and a frame.
    pub queue: OwnedFd,
    /// Whether it takes UDP GSO frames.
    pub takes_uso: bool,
}

impl GuestNamespace {
    /// Enters the namespaces, and configures them. The process has one thread. In the mount namespace
    /// an empty file system is over each of the `covered` directories, and an empty file over each socket
    /// among them: the command has the user's rights, and these are what the user rules it by.
    ///
    /// # Errors
    /// The host permits no user namespace or no TAP, or refuses a setting or a mount.
    pub fn enter(&self, covered: &[PathBuf]) -> Result<GuestDevice> {
        // SAFETY: no arguments.
        let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
        let flags = libc::CLONE_NEWUSER | libc::CLONE_NEWNET | libc::CLONE_NEWNS;
        // SAFETY: a number.
        if unsafe { libc::unshare(flags) } != 0 {
            return Err(Error::os(
                "make a user namespace (does the host permit it? see user.max_user_namespaces, \
                 kernel.unprivileged_userns_clone and \
                 kernel.apparmor_restrict_unprivileged_userns)",
            )(io::Error::last_os_error()));
        }
        // Without it a group may not be mapped by who has no privilege.
        put("/proc/self/setgroups", "deny")?;
        put("/proc/self/uid_map", &format!("{user} {user} 1"))?;
        put("/proc/self/gid_map", &format!("{group} {group} 1"))?;
        Device::named("lo")?.set_up(true)?;
        let (file, name) = open_queue(TAP, libc::IFF_TUN_EXCL)?;
        let takes_uso = queue_for_frames(&file).map_err(Error::os(format!(
            "set header size and offloads of the TAP {name}"
        )))?;
        let device = Device::named(&name)?;
        match self.ipv6 {
            Some(_) => ipv6::begin(&device)?,
            None => device.disable_ipv6()?,
        }
        device.set_mtu(self.mtu)?;
        device.set_address(self.guest, self.prefix_len)?;
        device.set_up(true)?;
        add_default_route(self.gateway)?;
        if let Some(ipv6) = self.ipv6 {
            ipv6.set(&device)?;
        }
        // `ping` of the command's own user, as on most hosts. Not all kernels have it.
        let groups = format!("{group} {group}");
        let _ = fs::write("/proc/sys/net/ipv4/ping_group_range", groups);
        // Every port of this network is the command's, those that servers have below 1024 too.
        let _ = fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
        // Many clients of forwards come by connections within this network (`userspace-nat`'s relay), whose
        // ports are free again after a second, not a minute. It needs timestamps, which connections that
        // leave do not have.
        let _ = fs::write("/proc/sys/net/ipv4/tcp_tw_reuse", "1");
        mount(None, Path::new("/"), libc::MS_REC | libc::MS_SLAVE)
            .map_err(Error::os("keep mounts apart from the host's"))?;
        for path in covered {
            let is_socket = fs::metadata(path).is_ok_and(|file| file.file_type().is_socket());
            let hidden = match is_socket {
                true => cover_socket(path),
                false => cover(path),
            };
            hidden.map_err(Error::os(format!(
                "hide {} from the command",
                path.display()
            )))?;
        }
        self.cover_resolv_conf()?;
        Ok(GuestDevice {
            queue: file.into(),
            takes_uso,
        })
    }

    /// Has `/etc/resolv.conf` name the resolver, in this mount namespace only.
    fn cover_resolv_conf(&self) -> Result<()> {
        let target = Path::new("/etc/resolv.conf");
        if !target.exists() {
            return Ok(());
        }
        let text = format!("nameserver {}\n", self.dns);
        cover_by_file(target, &text).map_err(Error::os(format!(
            "cover /etc/resolv.conf by a file in {}",
            std::env::temp_dir().display()
        )))
    }
}

/// Mounts an empty file over a socket: whoever connects to it is refused.
fn cover_socket(socket: &Path) -> io::Result<()> {
    cover_by_file(socket, "")
}

/// Mounts a file with this text over another one, by a file system of its own that is made in an empty
/// directory and does not stay there. The file is never removed from it: over one that was, nothing can be
/// mounted, and the command may make such a namespace itself.
fn cover_by_file(target: &Path, text: &str) -> io::Result<()> {
    let name = format!("slipgate-cover-{}", std::process::id());
    let dir = std::env::temp_dir().join(name);
    fs::DirBuilder::new().mode(0o700).create(&dir)?;
    let covered = cover_from(&dir, target, text);
    let removed = fs::remove_dir(&dir);
    covered.and(removed)
}

fn cover_from(dir: &Path, target: &Path, text: &str) -> io::Result<()> {
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    mount_kind(Some((c"tmpfs", c"mode=0755")), None, dir, flags)?;
    let source = dir.join("file");
    let covered =
        fs::write(&source, text).and_then(|()| mount(Some(&source), target, libc::MS_BIND));
    let place = CString::new(dir.as_os_str().as_bytes())?;
    // SAFETY: the path is terminated.
    let detached = match unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    covered.and(detached)
}

fn put(path: &str, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::os(format!("write {text:?} to {path}")))
}

/// Mounts an empty file system over a directory. One that is not there is made, or it could come later.
fn cover(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // The command may run slipgate itself, which takes a directory that is its user's alone.
    mount_kind(Some((c"tmpfs", c"mode=0700")), None, dir, flags)
}

fn mount(source: Option<&Path>, target: &Path, flags: libc::c_ulong) -> io::Result<()> {
    mount_kind(None, source, target, flags)
}

/// `kind`: type of the file system, and its options.
fn mount_kind(
    kind: Option<(&CStr, &CStr)>,
    source: Option<&Path>,
    target: &Path,
    flags: libc::c_ulong,
) -> io::Result<()> {
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes());
    let source = source.map(text).transpose()?;
    let target = text(target)?;
    let source = source.as_ref().map_or(std::ptr::null(), |s| s.as_ptr());
    let (kind, options) = kind.map_or((std::ptr::null(), std::ptr::null()), |(kind, options)| {
        (kind.as_ptr(), options.as_ptr())
    });
    // SAFETY: all are terminated, or null where the call takes that.
    let rc = unsafe { libc::mount(source, target.as_ptr(), kind, flags, options.cast()) };
    match rc {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn add_default_route(gateway: Ipv4Addr) -> Result<()> {
    // SAFETY: a struct of integers and a null pointer.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = sockaddr(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = sockaddr(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = sockaddr(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: the request with its struct.
    unsafe { request(libc::AF_INET, libc::SIOCADDRT, &raw mut route) }
        .map_err(Error::os(format!("add the default route by {gateway}")))
}
