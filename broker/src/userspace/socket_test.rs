use std::os::unix::{
    fs::PermissionsExt as _,
    net::{UnixListener, UnixStream},
};

use super::*;

fn listen(path: &Path) -> anyhow::Result<Socket> {
    Socket::listen(path.to_owned(), "vm".to_owned())
}

#[test]
fn a_socket_is_its_users_alone_and_goes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let mut socket = listen(&path).unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    UnixStream::connect(&path).unwrap();
    assert!(!socket.has_ended(), "whoever waits is the engine's");
    drop(socket);
    assert!(!path.exists());
}

#[test]
fn what_a_killed_process_left_is_replaced_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    let first = listen(&path).unwrap();
    let refused = listen(&path).unwrap_err().to_string();
    assert!(refused.contains("another process listens"), "{refused}");
    UnixStream::connect(&path).unwrap();

    // One that somebody else has put there is not ours to remove.
    fs::remove_file(&path).unwrap();
    let second = listen(&path).unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);

    fs::write(&path, "notes").unwrap();
    let refused = listen(&path).unwrap_err().to_string();
    assert!(refused.contains("no socket"), "{refused}");
    assert_eq!(fs::read(&path).unwrap(), b"notes");
}

#[test]
fn it_ends_by_a_signal_by_hanging_up_and_with_the_engine() {
    let dir = tempfile::tempdir().unwrap();
    let new = |name: &str| listen(&dir.path().join(name)).unwrap();

    let mut stopped = new("a");
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
