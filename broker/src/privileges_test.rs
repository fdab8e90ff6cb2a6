use nix::{
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, fork},
};

use super::*;

/// A forked child enters the broker's limits and reads what it has left. That it needs all of that
/// is shown by the tests of `slipgate attach`.
#[test]
fn the_broker_keeps_what_is_listed_and_nothing_else() {
    let effective = || {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("procfs");
        let line = status.lines().find(|line| line.starts_with("CapEff:"));
        u64::from_str_radix(
            line.expect("CapEff")
                .split_whitespace()
                .last()
                .expect("set"),
            16,
        )
        .expect("hexadecimal")
    };
    let before = effective();
    // SAFETY: the child makes system calls and allocates; glibc's fork leaves malloc usable, and
    // it ends without returning to the test harness.
    let end = match unsafe { fork() }.expect("fork") {
        ForkResult::Child => {
            let keep = BROKER_KEEPS.iter().fold(0u64, |set, n| set | 1 << n);
            let right = limit_broker(false).is_ok() && effective() == before & keep;
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        ForkResult::Parent { child } => waitpid(child, None).expect("waitpid"),
    };
    assert!(matches!(end, WaitStatus::Exited(_, 0)), "{end:?}");
}
