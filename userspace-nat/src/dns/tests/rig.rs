//! Test rig: a proxy with a simulated clock, and resolvers on loopback that the test controls.
use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::Duration,
};

use slipgate_abi::DropReason;

use super::hickory::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    dns::{AllowAll, AsTheHost, Guest, Limits, Origin, Proxy},
    poll::Poller,
    test_vm,
    vm::VmNet,
};

/// Address of the resolver that the guest asks.
pub(in crate::dns) const ASKED: Ipv4Addr = Ipv4Addr::new(8, 8, 4, 4);

pub(in crate::dns) struct Rig {
    pub(in crate::dns) proxy: Proxy,
    pub(in crate::dns) poller: Poller,
    pub(in crate::dns) vm: VmNet,
    pub(in crate::dns) now_ns: u64,
}

/// A VM as the engine describes it: it reaches the world by IPv6 if it was given some.
pub(in crate::dns) fn as_guest(vm: &VmNet) -> Guest<'_> {
    Guest {
        vm,
        has_ipv6: vm.ipv6.is_some(),
        ways: &AsTheHost,
    }
}

impl Rig {
    pub(in crate::dns) fn new(upstreams: &[&Upstream]) -> Self {
        Self::with_limits(upstreams, Limits::default())
    }

    pub(in crate::dns) fn with_limits(upstreams: &[&Upstream], limits: Limits) -> Self {
        let addresses: Vec<SocketAddr> = upstreams.iter().map(|u| u.address).collect();
        Self {
            proxy: Proxy::new(&addresses, limits, Box::new(AllowAll)),
            poller: Poller::new().unwrap(),
            vm: test_vm::vm(1),
            now_ns: 1000 * SECOND_NS,
        }
    }

    /// Sends a query by UDP from a port of the guest.
    pub(in crate::dns) fn ask(&mut self, port: u16, query: &Message) -> Result<(), DropReason> {
        let vm = self.vm.clone();
        self.ask_as(
            &vm,
            Origin::Udp {
                guest: SocketAddr::new(vm.guest.into(), port),
                server: ASKED.into(),
            },
            query,
        )
    }

    pub(in crate::dns) fn ask_as(
        &mut self,
        vm: &VmNet,
        origin: Origin,
        query: &Message,
    ) -> Result<(), DropReason> {
        self.proxy.query(
            as_guest(vm),
            origin,
            &query.to_vec().unwrap(),
            &self.poller,
            self.now_ns,
        )
    }

    /// Processes arriving messages until none arrives for a while.
    pub(in crate::dns) fn settle(&mut self) {
        let mut wait_ns = 200 * MILLISECOND_NS;
        loop {
            let mut ready = Vec::new();
            self.poller.wait(Some(wait_ns), &mut ready).unwrap();
            if ready.is_empty() {
                return;
            }
            for readiness in ready {
                self.proxy.on_ready(readiness, &self.poller, self.now_ns);
            }
            wait_ns = 20 * MILLISECOND_NS;
        }
    }

    /// Processes the messages that have arrived, once.
    pub(in crate::dns) fn settle_fast(&mut self) {
        let mut ready = Vec::new();
        self.poller
            .wait(Some(200 * MILLISECOND_NS), &mut ready)
            .unwrap();
        for readiness in ready {
            self.proxy.on_ready(readiness, &self.poller, self.now_ns);
        }
    }

    /// Advances the clock and runs timers.
    pub(in crate::dns) fn pass(&mut self, ns: u64) {
        self.now_ns += ns;
        self.proxy.on_timer(&self.poller, self.now_ns);
    }

    pub(in crate::dns) fn reply(&mut self) -> Option<(Origin, Message)> {
        self.proxy
            .next_reply()
            .map(|reply| (reply.origin, read(&reply.message)))
    }

    /// The reply to the guest; fails the test if there is none.
    pub(in crate::dns) fn told(&mut self) -> Message {
        let (_, message) = self.reply().expect("a reply");
        assert!(self.reply().is_none(), "one reply");
        message
    }

