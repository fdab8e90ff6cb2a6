//! The VMM's seccomp filters: one for the process, and one more for each kind of thread.
//!
//! A thread has the filters of the thread that made it, and the kernel applies the strictest result
//! of all. So the process's filter, installed before the first thread is made, permits the calls
//! that make a machine and those that any thread needs; and each thread restricts itself further
//! before it touches guest data, the main one last, once the machine is made. From then on no
//! thread and no ring can be made, and no descriptor except a copy of an eventfd.
//!
//! An io_uring would bypass all of this, because a submission to it is no system call. The network
//! card's rings are restricted to reads and writes of their TAP queue while the machine is made,
//! before the guest runs; afterwards none can be made, nor freed of its restrictions.
use std::io;

use nix::{
    sys::{
        resource::Resource,
        signal::{SigHandler, Signal, signal},
    },
    unistd::Pid,
};
use seccompiler::{BpfProgram, SeccompAction};
use slipgate_broker::privileges::{ConfinementError, drop_bounding_set, keep_capabilities, prctl};
use slipgate_vmm::ThreadKind;

use super::{
    become_user, bind_to, failed, jail, limit, limit_resources,
    rules::{
        Compiled, broken, common, equal, masked, nothing_by_name, open_file, program, rule, soft,
    },
};

/// Descriptors that the VMM may have: 16 queue pairs have some ten each, 64 queues of disks six, and
/// each of the 256 connections of vsock has one.
const FILES: u64 = 1_024;

/// Memory that the VMMs of one user may lock. They lock none themselves, but the kernel counts an
/// io_uring's memory so (some 16 KiB for a queue), for all processes of the user. What is made beyond
/// it goes without io_uring.
const LOCKED_BYTES: u64 = 64 << 20;

/// Purpose of a VMM thread, which determines its filter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Thread {
    /// Waits for the guest's end.
    Main,
    /// Listens to the broker.
    Channel,
    /// Carries out orders: pause, resume, snapshot.
    Orders,
    /// A thread that the VMM library creates.
    Of(ThreadKind),
}

/// Confines the calling process for good. `broker`: the parent, whose death ends this process.
/// `user`: the user that the process becomes. `in_namespaces`: whether it is in a PID namespace of its
/// own, and is to enter the others. Returns what the host refused of the namespaces; the
/// process is confined without it then.
pub(crate) fn enter(
    broker: Pid,
    user: u32,
    in_namespaces: bool,
) -> Result<Option<ConfinementError>, ConfinementError> {
    let filters = [
        nothing_by_name(),
        // Making a thread in the way whose flags no filter can see.
        soft(&[libc::SYS_clone3], libc::ENOSYS),
        hard(Calls::making()),
    ];
    prctl("no_new_privs", libc::PR_SET_NO_NEW_PRIVS, 1)?;
    limit_resources(FILES)?;
    limit("RLIMIT_MEMLOCK", Resource::RLIMIT_MEMLOCK, LOCKED_BYTES)?;
    // Over the change of user, after which they are raised again.
    prctl("keeping capabilities", libc::PR_SET_KEEPCAPS, 1)?;
    become_user(user)?;
    keep_capabilities(u64::MAX)?;
    let refused = match in_namespaces {
        true => jail::enter().err(),
        false => None,
    };
    drop_bounding_set(0)?;
    keep_capabilities(0)?;
    bind_to(broker)?;
    for filter in filters {
        apply(&filter.map_err(broken)?)?;
    }
    Ok(refused)
}

/// Bounds the size of files: the VMM writes to none behind this offset, from now on.
///
/// # Errors
/// The host refuses the limit.
pub(crate) fn limit_files(file_bytes: u64) -> Result<(), ConfinementError> {
    // A write behind the limit is an error of that write then, and not the end of the process.
    // SAFETY: no handler is installed.
    unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) }.map_err(failed("SIGXFSZ"))?;
    limit("RLIMIT_FSIZE", Resource::RLIMIT_FSIZE, file_bytes)
}

/// Confines the calling thread further, for good. `may_restart`: whether the machine may begin anew.
pub(crate) fn narrow(thread: Thread, may_restart: bool) -> io::Result<()> {
    let mut calls = Calls::of(thread);
    if may_restart {
        calls.add_restarts(thread);
    }
    let filter = hard(calls).map_err(|e| io::Error::other(broken(e)))?;
    apply(&filter).map_err(io::Error::other)
}

fn apply(filter: &BpfProgram) -> Result<(), ConfinementError> {
    seccompiler::apply_filter(filter)
        .map_err(|e| ConfinementError::new("seccomp filter", io::Error::other(e)))
}

