use std::os::{fd::AsRawFd as _, unix::net::UnixStream};

use super::*;

#[test]
fn it_ends_by_a_signal_by_hanging_up_and_with_the_engine() {
    let dir = tempfile::tempdir().unwrap();
    let new = |name: &str| {
        Socket::listen("--socket", dir.path().join(name), "vm".to_owned(), None).unwrap()
    };

    let mut stopped = new("a");
    UnixStream::connect(dir.path().join("a")).unwrap();
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

#[test]
fn a_connection_ends_it_by_either_end() {
    for by_engine in [true, false] {
        let (ours, peer) = UnixStream::pair().unwrap();
        let mut socket = Socket::connected(ours.into(), "vm".to_owned(), None);
        let engines = socket.link().unwrap();
        assert!(!socket.has_ended());
        match by_engine {
            true => {
                let down = nix::sys::socket::Shutdown::Both;
                nix::sys::socket::shutdown(engines.as_raw_fd(), down).unwrap();
            }
            false => drop(peer),
        }
        assert!(socket.has_ended() && socket.ended().is_ok());
    }
}

#[test]
fn what_a_vmm_sent_before_it_closed_is_read_by_the_engine() {
    use std::io::Read as _;
    let (ours, mut peer) = UnixStream::pair().unwrap();
    let mut socket = Socket::connected(ours.into(), "vm".to_owned(), None);
    let mut engines = UnixStream::from(socket.link().unwrap());
    peer.write_all(b"the last frame").unwrap();
    drop(peer);
    let reader = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        let mut read = Vec::new();
        engines.read_to_end(&mut read).unwrap();
        read
    });
    assert!(socket.has_ended());
    // It is empty by now: the engine may be stopped.
    let look = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let left = recv(socket.end.as_fd().as_raw_fd(), &mut [0], look);
    assert_eq!(left, Ok(0));
    assert_eq!(reader.join().unwrap(), b"the last frame");
}

#[test]
fn what_is_no_connected_stream_socket_is_not_inherited() {
    use std::os::{fd::IntoRawFd as _, unix::net::UnixListener};
    let dir = tempfile::tempdir().unwrap();
    let file: OwnedFd = std::fs::File::create(dir.path().join("file"))
        .unwrap()
        .into();
    let listener: OwnedFd = UnixListener::bind(dir.path().join("s")).unwrap().into();
    let datagrams: OwnedFd = std::os::unix::net::UnixDatagram::pair().unwrap().0.into();
    let tcp_listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = tcp_listener.local_addr().unwrap();
    let tcp: OwnedFd = std::net::TcpStream::connect(to).unwrap().into();
    for (fd, why) in [
        (2, "stderr"),
        (1_000_000, "not open"),
        (file.as_raw_fd(), "no socket"),
        (datagrams.as_raw_fd(), "no stream socket"),
        (listener.as_raw_fd(), "nobody is connected"),
        (tcp.as_raw_fd(), "nobody is connected"),
    ] {
        let refused = inherit(fd).unwrap_err().to_string();
        assert!(
            refused.contains("--fd") && refused.contains(why),
            "{refused}"
        );
    }
    let (ours, _peer) = UnixStream::pair().unwrap();
    let fd = ours.into_raw_fd();
    assert_eq!(inherit(fd).unwrap().as_raw_fd(), fd);
}
