//! Branches of the kernel's code that are patched, taken into use while one CPU runs.
//!
//! # Theory of operation
//! Linux patches a branch of its own code when a feature has its first user, and again after the last (a
//! static key). Among them are branches of the scheduler: for the first VM of KVM, and for the first
//! cgroup with a limit of CPU time. Meanwhile an INT3 stands there, and a CPU that comes by traps. QEMU
//! 7.2, which emulates these machines, does not lock a page while it translates code from it. So a CPU may
//! keep the translation of an INT3 that another CPU has overwritten since. The handler finds no INT3 in
//! memory and has the instruction run once more, for ever and with interrupts off. One machine in some
//! twelve hung so: a CPU in the context switch or in the accounting of CPU time, with its run queue
//! locked, and the other waiting for it.
//!
//! So the first user of each is made while the other CPUs are offline, and lives as long as the machine:
//! the branches stay as they are. So do those that each packet comes by, for time stamps and for a
//! `clsact` at a device, and that of who asks for random bytes, which is patched when there are any.
use std::{
    fs::{self, File},
    io,
    net::UdpSocket,
    os::fd::{AsRawFd, FromRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket,
    sockopt,
};
use slipgate_testbed::{Result, error::Tried};

use crate::limits;

const KVM: &str = "/dev/kvm";
const CPUS: &str = "/sys/devices/system/cpu";
/// `KVM_CREATE_VM` of <linux/kvm.h>.
const CREATE_VM: libc::c_ulong = 0xAE01;
/// `KVM_CREATE_VCPU`.
const CREATE_VCPU: libc::c_ulong = 0xAE41;
/// `KVM_CREATE_IRQCHIP`.
const CREATE_IRQCHIP: libc::c_ulong = 0xAE60;
/// The kernel patches the branches for time stamps and random bytes in a work queue, right after their
/// first use.
const PATCHED_WITHIN: Duration = Duration::from_millis(100);
/// Index of the loopback device, the first of every network namespace.
const LOOPBACK: i32 = 1;

/// The first users.
#[derive(Debug)]
pub(crate) struct FirstUsers {
    _vm: Option<IdleVm>,
    _time_stamps: UdpSocket,
}

/// A VM that never runs, with a vCPU.
#[derive(Debug)]
struct IdleVm {
    _vm: OwnedFd,
    _vcpu: OwnedFd,
}

/// Makes the first users; `None` on a machine with one CPU.
pub(crate) fn take_into_use() -> Result<Option<FirstUsers>> {
    // The first CPU has no such file.
    let cpus = fs::read_dir(CPUS).tried(format!("read {CPUS}"))?;
    let others: Vec<PathBuf> = cpus
        .flatten()
        .map(|entry| entry.path().join("online"))
        .filter(|switch| switch.exists())
        .collect();
    if others.is_empty() {
        return Ok(None);
    }
    let switch_others = |state| {
        others.iter().try_for_each(|switch| {
            fs::write(switch, state).tried(format!("write {state} to {}", switch.display()))
        })
    };
    switch_others("0")?;
    let users = first_users();
    switch_others("1")?;
    users.map(Some)
}

fn first_users() -> Result<FirstUsers> {
    limits::make_idle_cgroup()?;
    let vm = Path::new(KVM).exists().then(idle_vm).transpose();
    add_clsact().tried("add a clsact to the loopback device")?;
    await_random_bytes().tried("wait for random bytes (getrandom)")?;
    let users = FirstUsers {
        _vm: vm.tried("make a VM of KVM")?,
        _time_stamps: time_stamps().tried("have a socket's packets stamped")?,
    };
    sleep(PATCHED_WITHIN);
    Ok(users)
}

fn time_stamps() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
    Ok(socket)
}

fn await_random_bytes() -> io::Result<()> {
    let mut byte = 0_u8;
    // SAFETY: one byte that is writable. Without a flag the call waits until there are random bytes.
    match unsafe { libc::getrandom((&raw mut byte).cast(), 1, 0) } {
        1 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A kernel without the queueing discipline has no branch for it.
fn add_clsact() -> io::Result<()> {
    let route = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )?;
    send(route.as_raw_fd(), &new_clsact(), MsgFlags::empty())?;
    // An nlmsghdr and the error of an nlmsgerr, 0 for none (linux/netlink.h).
    let mut answer = [0; 64];
    let bytes = recv(route.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    let error = answer[..bytes]
        .get(16..20)
        .and_then(|of| of.try_into().ok());
    match error.map_or(-libc::EPROTO, i32::from_ne_bytes) {
        0 => Ok(()),
        error if -error == libc::ENOENT => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// `RTM_NEWQDISC` of a clsact: nlmsghdr, tcmsg (linux/rtnetlink.h) and its kind.
fn new_clsact() -> Vec<u8> {
    /// linux/pkt_sched.h: the parent of a clsact, and its usual handle.
    const TC_H_CLSACT: u32 = 0xFFFF_FFF1;
    const HANDLE: u32 = 0xFFFF_0000;
    const TCA_KIND: u16 = 1;
    const KIND: &[u8; 8] = b"clsact\0\0";
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_EXCL;
    let mut message = Vec::new();
    message.extend(libc::RTM_NEWQDISC.to_ne_bytes());
    message.extend((flags as u16).to_ne_bytes());
    // Sequence number and port; the family with its padding.
    message.extend([0; 8 + 4]);
    message.extend(LOOPBACK.to_ne_bytes());
    message.extend(HANDLE.to_ne_bytes());
    message.extend(TC_H_CLSACT.to_ne_bytes());
    message.extend([0; 4]);
    // The name with its NUL, and a byte to the multiple of four that the length does not count.
    message.extend((4 + 7_u16).to_ne_bytes());
    message.extend(TCA_KIND.to_ne_bytes());
    message.extend(KIND);
    let bytes = u32::try_from(4 + message.len()).unwrap_or(0);
    [&bytes.to_ne_bytes()[..], &message].concat()
}

fn idle_vm() -> io::Result<IdleVm> {
    let kvm = File::options().read(true).write(true).open(KVM)?;
    let vm = made(&kvm, CREATE_VM)?;
    call(&vm, CREATE_IRQCHIP)?;
    let vcpu = made(&vm, CREATE_VCPU)?;
    Ok(IdleVm {
        _vm: vm,
        _vcpu: vcpu,
    })
}

fn made(on: &impl AsRawFd, request: libc::c_ulong) -> io::Result<OwnedFd> {
    // SAFETY: a descriptor that nothing else owns.
    call(on, request).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// An ioctl whose argument is 0: type, id, or none.
fn call(on: &impl AsRawFd, request: libc::c_ulong) -> io::Result<libc::c_int> {
    // SAFETY: no memory is passed.
    match unsafe { libc::ioctl(on.as_raw_fd(), request, 0) } {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}