/// Anything that is not listed ends the process.
fn hard(calls: Calls) -> Compiled<BpfProgram> {
    let calls_of = calls.calls.iter().copied().flatten();
    let mut rules = common(EVERYBODY.iter().chain(calls_of))?;
    // A debug build looks whether a descriptor is open before it closes it.
    let mut commands = vec![libc::F_GETFD];
    commands.extend(calls.fcntl);
    rules.insert(
        libc::SYS_fcntl,
        any_of(1, commands.iter().map(|&c| c as u64))?,
    );
    for (call, argument, values) in [
        (libc::SYS_ioctl, 1, calls.ioctl),
        (libc::SYS_io_uring_register, 1, calls.ring_register),
        (libc::SYS_prctl, 0, calls.prctl),
    ] {
        if !values.is_empty() {
            let values = values.iter().copied().flatten().copied();
            rules.insert(call, any_of(argument, values)?);
        }
    }
    if calls.threads {
        // Of this process, sharing all of it.
        let shared = (libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND) as u64;
        rules.insert(libc::SYS_clone, vec![rule([masked(0, shared, shared)?])?]);
    }
    // The first filter refuses it; listed, or this one would be stricter.
    rules.insert(libc::SYS_clone3, Vec::new());
    rules.insert(libc::SYS_newfstatat, open_file(3)?);
    program(rules, SeccompAction::KillProcess, SeccompAction::Allow)
}

fn any_of(
    argument: u8,
    values: impl Iterator<Item = u64>,
) -> Compiled<Vec<seccompiler::SeccompRule>> {
    values
        .map(|value| rule([equal(argument, value)?]))
        .collect()
}

/// System calls that every thread needs besides [`BY_ITSELF`].
const EVERYBODY: &[libc::c_long] = &[
    // descriptors it has
    libc::SYS_read,
    libc::SYS_write,
    // The C library's last words, such as "free(): invalid pointer": it writes them so, and a
    // process killed for that would hide why it had to end.
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_fstat,
    // waiting
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
];

/// System calls that create a machine: those of `Machine::new`, and starting threads.
const MAKING: &[libc::c_long] = &[
    // kernel and initrd
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_readv,
    // eventfds, epolls, rings
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_io_uring_setup,
    // whether a TAP can be written without waiting
    libc::SYS_pwritev2,
    // a thread's beginning
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_prlimit64,
    libc::SYS_seccomp,
];

/// The channel to the broker.
const CHANNEL: &[libc::c_long] = &[libc::SYS_recvmsg, libc::SYS_sendmsg];

/// System calls that load a kernel and an initrd again.
const RELOADING: &[libc::c_long] = &[libc::SYS_lseek, libc::SYS_pread64, libc::SYS_readv];

/// System calls that transfer frames.
const FRAMES: &[libc::c_long] = &[libc::SYS_readv, libc::SYS_io_uring_enter];

/// System calls that tell another process of the card's rings.
const RINGS: &[libc::c_long] = &[libc::SYS_sendmsg, libc::SYS_recvfrom, libc::SYS_shutdown];

/// System calls that read and write a disk's file.
const DISK: &[libc::c_long] = &[
    libc::SYS_io_uring_enter,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
];

/// System calls of the vsock device's thread; it writes by write and writev, as everybody may. By
/// recvmsg it gets the sockets that the broker has connected for it.
const VSOCK: &[libc::c_long] = &[
    libc::SYS_accept4,
    libc::SYS_readv,
    libc::SYS_shutdown,
    libc::SYS_recvmsg,
];

/// System calls that write a snapshot, read the one that it differs from, and answer the broker.
const SNAPSHOT: &[libc::c_long] = &[
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_ftruncate,
    libc::SYS_sync_file_range,
    libc::SYS_fdatasync,
    libc::SYS_sendmsg,
];

/// KVM's requests, <linux/kvm.h>: direction, size of the argument, 0xae, number.
mod kvm {
    const fn number(direction: u64, size: u64, number: u64) -> u64 {
        direction << 30 | size << 16 | 0xae << 8 | number
    }

    const fn none(request: u64) -> u64 {
        number(0, 0, request)
    }

    const fn write(size: u64, request: u64) -> u64 {
        number(1, size, request)
    }

    const fn read(size: u64, request: u64) -> u64 {
        number(2, size, request)
    }

    const fn both(size: u64, request: u64) -> u64 {
        number(3, size, request)
    }

