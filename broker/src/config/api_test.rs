use super::*;

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_socket_is_nobodys_until_it_is_the_groups() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api.sock");
    let socket = bind_for_nobody(&path).unwrap();
    assert_eq!(mode(&path), 0o600);
    let refused = UnixStream::connect(&path).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    drop(socket);
    // What a dead one has left is in nobody's way.
    let mut api = ApiSocket {
        path: path.clone(),
        group: None,
        may_change: true,
    };
    let listener = api.listen(&mut HandedOver::default()).unwrap();
    assert_eq!(mode(&path), 0o600);
    drop(UnixStream::connect(&path).unwrap());
    assert!(
        api.listen(&mut HandedOver::default())
            .unwrap_err()
            .to_string()
            .contains("another process")
    );
    drop(listener);
    api.group = Some("root".into());
    let _listener = api.listen(&mut HandedOver::default()).unwrap();
    assert_eq!(mode(&path), 0o660);
}
