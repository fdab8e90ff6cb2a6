use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::atomic::Ordering,
};

use super::{Running, STOP_POLL};
use crate::{
    error::{Result, Tried},
    netns::NetNs,
    stun::{Request, Response},
};

/// A STUN server with two addresses and two ports (RFC 5780): it answers from another of them when
/// asked to. Stops on drop.
pub struct StunServer {
    address: SocketAddr,
    _running: Running,
}

impl StunServer {
    /// Binds all four pairs of an address and a port in `ns`.
    ///
    /// # Errors
    /// An address cannot be bound.
    pub fn start(ns: &NetNs, ips: [impl Into<IpAddr>; 2], ports: [u16; 2]) -> Result<StunServer> {
        let ips = ips.map(Into::into);
        let what = || format!("serve STUN on {ips:?}, {ports:?} in {ns:?}");
        let at = move |pair: usize| SocketAddr::new(ips[pair / 2], ports[pair % 2]);
        let bind = |pair| ns.run(|| UdpSocket::bind(at(pair)));
        let sockets = (0..4)
            .map(bind)
            .collect::<Result<Vec<_>, _>>()
            .tried(what())?;
        for socket in &sockets {
            // The thread waits at each in turn.
            socket.set_read_timeout(Some(STOP_POLL / 4)).tried(what())?;
        }
        let mut running = Running::default();
        let stop = running.stop.clone();
        running.threads.push(ns.thread("stun-server", move || {
            let mut buffer = [0; 2048];
            while !stop.load(Ordering::SeqCst) {
                for (pair, socket) in sockets.iter().enumerate() {
                    let Ok((len, peer)) = socket.recv_from(&mut buffer) else {
                        continue;
                    };
                    let Some(request) = Request::parse(&buffer[..len]) else {
                        continue;
                    };
                    let changes = usize::from(request.changes_address) * 2
                        + usize::from(request.changes_port);
                    let response = Response {
                        id: request.id,
                        mapped: peer,
                        origin: at(pair ^ changes),
                        other: at(pair ^ 3),
                    };
                    let _ = sockets[pair ^ changes].send_to(&response.encode(), peer);
                }
            }
        }));
        Ok(StunServer {
            address: at(0),
            _running: running,
        })
    }

    /// The first address, with the first port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