    /// KVM requests that create a machine.
    pub(super) const MAKING: &[u64] = &[
        none(0x00),        // KVM_GET_API_VERSION
        none(0x01),        // KVM_CREATE_VM
        none(0x03),        // KVM_CHECK_EXTENSION
        none(0x04),        // KVM_GET_VCPU_MMAP_SIZE
        both(8, 0x05),     // KVM_GET_SUPPORTED_CPUID
        none(0x41),        // KVM_CREATE_VCPU
        write(32, 0x46),   // KVM_SET_USER_MEMORY_REGION
        none(0x47),        // KVM_SET_TSS_ADDR
        write(8, 0x48),    // KVM_SET_IDENTITY_MAP_ADDR
        none(0x60),        // KVM_CREATE_IRQCHIP
        write(64, 0x77),   // KVM_CREATE_PIT2
        write(144, 0x82),  // KVM_SET_REGS
        write(312, 0x84),  // KVM_SET_SREGS
        write(8, 0x89),    // KVM_SET_MSRS
        read(1024, 0x8e),  // KVM_GET_LAPIC
        write(1024, 0x8f), // KVM_SET_LAPIC
        write(8, 0x90),    // KVM_SET_CPUID2
        write(392, 0xc6),  // KVM_X86_SET_MSR_FILTER
    ];

    /// KVM requests that restore a machine.
    pub(super) const RESTORING: &[u64] = &[
        both(4, 0x02),     // KVM_GET_MSR_INDEX_LIST
        read(520, 0x63),   // KVM_SET_IRQCHIP
        write(48, 0x7b),   // KVM_SET_CLOCK
        write(4, 0x99),    // KVM_SET_MP_STATE
        write(64, 0xa0),   // KVM_SET_VCPU_EVENTS
        write(112, 0xa0),  // KVM_SET_PIT2
        write(128, 0xa2),  // KVM_SET_DEBUGREGS
        none(0xa2),        // KVM_SET_TSC_KHZ
        write(4096, 0xa5), // KVM_SET_XSAVE
        write(392, 0xa7),  // KVM_SET_XCRS
    ];

    /// KVM requests by which a vCPU's thread brings it back to its state at power-on.
    pub(super) const RESETTING: &[u64] = &[
        write(144, 0x82),  // KVM_SET_REGS
        write(312, 0x84),  // KVM_SET_SREGS
        write(8, 0x89),    // KVM_SET_MSRS
        write(1024, 0x8f), // KVM_SET_LAPIC
        write(4, 0x99),    // KVM_SET_MP_STATE
        write(64, 0xa0),   // KVM_SET_VCPU_EVENTS
        write(128, 0xa2),  // KVM_SET_DEBUGREGS
        none(0xa2),        // KVM_SET_TSC_KHZ
        write(4096, 0xa5), // KVM_SET_XSAVE
        write(392, 0xa7),  // KVM_SET_XCRS
    ];

    /// The same for interrupt controllers and clocks.
    pub(super) const RESETTING_CHIPS: &[u64] = &[
        read(520, 0x63),  // KVM_SET_IRQCHIP
        write(48, 0x7b),  // KVM_SET_CLOCK
        write(112, 0xa0), // KVM_SET_PIT2
    ];

    /// KVM requests by which a vCPU's thread reads its state for a snapshot, and tells the guest's
    /// clock of a pause.
    pub(super) const SAVING: &[u64] = &[
        both(8, 0x88),    // KVM_GET_MSRS
        read(1024, 0x8e), // KVM_GET_LAPIC
        read(4, 0x98),    // KVM_GET_MP_STATE
        read(64, 0x9f),   // KVM_GET_VCPU_EVENTS
        read(128, 0xa1),  // KVM_GET_DEBUGREGS
        none(0xa3),       // KVM_GET_TSC_KHZ
        read(4096, 0xa4), // KVM_GET_XSAVE
        read(392, 0xa6),  // KVM_GET_XCRS
        none(0xad),       // KVM_KVMCLOCK_CTRL
    ];

    /// KVM requests that read the state of interrupt controllers and clocks for a snapshot.
    pub(super) const SAVING_CHIPS: &[u64] = &[
        both(520, 0x62), // KVM_GET_IRQCHIP
        read(48, 0x7c),  // KVM_GET_CLOCK
        read(112, 0x9f), // KVM_GET_PIT2
    ];

    /// Lines and doorbells, which the driver moves.
    pub(super) const WIRING: &[u64] = &[
        none(0x03),      // KVM_CHECK_EXTENSION
        write(8, 0x6a),  // KVM_SET_GSI_ROUTING
        write(32, 0x76), // KVM_IRQFD
        write(64, 0x79), // KVM_IOEVENTFD
    ];

    /// KVM requests that run a virtual CPU, and that read its state after a crash.
    pub(super) const RUNNING: &[u64] = &[
        none(0x80),      // KVM_RUN
        read(144, 0x81), // KVM_GET_REGS
        read(312, 0x83), // KVM_GET_SREGS
        both(24, 0x85),  // KVM_TRANSLATE
    ];
}

