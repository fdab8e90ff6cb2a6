use std::os::{fd::AsRawFd as _, unix::net::UnixStream};

use super::*;

#[test]
fn it_ends_by_a_signal_by_hanging_up_and_with_the_engine() {
    let dir = tempfile::tempdir().unwrap();
    let new =
        |name: &str| Socket::listen("--socket", dir.path().join(name), "vm".to_owned()).unwrap();

    let mut stopped = new("a");
    UnixStream::connect(stopped.listener.path()).unwrap();
    assert!(!stopped.has_ended(), "whoever waits is the engine's");
    assert!(stopped.signal(Signal::SIGHUP), "files are opened again");
    assert!(!stopped.has_ended());
    assert!(!stopped.signal(Signal::SIGTERM));
    assert!(stopped.has_ended() && stopped.ended().is_ok());

    let mut of_one = new("b");
    let engines = of_one.link().unwrap();
    let down = nix::sys::socket::Shutdown::Both;
    nix::sys::socket::shutdown(engines.as_raw_fd(), down).unwrap();
    assert!(of_one.has_ended() && of_one.ended().is_ok());

    let mut lost = new("c");
    lost.lost_engine("was killed".to_owned());
    assert!(lost.has_ended() && lost.ended().is_err());
}
