//! As the engine's: a forked child enters the very sandbox, narrows itself as one of the threads,
//! and makes one raw call. A forbidden one ends the process by SIGSYS.
use nix::sys::{signal::Signal, wait::WaitStatus};

use slipgate_control::users::NOBODY;

use super::{
    super::tests::{
        SOMETIMES, confined_by, does_without_names_in_a_backtrace, makes, open, syscall,
    },
    *,
};

const THREADS: [Thread; 10] = [
    Thread::Main,
    Thread::Channel,
    Thread::Orders,
    Thread::Of(ThreadKind::Vcpu),
    Thread::Of(ThreadKind::NetWorker),
    Thread::Of(ThreadKind::NetRings),
    Thread::Of(ThreadKind::Disk),
    Thread::Of(ThreadKind::Vsock),
    Thread::Of(ThreadKind::Balloon),
    Thread::Of(ThreadKind::Device),
];

/// `None`: while the machine is made.
fn confined(thread: Option<Thread>, call: impl FnOnce() -> bool) -> WaitStatus {
    let narrowed =
        |thread: Option<Thread>| thread.is_none_or(|thread| narrow(thread, false).is_ok());
    confined_by(
        |parent| enter(parent, NOBODY, false).is_ok() && narrowed(thread),
        call,
    )
}

#[track_caller]
fn assert_killed(thread: Option<Thread>, call: impl FnOnce() -> bool) {
    let end = confined(thread, call);
    assert!(
        matches!(end, WaitStatus::Signaled(_, Signal::SIGSYS, _)),
        "{thread:?} was not killed by the filter: {end:?}"
    );
}

#[track_caller]
fn assert_passes(thread: Option<Thread>, call: impl FnOnce() -> bool) {
    let end = confined(thread, call);
    assert!(
        matches!(end, WaitStatus::Exited(_, 0)),
        "{thread:?}: {end:?}"
    );
}

/// The kernel's answer to a call that a filter let through.
fn errno_of(number: libc::c_long, arguments: [u64; 4]) -> i32 {
    match syscall(number, arguments) {
        true => 0,
        false => io::Error::last_os_error().raw_os_error().unwrap_or(0),
    }
}

/// A descriptor that is none: what comes through says EBADF.
const NONE: u64 = u32::MAX as u64;

#[test]
fn nobody_executes_traces_or_makes_sockets_or_programs() {
    let path = c"/bin/true".as_ptr() as u64;
    let (packet, inet) = (libc::AF_PACKET as u64, libc::AF_INET as u64);
    let raw = libc::SOCK_RAW as u64;
    let calls: [(libc::c_long, [u64; 4]); 13] = [
        (libc::SYS_execve, [path, 0, 0, 0]),
        (libc::SYS_execveat, [0, path, 0, 0]),
        (libc::SYS_socket, [packet, raw, 0, 0]),
        (libc::SYS_socket, [inet, libc::SOCK_STREAM as u64, 0, 0]),
        (libc::SYS_connect, [NONE, 0, 0, 0]),
        (libc::SYS_bpf, [1, 0, 0, 0]),
        (libc::SYS_bpf, [5, 0, 0, 0]),
        (libc::SYS_ptrace, [0, 0, 0, 0]),
        (libc::SYS_process_vm_readv, [1, 0, 0, 0]),
        (libc::SYS_kill, [1, 0, 0, 0]),
        (libc::SYS_unlink, [path, 0, 0, 0]),
        (libc::SYS_fork, [0, 0, 0, 0]),
        (libc::SYS_memfd_create, [path, 0, 0, 0]),
    ];
    for thread in THREADS.into_iter().map(Some).chain([None]) {
        for (call, arguments) in calls {
            assert_killed(thread, || syscall(call, arguments));
        }
    }
}

#[test]
fn nobody_opens_for_writing_and_reading_is_refused() {
    for thread in THREADS.into_iter().map(Some).chain([None]) {
        for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_CREAT, libc::O_TRUNC] {
            assert_killed(thread, || open(flags));
        }
        assert_passes(thread, || {
            !open(libc::O_RDONLY) && io::Error::last_os_error().raw_os_error() == Some(libc::EACCES)
        });
    }
}

