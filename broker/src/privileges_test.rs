use std::{os::unix::process::CommandExt as _, process::Command, sync::mpsc};

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

/// Of all threads, only the one that gives them up loses user and capabilities.
#[test]
fn a_thread_becomes_another_user_and_the_process_does_not() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a_thread_becomes_another_user_and_the_process_does_not: not root");
        return;
    }
    const USER: u32 = 61_111;
    let of = |line: &str| {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let found = status.lines().find(|l| l.starts_with(line)).unwrap();
        found
            .split_whitespace()
            .skip(1)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let lines = ["Uid:", "Gid:", "Groups:", "CapEff:", "CapPrm:"];
    let all = || lines.map(of);
    let before = all();
    // SAFETY: a number.
    let dumpable = || unsafe { libc::prctl(libc::PR_GET_DUMPABLE) };
    let dumpable_before = dumpable();
    let (to, limited) = mpsc::channel();
    let (done, end) = mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        limit_thread(USER, 1 << 1).unwrap();
        to.send((lines.map(of), nix::unistd::gettid())).unwrap();
        // Until nobody is left to send.
        let _ = end.recv();
    });
    let ([uid, gid, groups, effective, permitted], id) = limited.recv().unwrap();
    let [own, user] = [nix::unistd::getuid().as_raw(), USER].map(|id| id.to_string());
    // Real, effective, saved, and for files.
    assert_eq!(uid, [&own, &user, &own, &user].map(String::as_str));
    assert_eq!(gid, vec![user; 4]);
    // A signal to the thread is one to the process. The shell has the user's other processes' rights.
    let may_signal = |user: u32| {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("kill -0 {id} 2>/dev/null"));
        shell.uid(user).gid(user).status().unwrap().success()
    };
    assert_eq!([0, USER].map(may_signal), [true, false]);
    drop(done);
    thread.join().unwrap();
    assert!(groups.is_empty(), "{groups:?}");
    assert_eq!(effective, ["0000000000000002"]);
    assert_eq!(permitted, effective);
    assert_eq!(all(), before);
    assert_eq!(dumpable(), dumpable_before);
}

#[test]
fn a_namespace_with_one_user_is_told_from_others() {
    assert!(!has_several_users("         0       1000          1\n"));
    for several in [
        "         0          0 4294967295\n",
        // A container without root: its root, and the user's range.
        "         0       1000          1\n         1     100000      65536\n",
        "",
    ] {
        assert!(has_several_users(several), "{several}");
    }
}
