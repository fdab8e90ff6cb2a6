use std::{
    collections::HashMap,
    io,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{Address, Running, STOP_POLL};
use crate::{
    clients::udp::{SOL_UDP, UDP_SEGMENT, numbered},
    error::{Result, Tried},
    netns::NetNs,
    sockets,
};

/// Treatment of a datagram by a UDP server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdpService {
    /// Sends the datagram back.
    Echo,
    /// Counts the datagram only.
    Sink,
    /// Answers with that many numbered datagrams of `size` bytes, sent as one GSO frame: see
    /// [`crate::clients::udp::ask_burst`].
    Burst {
        /// Number of datagrams of the burst.
        count: u64,
        /// Payload bytes of each.
        size: u16,
    },
}

#[derive(Default)]
struct Seen {
    datagrams: AtomicU64,
    payload_bytes: AtomicU64,
    peers: Mutex<HashMap<SocketAddr, u64>>,
}

/// A UDP server; stops on drop.
pub struct UdpServer<I: Address = Ipv4Addr> {
    address: I::Socket,
    socket: UdpSocket,
    seen: Arc<Seen>,
    _running: Running,
}

impl<I: Address> UdpServer<I> {
    /// Binds `address` in `ns` (port 0: any).
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn start(ns: &NetNs, address: (I, u16), service: UdpService) -> Result<Self> {
        let what = || format!("serve UDP on {}:{} in {ns:?}", address.0, address.1);
        let socket = ns
            .run(|| UdpSocket::bind((address.0.into(), address.1)))
            .tried(what())?;
        sockets::set_receive_buffer(&socket, 16 << 20).tried(what())?;
        socket.set_read_timeout(Some(STOP_POLL)).tried(what())?;
        let port = socket.local_addr().tried(what())?.port();
        let seen = Arc::new(Seen::default());
        let mut running = Running::default();
        let mut burst = Vec::new();
        if let UdpService::Burst { count, size } = service {
            sockets::set(&socket, SOL_UDP, UDP_SEGMENT, size.into()).tried(what())?;
            burst.extend((0..count).flat_map(|number| numbered(number, size.into())));
        }
        let (receiving, theirs) = (socket.try_clone().tried(what())?, seen.clone());
        let stop = running.stop.clone();
        running.threads.push(ns.thread("udp-server", move || {
            let mut buffer = vec![0; 65536];
            while !stop.load(Ordering::SeqCst) {
                // A timeout, or an ICMP error that an echo met: either way, the next one.
                let Ok((len, peer)) = receiving.recv_from(&mut buffer) else {
                    continue;
                };
                theirs.datagrams.fetch_add(1, Ordering::Relaxed);
                theirs
                    .payload_bytes
                    .fetch_add(len as u64, Ordering::Relaxed);
                let mut peers = theirs.peers.lock().unwrap_or_else(PoisonError::into_inner);
                *peers.entry(peer).or_default() += 1;
                drop(peers);
                match service {
                    UdpService::Echo => drop(receiving.send_to(&buffer[..len], peer)),
                    UdpService::Sink => {}
                    UdpService::Burst { .. } => drop(receiving.send_to(&burst, peer)),
                }
            }
        }));
        let address = address.0.at(port);
        Ok(UdpServer {
            address,
            socket,
            seen,
            _running: running,
        })
    }

    /// The address it is bound to.
    pub fn address(&self) -> I::Socket {
        self.address
    }

    /// Returns the number of datagrams received so far.
    pub fn datagrams(&self) -> u64 {
        self.seen.datagrams.load(Ordering::Relaxed)
    }

    /// Returns the number of payload bytes received so far.
    pub fn payload_bytes(&self) -> u64 {
        self.seen.payload_bytes.load(Ordering::Relaxed)
    }

    /// Peers seen, with the number of datagrams of each: the guests' addresses as translated.
    pub fn peers(&self) -> HashMap<I::Socket, u64> {
        let peers = self.seen.peers.lock();
        let peers = peers.unwrap_or_else(PoisonError::into_inner);
        let of_the_family = |(peer, count): (&SocketAddr, &u64)| Some((I::of(*peer)?, *count));
        peers.iter().filter_map(of_the_family).collect()
    }

    /// Makes later datagrams have no DF flag, so that routers may fragment them.
    ///
    /// # Errors
    /// The kernel refuses the socket option.
    pub fn allow_fragments(&self) -> Result<()> {
        let (option, value) = (libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT);
        sockets::set(&self.socket, libc::IPPROTO_IP, option, value)
            .tried("have a UDP server's datagrams without DF")
    }

    /// Sends an unsolicited datagram.
    ///
    /// # Errors
    /// The kernel refuses the datagram.
    pub fn send_to(&self, payload: &[u8], peer: I::Socket) -> io::Result<usize> {
        self.socket.send_to(payload, peer.into())
    }
}
