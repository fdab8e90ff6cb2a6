use std::{
    io::Read as _,
    os::unix::net::UnixListener,
    thread,
    time::{Duration, Instant},
};

use super::*;

#[test]
fn a_request_that_is_interrupted_is_closed_and_none_is_sent_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let interrupt = Interrupt::default();
    let (asks, at) = (interrupt.clone(), path.clone());
    let asking = thread::spawn(move || asks.ask(&at, ClientRequest::ListVms));
    let (mut stream, _) = listener.accept().unwrap();
    let mut first = [0];
    stream.read_exact(&mut first).unwrap();
    let began = Instant::now();
    interrupt.interrupt();
    // No answer has come, and the time for one is not over.
    let answer = asking.join().unwrap();
    assert!(matches!(answer, Err(ClientError::NoAnswer { .. })));
    let mut rest = String::new();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    stream.read_to_string(&mut rest).unwrap();
    assert!(began.elapsed() < ClientRequest::<BorrowedFd<'_>>::ListVms.within());

    assert!(interrupt.is_interrupted());
    assert!(interrupt.ask(&path, ClientRequest::ListVms).is_err());
    let (mut stream, _) = listener.accept().unwrap();
    assert_eq!(stream.read(&mut first).unwrap(), 0);
}
