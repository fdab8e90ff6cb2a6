//! How a filter is put together: rules by system call, and conditions on arguments.
use std::{collections::BTreeMap, io};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

use super::SandboxError;

pub(super) type Rules = BTreeMap<i64, Vec<SeccompRule>>;
pub(super) type Compiled<T> = Result<T, seccompiler::BackendError>;

/// What every process of ours calls, whatever it is for: none of these reaches beyond itself.
pub(super) const BY_ITSELF: &[libc::c_long] = &[
    // waiting
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_sched_yield,
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

pub(super) fn broken(e: seccompiler::BackendError) -> SandboxError {
    SandboxError {
        step: "compiling the seccomp filter",
        source: io::Error::other(e),
    }
}

pub(super) fn program(
    rules: Rules,
    otherwise: SeccompAction,
    listed: SeccompAction,
) -> Compiled<BpfProgram> {
    let arch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, otherwise, listed, arch)?.try_into()
}

/// Memory that is not executable: for `mmap` and `mprotect`.
pub(super) fn no_new_code(rules: &mut Rules) -> Compiled<()> {
    let executable = libc::PROT_EXEC as u64;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![rule([masked(2, executable, 0)?])?]);
    }
    Ok(())
}

/// Signals to threads of this very process: for abort(3), and to interrupt one.
pub(super) fn own_signals(rules: &mut Rules) -> Compiled<()> {
    let own = rule([equal(0, u64::from(std::process::id()))?])?;
    rules.insert(libc::SYS_tgkill, vec![own]);
    Ok(())
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