/// Requests to the TAP's queues, <linux/if_tun.h>.
mod tun {
    /// Requests of a running driver, TUNSETOFFLOAD and TUNSETQUEUE: offloads that the guest
    /// accepts, and queues in use.
    pub(super) const DRIVER: &[u64] = &[0x4004_54d0, 0x4004_54d9];
    /// Requests that set up a TAP queue: TUNGETIFF, TUNSETVNETHDRSZ, TUNSETVNETLE.
    pub(super) const MAKING: &[u64] = &[0x8004_54d2, 0x4004_54d8, 0x4004_54dc];
}

/// Operations that set up a ring: IORING_REGISTER_FILES, IORING_REGISTER_RESTRICTIONS,
/// IORING_REGISTER_IOWQ_MAX_WORKERS.
const RINGS_MADE: &[u64] = &[2, 11, 19];
/// The operation that starts a ring: IORING_REGISTER_ENABLE_RINGS.
const RINGS_ENABLED: &[u64] = &[12];

/// System calls that a filter permits besides [`BY_ITSELF`] and [`EVERYBODY`].
#[derive(Default)]
struct Calls {
    calls: Vec<&'static [libc::c_long]>,
    /// Permitted requests of `ioctl`.
    ioctl: Vec<&'static [u64]>,
    /// Permitted operations of `io_uring_register`.
    ring_register: Vec<&'static [u64]>,
    /// Permitted options of `prctl`.
    prctl: Vec<&'static [u64]>,
    /// Permitted commands of `fcntl`.
    fcntl: Vec<i32>,
    /// Whether it may make threads.
    threads: bool,
}

impl Calls {
    /// All of it, while the machine is made.
    fn making() -> Self {
        const PRCTL: &[u64] = &[libc::PR_SET_NAME as u64, libc::PR_SET_NO_NEW_PRIVS as u64];
        Self {
            calls: vec![MAKING, CHANNEL, FRAMES, RINGS, DISK, VSOCK, SNAPSHOT],
            ioctl: vec![
                kvm::MAKING,
                kvm::WIRING,
                kvm::RUNNING,
                kvm::RESTORING,
                kvm::SAVING,
                kvm::SAVING_CHIPS,
                tun::MAKING,
                tun::DRIVER,
            ],
            ring_register: vec![RINGS_MADE, RINGS_ENABLED],
            prctl: vec![PRCTL],
            fcntl: vec![libc::F_DUPFD_CLOEXEC, libc::F_GETFL, libc::F_SETFL],
            threads: true,
        }
    }

    /// Adds what a machine needs that may begin anew.
    fn add_restarts(&mut self, thread: Thread) {
        match thread {
            Thread::Of(ThreadKind::Vcpu) => self.ioctl.push(kvm::RESETTING),
            Thread::Main => {
                self.calls.push(RELOADING);
                self.ioctl.push(kvm::RESETTING_CHIPS);
            }
            _ => {}
        }
    }

    fn of(thread: Thread) -> Self {
        match thread {
            // A card whose driver starts it anew wires its vectors and bells again.
            Thread::Of(ThreadKind::Vcpu) => Self {
                ioctl: vec![kvm::RUNNING, kvm::WIRING, kvm::SAVING, tun::DRIVER],
                fcntl: vec![libc::F_DUPFD_CLOEXEC],
                ..Self::default()
            },
            Thread::Of(ThreadKind::NetWorker) => Self {
                calls: vec![FRAMES],
                ring_register: vec![RINGS_ENABLED],
                ..Self::default()
            },
            // It says where rings are, with descriptors that it has; answers are read.
            Thread::Of(ThreadKind::NetRings) => Self {
                calls: vec![RINGS],
                ..Self::default()
            },
            Thread::Of(ThreadKind::Disk) => Self {
                calls: vec![DISK],
                ring_register: vec![RINGS_ENABLED],
                ..Self::default()
            },
            Thread::Of(ThreadKind::Vsock) => Self {
                calls: vec![VSOCK],
                ..Self::default()
            },
            // It gives memory back by madvise, as every thread may, and waits.
            Thread::Of(ThreadKind::Balloon) => Self::default(),
            Thread::Of(ThreadKind::Device) => Self {
                ioctl: vec![tun::DRIVER],
                ..Self::default()
            },
            Thread::Channel => Self {
                calls: vec![CHANNEL],
                ..Self::default()
            },
            Thread::Orders => Self {
                calls: vec![SNAPSHOT],
                ioctl: vec![kvm::SAVING_CHIPS],
                ..Self::default()
            },
            // It takes the machine down, and says how it ended.
            Thread::Main => Self {
                calls: vec![CHANNEL],
                ioctl: vec![kvm::WIRING, tun::DRIVER],
                ..Self::default()
            },
        }
    }
}

#[cfg(test)]
#[path = "vmm_test.rs"]
mod tests;