#[test]
fn no_new_code() {
    let private = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let prot = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    for thread in THREADS.into_iter().map(Some).chain([None]) {
        assert_killed(thread, || syscall(libc::SYS_mmap, [0, 4096, prot, private]));
    }
}

/// KVM_RUN is for vCPUs, the channel for who talks to the broker, frames for the workers,
/// files for the disks and for snapshots, sockets for vsock. Nobody sets a vCPU's state.
#[test]
fn each_thread_has_its_own_calls() {
    const KVM_RUN: u64 = 0xae80;
    const KVM_IRQFD: u64 = 0x4020_ae76;
    const TUNSETOFFLOAD: u64 = 0x4004_54d0;
    let run = |request| move || errno_of(libc::SYS_ioctl, [NONE, request, 0, 0]) == libc::EBADF;
    let receive = || errno_of(libc::SYS_recvmsg, [NONE, 0, 0, 0]) == libc::EBADF;
    let read = || errno_of(libc::SYS_readv, [NONE, 0, 0, 0]) == libc::EBADF;
    let may = |allowed: &[Thread], call: &dyn Fn() -> bool| {
        for thread in THREADS {
            match allowed.contains(&thread) {
                true => assert_passes(Some(thread), call),
                false => assert_killed(Some(thread), call),
            }
        }
    };
    let (vcpu, worker) = (
        Thread::Of(ThreadKind::Vcpu),
        Thread::Of(ThreadKind::NetWorker),
    );
    let device = Thread::Of(ThreadKind::Device);
    may(&[vcpu], &run(KVM_RUN));
    may(&[vcpu, Thread::Main], &run(KVM_IRQFD));
    may(&[vcpu, Thread::Main, device], &run(TUNSETOFFLOAD));
    let vsock = Thread::Of(ThreadKind::Vsock);
    may(&[Thread::Main, Thread::Channel, vsock], &receive);
    may(&[worker, vsock], &read);
    let rings = Thread::Of(ThreadKind::NetRings);
    for (call, allowed) in [
        (libc::SYS_accept4, &[vsock][..]),
        (libc::SYS_shutdown, &[vsock, rings]),
        (libc::SYS_recvfrom, &[rings]),
    ] {
        may(allowed, &|| errno_of(call, [NONE, 0, 0, 0]) == libc::EBADF);
    }
    let disk = Thread::Of(ThreadKind::Disk);
    for (call, allowed) in [
        (libc::SYS_preadv, &[disk][..]),
        (libc::SYS_fallocate, &[disk]),
        (libc::SYS_pwritev, &[disk]),
        (libc::SYS_fdatasync, &[disk, Thread::Orders]),
        (libc::SYS_pwrite64, &[Thread::Orders]),
        (libc::SYS_pread64, &[Thread::Orders]),
        (libc::SYS_lseek, &[Thread::Orders]),
        (libc::SYS_ftruncate, &[Thread::Orders]),
        (libc::SYS_sync_file_range, &[Thread::Orders]),
        (
            libc::SYS_sendmsg,
            &[Thread::Main, Thread::Channel, Thread::Orders, rings],
        ),
    ] {
        may(allowed, &|| errno_of(call, [NONE, 0, 0, 0]) == libc::EBADF);
    }
    const KVM_GET_MSRS: u64 = 0xc008_ae88;
    const KVM_GET_IRQCHIP: u64 = 0xc208_ae62;
    const KVM_SET_MP_STATE: u64 = 0x4004_ae99;
    may(&[vcpu], &run(KVM_GET_MSRS));
    may(&[Thread::Orders], &run(KVM_GET_IRQCHIP));
    may(&[], &run(KVM_SET_MP_STATE));
    // In a machine that may begin anew two threads may do more.
    let again = |thread, call: &dyn Fn() -> bool| {
        let is_narrowed = |_| enter_again(thread) && call();
        confined(None, || is_narrowed(()))
    };
    let ended = |status| matches!(status, WaitStatus::Exited(_, 0));
    assert!(ended(again(vcpu, &run(KVM_SET_MP_STATE))));
    assert!(ended(again(Thread::Main, &|| {
        errno_of(libc::SYS_pread64, [NONE, 0, 0, 0]) == libc::EBADF
    })));
    for other in [worker, disk, Thread::Channel, Thread::Orders, Thread::Main] {
        assert!(!ended(again(other, &run(KVM_SET_MP_STATE))), "{other:?}");
    }
}

