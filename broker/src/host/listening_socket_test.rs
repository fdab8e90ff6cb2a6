use std::os::unix::{
    fs::PermissionsExt as _,
    net::{UnixListener, UnixStream},
};

use super::*;

fn listen(path: &Path) -> Result<ListeningSocket, ConfigError> {
    ListeningSocket::listen("--socket", path.to_owned())
}

#[test]
fn a_socket_is_its_users_alone_and_goes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let socket = listen(&path).unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    UnixStream::connect(&path).unwrap();
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

    let nowhere = listen(&dir.path().join("no/socket")).unwrap_err();
    assert!(nowhere.to_string().contains("can't be made"), "{nowhere}");
}