    /// Counters of queries, cache hits and failures.
    pub(in crate::dns) fn counted(&self) -> (u64, u64, u64) {
        let counters = self.vm.stats.snapshot().0;
        (
            counters.dns_queries,
            counters.dns_cache_hits,
            counters.dns_failures,
        )
    }
}

pub(in crate::dns) struct Upstream {
    pub(in crate::dns) address: SocketAddr,
    udp: UdpSocket,
    tcp: TcpListener,
}

impl Upstream {
    pub(in crate::dns) fn new() -> Self {
        for _ in 0..100 {
            let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
            let address = udp.local_addr().unwrap();
            let Ok(tcp) = TcpListener::bind(address) else {
                continue;
            };
            udp.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            return Self { address, udp, tcp };
        }
        panic!("no port free for UDP and TCP")
    }

    /// The next query at this resolver, and its sender.
    pub(in crate::dns) fn query(&self) -> (Message, SocketAddr) {
        let mut buffer = [0; 2000];
        let (len, from) = self.udp.recv_from(&mut buffer).expect("a query");
        (read(&buffer[..len]), from)
    }

    pub(in crate::dns) fn is_idle(&self) -> bool {
        self.udp.set_nonblocking(true).unwrap();
        let idle = self.udp.peek_from(&mut [0; 1]).is_err();
        self.udp.set_nonblocking(false).unwrap();
        idle
    }

    pub(in crate::dns) fn send(&self, message: &Message, to: SocketAddr) {
        self.udp.send_to(&message.to_vec().unwrap(), to).unwrap();
    }

    pub(in crate::dns) fn send_bytes(&self, message: &[u8], to: SocketAddr) {
        self.udp.send_to(message, to).unwrap();
    }

    /// Receives a query and answers it with one address.
    pub(in crate::dns) fn answer(&self, ttl: u32, address: [u8; 4]) {
        let (query, from) = self.query();
        self.send(&with_address(&query, ttl, address), from);
    }

    /// Answers a query whose socket may be closed. Returns whether the datagram was sent.
    pub(in crate::dns) fn query_gone(&self, query: &Message, to: SocketAddr) -> bool {
        let message = with_address(query, 60, [192, 0, 2, 1]).to_vec().unwrap();
        self.udp.send_to(&message, to).is_ok()
    }

    pub(in crate::dns) fn refuse(&self, code: ResponseCode) {
        let (query, from) = self.query();
        let mut message = response(&query);
        message.metadata.response_code = code;
        self.send(&message, from);
    }

    /// Receives a query and answers with TC set.
    pub(in crate::dns) fn truncate(&self) {
        let (query, from) = self.query();
        let mut message = response(&query);
        message.metadata.truncation = true;
        self.send(&message, from);
    }

    /// Accepts a TCP connection and reads the query from it.
    pub(in crate::dns) fn accept(&self) -> (TcpStream, Message) {
        let (mut stream, _) = self.tcp.accept().unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        let mut len = [0; 2];
        stream.read_exact(&mut len).unwrap();
        let mut bytes = vec![0; usize::from(u16::from_be_bytes(len))];
        stream.read_exact(&mut bytes).unwrap();
        (stream, read(&bytes))
    }
}

/// A response with one address for the name asked.
pub(in crate::dns) fn with_address(query: &Message, ttl: u32, address: [u8; 4]) -> Message {
    let mut message = response(query);
    message.add_answer(a(&query.queries[0].name().to_string(), ttl, address));
    message
}

pub(in crate::dns) fn send_framed(stream: &mut TcpStream, message: &Message) {
    let bytes = message.to_vec().unwrap();
    stream
        .write_all(&(bytes.len() as u16).to_be_bytes())
        .unwrap();
    stream.write_all(&bytes).unwrap();
}

pub(in crate::dns) fn first_address(message: &Message) -> Option<std::net::IpAddr> {
    message.answers.first().and_then(|r| r.data.ip_addr())
}