fn enter_again(thread: Thread) -> bool {
    narrow(thread, true).is_ok()
}

/// Once the machine is made: no thread, no virtual machine, no TAP that outlives us, and no ring,
/// by which all of this could be gone round.
#[test]
fn what_making_took_is_over() {
    const KVM_CREATE_VM: u64 = 0xae01;
    const TUNSETPERSIST: u64 = 0x4004_54cb;
    const TUNSETIFF: u64 = 0x4004_54ca;
    const TIOCSTI: u64 = 0x5412;
    let ioctl = |request| move || syscall(libc::SYS_ioctl, [NONE, request, 0, 0]);
    let thread_flags = (libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND) as u64;
    for thread in THREADS {
        let thread = Some(thread);
        assert_killed(thread, ioctl(KVM_CREATE_VM));
        assert_killed(thread, || syscall(libc::SYS_io_uring_setup, [1, 0, 0, 0]));
        assert_killed(thread, || syscall(libc::SYS_eventfd2, [0, 0, 0, 0]));
        // IORING_REGISTER_FILES
        assert_killed(thread, || {
            syscall(libc::SYS_io_uring_register, [NONE, 2, 0, 0])
        });
        assert_killed(thread, || syscall(libc::SYS_clone, [thread_flags, 0, 0, 0]));
        assert_killed(thread, || syscall(libc::SYS_seccomp, [1, 0, 0, 0]));
    }
    for thread in THREADS.into_iter().map(Some).chain([None]) {
        for request in [TUNSETPERSIST, TUNSETIFF, TIOCSTI] {
            assert_killed(thread, ioctl(request));
        }
        // IORING_REGISTER_PERSONALITY
        assert_killed(thread, || {
            syscall(libc::SYS_io_uring_register, [NONE, 9, 0, 0])
        });
        assert_killed(thread, || {
            syscall(libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0])
        });
    }
}

#[test]
fn threads_are_made_while_the_machine_is_and_narrow_themselves() {
    assert_passes(None, || {
        let worker = std::thread::spawn(|| {
            let narrowed = narrow(Thread::Of(ThreadKind::NetWorker), false).is_ok();
            narrowed && errno_of(libc::SYS_writev, [NONE, 0, 0, 0]) == libc::EBADF
        });
        worker.join().unwrap_or(false) && narrow(Thread::Main, false).is_ok()
    });
}

#[test]
fn what_is_a_system_call_only_sometimes_passes() {
    for thread in THREADS.into_iter().map(Some).chain([None]) {
        assert_passes(thread, || makes(&SOMETIMES));
        assert_passes(thread, does_without_names_in_a_backtrace);
    }
}

/// glibc ends a process whose heap is damaged with a message (`__libc_message`, by writev): killed
/// for that, it would not say why it ended.
#[test]
fn a_thread_whose_heap_is_damaged_ends_by_the_c_librarys_abort() {
    for thread in THREADS {
        let end = confined(Some(thread), || {
            let mut block = [0_u64; 8];
            // SAFETY: none: this is the damage. The address is no block of the heap, which glibc
            // finds before it does anything with it.
            unsafe { libc::free(block.as_mut_ptr().wrapping_byte_add(8).cast()) };
            true
        });
        assert!(
            matches!(end, WaitStatus::Signaled(_, Signal::SIGABRT, _)),
            "{thread:?}: {end:?}"
        );
    }
}
