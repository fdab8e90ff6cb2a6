use std::io::Write as _;

use super::*;

fn program(prepare: fn(RawFd) -> io::Result<()>) -> Program {
    Program {
        // This binary lists its tests, and ends.
        arguments: vec![c"slipgate-test".into(), c"--list".into()],
        environment: Vec::new(),
        prepare,
        inherited: 7,
    }
}

#[test]
fn what_fails_before_the_execve_is_the_error_of_the_wait_for_it() {
    let failing = |fd| Err(io::Error::from_raw_os_error(libc::EMULTIHOP + fd - 7));
    let mut child = program(failing).start(Namespaces::Ours).unwrap();
    let error = child.await_execve().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EMULTIHOP));
    assert!(child.try_wait().unwrap().is_some(), "it runs on");
}

#[test]
fn a_start_does_not_wait_for_the_execve() {
    // It waits for a byte that comes behind the start, if not forever.
    let (gone_on, go_on) = io::pipe().unwrap();
    let waits = |fd| {
        let mut byte = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the pointer is that of one element.
        let came = unsafe { libc::poll(&raw mut byte, 1, 5_000) } == 1;
        let why = if came { libc::EMULTIHOP } else { libc::ETIME };
        Err(io::Error::from_raw_os_error(why))
    };
    let mut program = program(waits);
    program.inherited = gone_on.as_raw_fd();
    let mut child = program.start(Namespaces::Ours).unwrap();
    (&go_on).write_all(&[1]).unwrap();
    let error = child.await_execve().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EMULTIHOP));
}

#[test]
fn a_child_ends_with_its_status() {
    let mut child = program(|_| Ok(())).start(Namespaces::Ours).unwrap();
    child.wait();
    let ended = child.try_wait().unwrap();
    assert!(matches!(ended, Some(WaitStatus::Exited(_, 0))), "{ended:?}");
}

/// Has the kernel answer clone3(2) by ENOSYS to this thread, as containers and systemd do.
fn without_clone3() {
    let step = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let answer = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
    let mut steps = [
        // The number is the first word that a filter sees.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            libc::SYS_clone3 as u32,
        ),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, answer),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: numbers, and a program that lives during the call.
    let applied = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ) == 0
    };
    assert!(applied, "{}", io::Error::last_os_error());
}

#[test]
fn a_host_that_answers_clone3_by_enosys_starts_processes_too() {
    let start = || {
        without_clone3();
        // SAFETY: no arguments: the filter answers first.
        let refused = unsafe { libc::syscall(libc::SYS_clone3, 0_usize, 0_usize) };
        assert_eq!((refused, Errno::last()), (-1, Errno::ENOSYS));
        let mut child = program(|_| Ok(())).start(Namespaces::Ours).unwrap();
        child.wait();
        let ended = child.try_wait().unwrap();
        assert!(matches!(ended, Some(WaitStatus::Exited(_, 0))), "{ended:?}");
    };
    // The filter ends with its thread.
    std::thread::spawn(start).join().unwrap();
}
