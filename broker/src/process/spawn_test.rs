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
fn what_fails_before_the_execve_is_the_error_of_the_start() {
    let failing = |fd| Err(io::Error::from_raw_os_error(libc::EMULTIHOP + fd - 7));
    let error = program(failing).start(Namespaces::Ours).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EMULTIHOP));
}

#[test]
fn a_child_ends_with_its_status() {
    let mut child = program(|_| Ok(())).start(Namespaces::Ours).unwrap();
    child.wait();
    let ended = child.try_wait().unwrap();
    assert!(matches!(ended, Some(WaitStatus::Exited(_, 0))), "{ended:?}");
}
