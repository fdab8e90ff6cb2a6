//! Each forbidden call ends the process by SIGSYS; each allowed one goes through. A forked child
//! enters the very sandbox that the engine enters, then makes one raw call and exits with 0.
use std::io;

use nix::{
    sys::{
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, fork, getpid},
};

use slipgate_control::users::NOBODY;

use super::{enter, filter};

/// How a child ended that entered the engine's sandbox and ran `call`.
fn confined(call: impl FnOnce() -> bool) -> WaitStatus {
    confined_by(
        |parent| enter(parent, NOBODY, false, || Ok(())).is_ok(),
        call,
    )
}

/// How a child ended that entered a sandbox and ran `call`.
pub(super) fn confined_by(
    enter: impl FnOnce(Pid) -> bool,
    call: impl FnOnce() -> bool,
) -> WaitStatus {
    let parent = getpid();
    // SAFETY: the child makes system calls and allocates; glibc's fork leaves malloc usable, and
    // it ends without returning to the test harness.
    match unsafe { fork() }.expect("fork") {
        ForkResult::Child => {
            let code = match enter(parent) {
                false => 99,
                true if call() => 0,
                true => 1,
            };
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => waitpid(child, None).expect("waitpid"),
    }
}

#[track_caller]
fn assert_killed(call: impl FnOnce() -> bool) {
    let end = confined(call);
    assert!(
        matches!(end, WaitStatus::Signaled(_, Signal::SIGSYS, _)),
        "not killed by the filter: {end:?}"
    );
}

#[track_caller]
fn assert_passes(call: impl FnOnce() -> bool) {
    let end = confined(call);
    assert!(matches!(end, WaitStatus::Exited(_, 0)), "{end:?}");
}

pub(super) fn syscall(number: libc::c_long, arguments: [u64; 4]) -> bool {
    let [a, b, c, d] = arguments;
    // SAFETY: the tests pass numbers and pointers to constants only.
    unsafe { libc::syscall(number, a, b, c, d) >= 0 }
}

const PATH: &std::ffi::CStr = c"/tmp/slipgate-sandbox-test";

pub(super) fn open(flags: libc::c_int) -> bool {
    let path = PATH.as_ptr() as u64;
    syscall(
        libc::SYS_openat,
        [libc::AT_FDCWD as u64, path, flags as u64, 0o600],
    )
}

#[test]
fn execve_is_killed() {
    let path = c"/bin/true".as_ptr() as u64;
    assert_killed(|| syscall(libc::SYS_execve, [path, 0, 0, 0]));
    assert_killed(|| syscall(libc::SYS_execveat, [0, path, 0, 0]));
}

#[test]
fn packet_raw_netlink_and_unix_sockets_are_killed() {
    for family in [libc::AF_PACKET, libc::AF_NETLINK, libc::AF_UNIX] {
        let kind = libc::SOCK_DGRAM as u64;
        assert_killed(|| syscall(libc::SYS_socket, [family as u64, kind, 0, 0]));
    }
    let raw = libc::SOCK_RAW as u64;
    assert_killed(|| syscall(libc::SYS_socket, [libc::AF_INET as u64, raw, 1, 0]));
}

#[test]
fn bpf_loads_and_makes_nothing() {
    const MAP_CREATE: u64 = 0;
    const PROG_LOAD: u64 = 5;
    const OBJ_GET: u64 = 7;
    const LINK_CREATE: u64 = 28;
    for command in [MAP_CREATE, PROG_LOAD, OBJ_GET, LINK_CREATE] {
        assert_killed(|| syscall(libc::SYS_bpf, [command, 0, 0, 0]));
    }
}

#[test]
fn the_user_mode_engine_makes_its_flows_sockets_and_no_other() {
    let of_userspace = |call: &dyn Fn() -> bool| {
        confined_by(
            |parent| enter(parent, NOBODY, true, || Ok(())).is_ok(),
            call,
        )
    };
    let inet = libc::AF_INET as u64;
    let inet6 = libc::AF_INET6 as u64;
    let datagram = libc::SOCK_DGRAM as u64;
    let outq = [u64::MAX, libc::TIOCOUTQ, 0, 0];
    let inq = [u64::MAX, libc::TIOCINQ, 0, 0];
    let seals = [u64::MAX, libc::F_GET_SEALS as u64, 0, 0];
    let more_seals = [u64::MAX, libc::F_ADD_SEALS as u64, 0, 0];
    let passes = of_userspace(&|| {
        makes(&[
            (
                libc::SYS_socket,
                [inet, datagram, libc::IPPROTO_ICMP as u64, 0],
            ),
            (
                libc::SYS_socket,
                [inet6, datagram, libc::IPPROTO_ICMPV6 as u64, 0],
            ),
            (libc::SYS_bind, [u64::MAX, 0, 0, 0]),
            (libc::SYS_ioctl, outq),
            (libc::SYS_ioctl, inq),
            (libc::SYS_recvmmsg, [u64::MAX, 0, 0, 0]),
            (libc::SYS_fcntl, seals),
        ])
    });
    assert!(matches!(passes, WaitStatus::Exited(_, 0)), "{passes:?}");
    for (call, arguments) in [
        (libc::SYS_socket, [libc::AF_UNIX as u64, datagram, 0, 0]),
        (libc::SYS_socket, [libc::AF_NETLINK as u64, datagram, 0, 0]),
        (libc::SYS_socket, [inet, libc::SOCK_RAW as u64, 1, 0]),
        (libc::SYS_socket, [inet6, libc::SOCK_RAW as u64, 58, 0]),
        (
            libc::SYS_socket,
            [inet6, datagram, libc::IPPROTO_ICMP as u64, 0],
        ),
        (libc::SYS_bpf, [1, 0, 0, 0]),
        (libc::SYS_listen, [0, 0, 0, 0]),
        (libc::SYS_timerfd_settime, [u64::MAX, 0, 0, 0]),
        (libc::SYS_fcntl, more_seals),
        (libc::SYS_ioctl, [0, libc::TIOCSTI, 0, 0]),
    ] {
        let end = of_userspace(&|| syscall(call, arguments));
        assert!(
            matches!(end, WaitStatus::Signaled(_, Signal::SIGSYS, _)),
            "{call}: {end:?}"
        );
    }
    // The hybrid engine only asks how much a send queue holds, for its relays.
    assert_killed(|| syscall(libc::SYS_bind, [u64::MAX, 0, 0, 0]));
    assert_killed(|| syscall(libc::SYS_recvmmsg, [u64::MAX, 0, 0, 0]));
    assert_killed(|| syscall(libc::SYS_fcntl, seals));
    assert_killed(|| syscall(libc::SYS_ioctl, [0, libc::TIOCSTI, 0, 0]));
    let end = confined(|| syscall(libc::SYS_ioctl, outq));
    assert!(matches!(end, WaitStatus::Exited(..)), "{end:?}");
}

#[test]
fn ptrace_and_kin_are_killed() {
    assert_killed(|| syscall(libc::SYS_ptrace, [0, 0, 0, 0]));
    assert_killed(|| syscall(libc::SYS_process_vm_readv, [1, 0, 0, 0]));
    assert_killed(|| syscall(libc::SYS_kill, [1, 0, 0, 0]));
    assert_killed(|| syscall(libc::SYS_clone, [0, 0, 0, 0]));
}

#[test]
fn open_for_writing_is_killed() {
    for flags in [
        libc::O_WRONLY,
        libc::O_RDWR,
        libc::O_CREAT,
        libc::O_TRUNC,
        libc::O_WRONLY | libc::O_CREAT,
    ] {
        assert_killed(|| open(flags));
    }
    let how = [libc::O_RDONLY as u64, 0, 0];
    let how = how.as_ptr() as u64;
    let path = PATH.as_ptr() as u64;
    assert_killed(|| syscall(libc::SYS_openat2, [libc::AT_FDCWD as u64, path, how, 24]));
}

#[test]
fn open_for_reading_is_refused_without_harm() {
    assert_passes(|| {
        !open(libc::O_RDONLY)
            && std::io::Error::last_os_error().raw_os_error() == Some(libc::EACCES)
    });
}

/// Makes each of these calls, mostly in a way that the kernel refuses: it is enough to come back.
pub(super) fn makes(calls: &[(libc::c_long, [u64; 4])]) -> bool {
    for (call, arguments) in calls {
        syscall(*call, *arguments);
    }
    true
}

/// No address of anything, and no clock.
const NOWHERE: u64 = 1;
const PAGE: u64 = 4_096;

/// System calls that a process makes only in some runs. Clocks are read in the vDSO unless the TSC
/// is unstable (as under an emulator); a call that a signal interrupted may have to be restarted;
/// an allocator returns memory, and moves it.
pub(super) const SOMETIMES: [(libc::c_long, [u64; 4]); 15] = [
    (libc::SYS_clock_gettime, [0, NOWHERE, 0, 0]),
    (libc::SYS_clock_gettime, [1, NOWHERE, 0, 0]),
    (libc::SYS_clock_nanosleep, [99, 0, 0, 0]),
    (libc::SYS_nanosleep, [NOWHERE, 0, 0, 0]),
    (libc::SYS_restart_syscall, [0; 4]),
    (libc::SYS_sched_yield, [0; 4]),
    (libc::SYS_futex, [NOWHERE, 0, 0, 0]),
    (libc::SYS_munmap, [NOWHERE, PAGE, 0, 0]),
    (libc::SYS_mremap, [NOWHERE, PAGE, PAGE, 0]),
    (libc::SYS_madvise, [NOWHERE, PAGE, 4, 0]),
    (libc::SYS_mprotect, [NOWHERE, PAGE, 0, 0]),
    (libc::SYS_brk, [0; 4]),
    (libc::SYS_getrandom, [NOWHERE, 8, 0, 0]),
    (libc::SYS_sigaltstack, [NOWHERE, 0, 0, 0]),
    (libc::SYS_rt_sigprocmask, [99, NOWHERE, 0, 8]),
];

/// A panic's message may have a backtrace, and that wants names. It does without them; to be killed
/// in its midst would hide what the panic was about.
pub(super) fn does_without_names_in_a_backtrace() -> bool {
    let refused = || io::Error::last_os_error().raw_os_error() == Some(libc::EACCES);
    let none = c"".as_ptr() as u64;
    super::rules::FOR_A_BACKTRACE
        .iter()
        .all(|call| !syscall(*call, [none, none, 0, 0]) && refused())
}

#[test]
fn what_is_a_system_call_only_sometimes_passes() {
    assert_passes(|| makes(&SOMETIMES));
    assert_passes(does_without_names_in_a_backtrace);
}

#[test]
fn executable_memory_is_killed() {
    let private = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let prot = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    assert_killed(|| syscall(libc::SYS_mmap, [0, 4096, prot, private]));
}

#[test]
fn what_the_event_loop_needs_passes() {
    let (mut reader, mut writer) = std::io::pipe().expect("pipe");
    assert_passes(move || {
        use std::io::{Read, Write};
        let mut byte = [0];
        writer.write_all(b"x").is_ok() && reader.read_exact(&mut byte).is_ok() && byte == *b"x"
    });
    // Listening is the broker's work.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address");
    assert_passes(move || {
        let client = std::net::TcpStream::connect(address);
        listener.set_nonblocking(true).is_ok() && listener.accept().is_ok() && client.is_ok()
    });
    assert_passes(|| vec![1u8; 64 << 20].iter().any(|&b| b == 1));
    // EBADF, not a kill: looking up an element of a map that isn't open, and deleting a batch.
    for command in [1, 27] {
        assert_passes(|| {
            let attr = [u64::MAX; 16];
            !syscall(libc::SYS_bpf, [command, attr.as_ptr() as u64, 32, 0])
        });
    }
}

#[test]
fn what_it_does_not_need_is_killed() {
    let bound = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
    let fd = std::os::fd::AsRawFd::as_raw_fd(&bound) as u64;
    for call in [
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_getpeername,
        libc::SYS_splice,
        libc::SYS_pipe2,
        libc::SYS_sendmmsg,
        libc::SYS_dup,
        libc::SYS_io_uring_setup,
    ] {
        assert_killed(|| syscall(call, [fd, 0, 0, 0]));
    }
    assert_killed(|| syscall(libc::SYS_fcntl, [fd, libc::F_DUPFD as u64, 0, 0]));
    assert_killed(|| syscall(libc::SYS_ioctl, [fd, libc::TIOCSTI, 0, 0]));
}

/// Setting a packet mark needs CAP_NET_ADMIN, and is a call that the filter lets through.
#[test]
fn no_capability_is_left() {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
    assert_passes(|| {
        let refused = nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::Mark, &1);
        refused == Err(nix::Error::EPERM)
    });
}

#[test]
fn filters_compile_for_this_architecture() {
    assert!(filter::compile(false).is_ok());
    assert!(filter::compile(true).is_ok());
}
