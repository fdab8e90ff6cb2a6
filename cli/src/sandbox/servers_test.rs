use nix::sys::{signal::Signal, wait::WaitStatus};

use slipgate_control::users::NOBODY;

use super::{
    super::tests::{SOMETIMES, confined_by, does_without_names_in_a_backtrace, makes, syscall},
    Server, enter,
};

/// How a call ends in each of the servers.
fn confined(call: impl Fn() -> bool) -> [WaitStatus; 2] {
    [Server::Metrics, Server::Api]
        .map(|server| confined_by(|parent| enter(server, parent, NOBODY).is_ok(), &call))
}

#[test]
fn what_it_does_not_need_kills_it() {
    for (what, number, arguments) in [
        (
            "a socket",
            libc::SYS_socket,
            [libc::AF_INET as u64, 1, 0, 0],
        ),
        ("bpf", libc::SYS_bpf, [1, 0, 0, 0]),
        ("execve", libc::SYS_execve, [0; 4]),
        ("kill", libc::SYS_kill, [1, 0, 0, 0]),
        ("connect", libc::SYS_connect, [0; 4]),
        ("a process", libc::SYS_clone, [0; 4]),
    ] {
        for end in confined(|| syscall(number, arguments)) {
            assert!(
                matches!(end, WaitStatus::Signaled(_, Signal::SIGSYS, _)),
                "{what}: {end:?}"
            );
        }
    }
}

#[test]
fn it_opens_no_file() {
    for end in confined(|| std::fs::File::open("/proc/self/status").is_err()) {
        assert!(matches!(end, WaitStatus::Exited(_, 0)), "{end:?}");
    }
}

#[test]
fn what_is_a_system_call_only_sometimes_passes() {
    for call in [|| makes(&SOMETIMES), does_without_names_in_a_backtrace] {
        for end in confined(call) {
            assert!(matches!(end, WaitStatus::Exited(_, 0)), "{end:?}");
        }
    }
}
