//! Construction of a filter: rules by system call, and conditions on arguments.
use std::{collections::BTreeMap, io};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use slipgate_broker::privileges::ConfinementError;

pub(super) type Rules = BTreeMap<i64, Vec<SeccompRule>>;
pub(super) type Compiled<T> = Result<T, seccompiler::BackendError>;

/// System calls of every process of slipgate, whatever its role: none of them reaches beyond the
/// process.
pub(super) const BY_ITSELF: &[libc::c_long] = &[
    // waiting
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_sched_yield,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
    // memory
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // time, randomness, identity
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    // signals and the end
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// System calls, besides opening files, that the standard library needs to print a backtrace
/// (`RUST_BACKTRACE`); where they are refused, it prints one without names. Killing the process
/// during a panic's message would hide the cause of the panic.
pub(super) const FOR_A_BACKTRACE: &[libc::c_long] = &[
    libc::SYS_getcwd,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    libc::SYS_readlinkat,
];

/// Calls of a process that takes connections, reads and writes them, and has a channel.
pub(super) const CONNECTIONS: &[libc::c_long] = &[
    libc::SYS_accept4,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_close,
    // A large message comes in a file of memory.
    libc::SYS_lseek,
    libc::SYS_fstat,
];

/// Calls of an event loop on epoll.
pub(super) const EPOLL: &[libc::c_long] = &[
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
];

/// Two stacked filters, of whose results the kernel takes the stricter one. The first has the list
/// of permitted calls, and kills the process at any other. The second returns EACCES for opening a
/// file for reading, which a C library may attempt by itself (time zones, memory tuning) and can do
/// without, and for [`FOR_A_BACKTRACE`].
///
/// Compiling the filters allocates memory; applying them does not.
#[derive(Debug)]
pub(super) struct Filters {
    list: BpfProgram,
    refused: BpfProgram,
}

impl Filters {
    pub(super) fn compile(list: Compiled<Rules>) -> Result<Self, ConfinementError> {
        let list =
            list.and_then(|rules| program(rules, SeccompAction::KillProcess, SeccompAction::Allow));
        Ok(Self {
            list: list.map_err(broken)?,
            refused: nothing_by_name().map_err(broken)?,
        })
    }

    /// For all threads, for good.
    pub(super) fn apply(&self) -> Result<(), ConfinementError> {
        for filter in [&self.refused, &self.list] {
            seccompiler::apply_filter_all_threads(filter)
                .map_err(|e| ConfinementError::new("seccomp filter", io::Error::other(e)))?;
        }
        Ok(())
    }
}

/// Rules of every list: [`BY_ITSELF`], [`FOR_A_BACKTRACE`] and `always` with any arguments, and
/// calls that are harmless with the right arguments.
pub(super) fn common<'a>(always: impl IntoIterator<Item = &'a libc::c_long>) -> Compiled<Rules> {
    let always = BY_ITSELF.iter().chain(FOR_A_BACKTRACE).chain(always);
    let mut rules: Rules = always.map(|&call| (call, Vec::new())).collect();
    // The other filter refuses it; listed, or this one would be stricter.
    let writing = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND;
    let reading = rule([masked(2, writing as u64, 0)?])?;
    rules.insert(libc::SYS_openat, vec![reading]);
    rules.insert(libc::SYS_statx, open_file(2)?);
    // Memory that is not executable.
    let executable = libc::PROT_EXEC as u64;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![rule([masked(2, executable, 0)?])?]);
    }
    // Signals to threads of this very process: for abort(3), and to interrupt one.
    let own = rule([equal(0, u64::from(std::process::id()))?])?;
    rules.insert(libc::SYS_tgkill, vec![own]);
    Ok(rules)
}

/// Metadata of an open file, not of a name. `flags`: the argument with the flags.
pub(super) fn open_file(flags: u8) -> Compiled<Vec<SeccompRule>> {
    let empty_path = libc::AT_EMPTY_PATH as u64;
    Ok(vec![rule([masked(flags, empty_path, empty_path)?])?])
}

/// [`common`] rules, and those of an event loop.
pub(super) fn of_a_loop<'a>(always: impl IntoIterator<Item = &'a libc::c_long>) -> Compiled<Rules> {
    let mut rules = common(always)?;
    // A debug build looks whether a descriptor is open before it closes it.
    let is_open = rule([equal(1, libc::F_GETFD as u64)?])?;
    rules.insert(libc::SYS_fcntl, vec![is_open]);
    let non_blocking = rule([equal(1, libc::FIONBIO)?])?;
    rules.insert(libc::SYS_ioctl, vec![non_blocking]);
    Ok(rules)
}

/// Calls that libraries make on their own account and do without are answered by an error.
pub(super) fn soft<'c>(
    calls: impl IntoIterator<Item = &'c libc::c_long>,
    errno: i32,
) -> Compiled<BpfProgram> {
    let rules = calls.into_iter().map(|&call| (call, Vec::new())).collect();
    let refuse = SeccompAction::Errno(errno as u32);
    program(rules, SeccompAction::Allow, refuse)
}

/// Refuses system calls that open a file by name and have its flags in a register, and
/// [`FOR_A_BACKTRACE`].
pub(super) fn nothing_by_name() -> Compiled<BpfProgram> {
    soft(
        FOR_A_BACKTRACE.iter().chain(&[libc::SYS_openat]),
        libc::EACCES,
    )
}

pub(super) fn broken(e: seccompiler::BackendError) -> ConfinementError {
    ConfinementError::new("compiling the seccomp filter", io::Error::other(e))
}

pub(super) fn program(
    rules: Rules,
    otherwise: SeccompAction,
    listed: SeccompAction,
) -> Compiled<BpfProgram> {
    let arch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, otherwise, listed, arch)?.try_into()
}

pub(super) fn rule<const N: usize>(conditions: [SeccompCondition; N]) -> Compiled<SeccompRule> {
    SeccompRule::new(conditions.to_vec())
}

pub(super) fn equal(argument: u8, value: u64) -> Compiled<SeccompCondition> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

pub(super) fn masked(argument: u8, mask: u64, value: u64) -> Compiled<SeccompCondition> {
    SeccompCondition::new(
        argument,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::MaskedEq(mask),
        value,
    )
}
