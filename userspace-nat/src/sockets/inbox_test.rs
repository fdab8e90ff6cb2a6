use std::net::UdpSocket;

use nix::sys::socket::{setsockopt, sockopt};

use super::*;

const START: usize = 64;

/// A socket that has received datagrams of these lengths, each of bytes that tell which it is.
fn with(lens: &[usize]) -> (Inbox, OwnedFd, SocketAddr) {
    let to = UdpSocket::bind("127.0.0.1:0").unwrap();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    for (nth, &len) in lens.iter().enumerate() {
        let sent = from.send_to(&vec![nth as u8; len], to.local_addr().unwrap());
        assert_eq!(sent.unwrap(), len);
    }
    (Inbox::default(), to.into(), from.local_addr().unwrap())
}

fn all(inbox: &mut Inbox, joins: bool) -> Vec<(usize, Option<u16>, Vec<u8>)> {
    let (mut nth, mut all) = (0, Vec::new());
    while let Some((received, count)) = inbox.joined(nth, START, |_| joins) {
        let bytes = inbox.place(nth)[START..START + received.len].to_vec();
        all.push((count, received.segment_len, bytes));
        nth += count;
    }
    all
}

#[test]
fn one_call_takes_many_and_joins_those_of_one_length() {
    let (mut inbox, socket, from) = with(&[5, 5, 3, 5, 0, 9]);
    assert_eq!(inbox.receive(&socket, START), Ok(6));
    assert!(inbox.received.iter().all(|one| one.from == Some(from)));
    let joined = vec![0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2];
    let expected = [
        (3, Some(5), joined),
        (1, None, vec![3; 5]),
        (1, None, vec![]),
        (1, None, vec![5; 9]),
    ];
    assert_eq!(all(&mut inbox, true), expected);
    assert_eq!(inbox.receive(&socket, START), Err(Errno::EAGAIN));
    assert_eq!(
        all(&mut inbox, true),
        [],
        "nothing of the last call is left"
    );
}

#[test]
fn a_link_that_takes_none_joined_gets_each_as_it_came() {
    let (mut inbox, socket, _) = with(&[5, 5]);
    assert_eq!(inbox.receive(&socket, START), Ok(2));
    let expected = [(1, None, vec![0; 5]), (1, None, vec![1; 5])];
    assert_eq!(all(&mut inbox, false), expected);
}

#[test]
fn more_than_a_call_takes_is_left() {
    let (mut inbox, socket, _) = with(&[5; AT_ONCE + 1]);
    assert_eq!(inbox.receive(&socket, START), Ok(AT_ONCE));
    assert_eq!(inbox.receive(&socket, START), Ok(1));
    assert_eq!(all(&mut inbox, true), [(1, None, vec![AT_ONCE as u8; 5])]);
}

#[test]
fn what_the_kernel_joined_has_its_length() {
    let to = UdpSocket::bind("[::1]:0").unwrap();
    setsockopt(&to, sockopt::UdpGroSegment, &true).unwrap();
    let from = UdpSocket::bind("[::1]:0").unwrap();
    setsockopt(&from, sockopt::UdpGsoSegment, &7).unwrap();
    from.send_to(&[9; 24], to.local_addr().unwrap()).unwrap();
    let (mut inbox, socket) = (Inbox::default(), OwnedFd::from(to));
    assert_eq!(inbox.receive(&socket, START), Ok(1));
    assert_eq!(inbox.received[0].from, from.local_addr().ok());
    assert_eq!(all(&mut inbox, true), [(1, Some(7), vec![9; 24])]);
}
