use super::*;

#[test]
fn a_client_is_not_taken_for_one_whose_datagrams_are_late() {
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let [server, former, client] = [(); 3].map(|()| UdpSocket::bind(loopback).unwrap());
    server.set_read_timeout(Some(LOOK)).unwrap();
    let to = server.local_addr().unwrap();
    former.connect(to).unwrap();
    client.connect(to).unwrap();
    // Payload, and its greeting.
    former.send(&[0x5a; DATAGRAM as usize]).unwrap();
    let greeting = format!("hello from {}", former.local_addr().unwrap());
    former.send(greeting.as_bytes()).unwrap();
    let seen = greeted(&client, &server).unwrap();
    assert_eq!(seen, client.local_addr().unwrap());
}
