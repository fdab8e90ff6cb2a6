use std::net::SocketAddr;

use super::{super::udp::LOOK, *};

#[test]
fn all_that_is_sent_comes_back_as_it_was() {
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let [server, client] = [(); 2].map(|()| UdpSocket::bind(loopback).unwrap());
    server.connect(client.local_addr().unwrap()).unwrap();
    client.connect(server.local_addr().unwrap()).unwrap();
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(LOOK)).unwrap();
    }
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let echoing = scope.spawn(|| echo(&server, &has_ended));
        let (mut sent, mut back) = (Batch::new(), Batch::new());
        for (nth, payload) in sent.payloads.iter_mut().enumerate() {
            payload.fill(nth as u8);
        }
        sent.send(&client, UNDER_WAY).unwrap();
        let mut came = Vec::new();
        while came.len() < UNDER_WAY {
            let count = back.receive(&client).unwrap();
            came.extend_from_slice(&back.payloads[..count]);
        }
        assert_eq!(came, sent.payloads);
        has_ended.store(true, Relaxed);
        echoing.join().unwrap().unwrap();
    });
}

#[test]
fn an_exchange_counts_what_came_back() {
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let alone = UdpSocket::bind(loopback).unwrap();
    let silent = UdpSocket::bind(loopback).unwrap();
    alone.connect(silent.local_addr().unwrap()).unwrap();
    alone.set_read_timeout(Some(LOOK)).unwrap();
    let (count, took) = exchange(&alone, 2 * LOOK).unwrap();
    assert_eq!(count, 0);
    assert!(took >= 2 * LOOK);
    // It hears itself.
    alone.connect(alone.local_addr().unwrap()).unwrap();
    let (count, _) = exchange(&alone, LOOK).unwrap();
    assert!(count >= UNDER_WAY as u64, "{count}");
}
