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
//! the branches stay as they are.
use std::{
    fs::{self, File},
    io,
    os::fd::{AsRawFd, FromRawFd as _, OwnedFd},
    path::{Path, PathBuf},
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

/// The first users.
#[derive(Debug)]
pub(crate) struct FirstUsers {
    _vm: Option<IdleVm>,
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
    Ok(FirstUsers {
        _vm: vm.tried("make a VM of KVM")?,
    })
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
