//! Against the kernel's own loopback.
use std::{
    io::{ErrorKind, Write as _},
    net::{Ipv4Addr, TcpListener, TcpStream},
};

use super::*;

fn pair() -> (TcpStream, OwnedFd) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (server, listener.accept().unwrap().0.into())
}

fn peeked(socket: &OwnedFd, skipped: usize, most: usize) -> Result<String, ErrorKind> {
    let mut into = vec![0; most];
    let got = peek(socket, skipped, &mut [0; 64], &mut Target::Here(&mut into));
    got.map(|got| String::from_utf8(into[..got].to_vec()).unwrap())
        .map_err(|error| error.kind())
}

#[test]
fn bytes_are_peeked_at_a_place_and_taken_out_later() {
    let (mut server, socket) = pair();
    if !peek_at(&socket, 0) {
        return; // Before Linux 6.9: the test below is what happens.
    }
    server.write_all(b"abcdefgh").unwrap();
    assert_eq!(peeked(&socket, 0, 3).as_deref(), Ok("abc"));
    assert_eq!(
        peeked(&socket, 0, 3).as_deref(),
        Ok("def"),
        "the kernel goes on"
    );
    // The guest has acknowledged two bytes: the place is the same, two bytes nearer.
    discard(&socket, 2, &mut [0; 64]).unwrap();
    assert_eq!(peeked(&socket, 0, 9).as_deref(), Ok("gh"));
    // A loss: from the first byte that is not acknowledged.
    assert!(peek_at(&socket, 0));
    assert_eq!(peeked(&socket, 0, 9).as_deref(), Ok("cdefgh"));
    assert_eq!(peeked(&socket, 0, 9), Err(ErrorKind::WouldBlock));
    drop(server);
    assert_eq!(peeked(&socket, 0, 9).as_deref(), Ok(""), "the end");
}

#[test]
fn without_the_kernels_help_the_bytes_before_are_skipped() {
    let (mut server, socket) = pair();
    server.write_all(b"abcdefgh").unwrap();
    assert_eq!(peeked(&socket, 3, 3).as_deref(), Ok("def"));
    assert_eq!(peeked(&socket, 8, 3), Err(ErrorKind::WouldBlock));
    assert_eq!(
        peeked(&socket, 65, 3),
        Err(ErrorKind::WouldBlock),
        "beyond the scratch"
    );
    drop(server);
    assert_eq!(
        peeked(&socket, 8, 3),
        Err(ErrorKind::WouldBlock),
        "told once all is taken out"
    );
    discard(&socket, 8, &mut [0; 64]).unwrap();
    assert_eq!(peeked(&socket, 0, 3).as_deref(), Ok(""));
}

#[test]
fn a_send_queue_says_how_much_room_it_has() {
    let (_server, socket) = pair();
    let (room, size) = room(&socket);
    assert!(room > 0 && room < size, "{room} of {size}");
}

#[test]
fn a_send_queue_is_enlarged_and_the_kernel_may_still_change_it() {
    const SO_BUF_LOCK: libc::c_int = 72;
    let (_server, socket) = pair();
    setsockopt(&socket, sockopt::SndBuf, &8_000).unwrap();
    assert!(room(&socket).0 < 20_000);
    enlarge(&socket, 100_000);
    let (enlarged, size) = room(&socket);
    assert!(enlarged >= 100_000, "{enlarged}");
    enlarge(&socket, 50_000);
    assert_eq!(room(&socket), (enlarged, size), "never smaller");
    let mut locked: libc::c_int = -1;
    let mut len = size_of_val(&locked) as libc::socklen_t;
    // SAFETY: the call writes an int, of the size given.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_BUF_LOCK,
            (&raw mut locked).cast(),
            &raw mut len,
        )
    };
    assert_eq!((rc, locked), (0, 0));
}
