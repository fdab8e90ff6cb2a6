//! The relay: a guest's DNS connections over the TCP of smoltcp, a forwarded UDP port, and a port
//! of the gateway that leads to a UDP service on the host's loopback (by TCP, to no service).
//!
//! Input: steps, each `what (1) | its operands`, see [`what`]. Forwarded TCP ports are tested by
//! the relay's own tests, because each input would leave a connection of the host in TIME-WAIT.
use std::net::{IpAddr, UdpSocket};

use slipgate_abi::{Ip4, Protocol, RuleIndex, VmId, segment::Segments};
use userspace_nat::{
    fake::packets::{self, is_right},
    packet::{Ipv4, Packet, Transport},
    poll::Context,
    poll::{Poller, Subsystem},
    port::{Frame, Outbox},
    relay::{Forward, Limits, Opening, Question, Relay, Standing, Taken},
};

use crate::{
    dress::dress,
    tape::Tape,
    vms::{GATEWAY, GUEST, PEER, spec, with_vm},
};

/// Kinds of steps: the number modulo [`what::COUNT`].
pub(crate) mod what {
    pub(crate) const SEGMENT: u8 = 0;
    pub(crate) const PACKET: u8 = 1;
    pub(crate) const ANSWER: u8 = 2;
    pub(crate) const TIME: u8 = 3;
    pub(crate) const CLIENT: u8 = 4;
    pub(crate) const DATAGRAM: u8 = 5;
    pub(crate) const LOOPBACK: u8 = 6;
    pub(crate) const SERVICE: u8 = 7;
    pub(crate) const COUNT: u8 = 8;
}

const VM: VmId = VmId::new(101);
const MAX_STEPS: usize = 300;
const DNS_CONNECTIONS: u32 = 3;
const ASSOCIATIONS: u32 = 2;
const LOOPBACK: u32 = 2;
/// Port of the gateway that leads to the host's loopback.
const LED: u16 = 5_300;
const MILLISECOND_NS: u64 = 1_000_000;
const HOUR_NS: u64 = 3_600_000 * MILLISECOND_NS;
/// DNS servers that are asked; the other steps use the first one.
const SERVERS: [Ip4; 2] = [PEER, GATEWAY];

struct World {
    relay: Relay,
    poller: Poller,
    out: Outbox,
    now_ns: u64,
    /// Last segment to the guest on each of its ports: the sender and the header.
    last: [Option<(IpAddr, userspace_nat::packet::transport::Tcp)>; 8],
    questions: Vec<Question>,
    forward: Option<UdpSocket>,
    /// Service on the host's loopback, and the address from which it last received a datagram.
    service: Option<UdpSocket>,
    heard: Option<std::net::SocketAddr>,
    clients: Vec<UdpSocket>,
    /// Port of the gateway from which the guest received a client's last datagram.
    client_port: u16,
}

/// Performs the steps. At the end everything that is relayed must time out.
pub fn relay(input: &[u8]) {
    with_vm(spec(1, VM.get(), 10), |vm| {
        let limits = Limits {
            dns_connections_per_vm: DNS_CONNECTIONS,
            associations_per_vm: ASSOCIATIONS,
            loopback_streams_per_vm: LOOPBACK,
            loopback_exchanges_per_vm: LOOPBACK,
            ..Limits::default()
        };
        let mut relay = Relay::new(limits);
        relay.add_vm(vm, None);
        let mut world = World {
            relay,
            poller: Poller::new().expect("an epoll set"),
            out: Outbox::new(1 << 20),
            now_ns: HOUR_NS,
            last: [None; 8],
            questions: Vec::new(),
            forward: None,
            service: None,
            heard: None,
            clients: Vec::new(),
            client_port: 0,
        };
        let mut tape = Tape::new(input);
        for _ in 0..MAX_STEPS {
            if tape.is_at_end() {
                break;
            }
            world.step(&mut tape);
            world.settle();
        }
        world.end();
    });
}

impl World {
    fn step(&mut self, tape: &mut Tape<'_>) {
        self.relay.begin_turn();
        match tape.u8() % what::COUNT {
            what::SEGMENT => {
                let segment = self.segment(tape);
                self.packet(&segment);
            }
            what::PACKET => {
                let bits = tape.u8();
                let mut packet = tape.bytes().to_vec();
                dress(&mut packet, bits, GUEST);
                self.packet(&packet);
            }
            what::ANSWER => {
                let connection = match self.questions.pop() {
                    Some(question) => question.connection,
                    None => u64::from(tape.u8()),
                };
                let message = tape.bytes();
                self.with(|relay, cx| relay.answer(connection, message, cx));
            }
            what::TIME => {
                self.now_ns += u64::from(tape.u16()) * MILLISECOND_NS;
                self.with(|relay, cx| relay.on_timer(&|_| false, cx));
            }
            what::CLIENT => self.client(tape),
            what::LOOPBACK => self.loopback(tape),
            what::SERVICE => self.service(tape),
            _ => {
                let data = tape.bytes();
                let to = (GATEWAY, self.client_port);
                self.packet(&packets::udp((GUEST, 53), to, data));
            }
        }
    }

    /// Builds a guest's segment: `port and server (1) | flags (1) | sequence and acknowledgement,
    /// less what is due (1, 1) | payload`.
    fn segment(&self, tape: &mut Tape<'_>) -> Vec<u8> {
        let (who, flags) = (tape.u8(), tape.u8());
        let port = usize::from(who & 7);
        let guest = (GUEST, 1_000 + port as u16);
        let off = |by: u8| u32::from(by).wrapping_sub(if by > 127 { 256 } else { 0 });
        let (sequence, acknowledgement) = (off(tape.u8()), off(tape.u8()));
        let data = tape.bytes();
        let (server, sequence, acknowledgement) = match self.last[port] {
            Some((from, tcp)) => (
                from,
                tcp.acknowledgement.wrapping_add(sequence),
                tcp.sequence
                    .wrapping_add(tcp.sequence_len())
                    .wrapping_add(acknowledgement),
            ),
            None => (
                SERVERS[usize::from(who >> 7)].into(),
                sequence,
                acknowledgement,
            ),
        };
        let to = (server, 53);
        packets::tcp(guest, to, flags, sequence, acknowledgement, &[], data)
    }

    /// Sends a guest's datagram, or a segment with these flags, from one of four ports to the one
    /// that leads to the host's loopback: `knobs (1) | payload`.
    fn loopback(&mut self, tape: &mut Tape<'_>) {
        let (knobs, flags) = (tape.u8(), tape.u8());
        let data = tape.bytes();
        let guest = (GUEST, 2_000 + u16::from(knobs & 3));
        let to = (GATEWAY, LED);
        let packet = match knobs & 4 {
            0 => packets::udp(guest, to, data),
            _ => packets::tcp(guest, to, flags, u32::from(knobs), 0, &[], data),
        };
        let segments = Segments {
            packets: 1,
            bytes: packet.len() as u64,
        };
        let service = self.service.get_or_insert_with(|| {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a port of loopback");
            socket.set_nonblocking(true).expect("a socket");
            socket
        });
        let opening = Opening {
            host_port: service.local_addr().expect("it is bound").port(),
            rule: "host_loopback".into(),
        };
        let taken = self.with(|relay, cx| match relay.packet(VM, &packet, segments, cx) {
            Taken::No => relay.open_loopback(VM, &packet, segments, &opening, cx),
            taken => taken,
        });
        if knobs & 4 == 0 && data.len() < 1_400 {
            assert_ne!(taken, Taken::No, "a datagram opens what it is let in for");
        }
    }

    /// Lets the service receive and answer. Knobs change the rules or close the service.
    fn service(&mut self, tape: &mut Tape<'_>) {
        let knobs = tape.u8();
        let data = tape.bytes();
        if let Some(service) = &self.service {
            let mut buffer = [0; 2_048];
            if let Ok((_, from)) = service.recv_from(&mut buffer) {
                self.heard = Some(from);
            }
            // Who it heard may be gone.
            let _ = self.heard.map(|to| service.send_to(data, to));
        }
        match knobs {
            0 => self.service = None,
            1 => {
                self.with(|relay, cx| relay.cut(VM, "cut", cx));
                assert_eq!(self.relay.live(0).count(), 0);
            }
            4 => {
                let number = data.first().copied().unwrap_or(0).into();
                let lives = self.relay.live(number).next();
                let lives = lives.is_some_and(|(flow, _)| flow.number == number);
                let cut = self.with(|relay, cx| relay.cut_flow(number, "cut", cx));
                assert_eq!(cut, lives);
            }
            2 | 3 => {
                let standing = match knobs {
                    2 => Standing::Cut,
                    _ => Standing::Left,
                };
                self.with(|relay, cx| relay.rejudge(&[VM].into(), &|_, _, _| standing, cx));
            }
            _ => {}
        }
    }

    /// Sends a datagram of a client on the host to the forwarded port; bit 0 selects a new client.
    fn client(&mut self, tape: &mut Tape<'_>) {
        let knobs = tape.u8();
        let data = tape.bytes();
        if self.forward.is_none() {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a port of loopback");
            self.forward = Some(socket.try_clone().expect("a descriptor"));
            let forward = Forward {
                vm: VM,
                protocol: Protocol::Udp,
                guest_port: 53,
                rule: RuleIndex::new(7),
                socket: socket.into(),
            };
            self.with(|relay, cx| relay.add_forward(forward, cx))
                .expect("a socket can be waited on");
        }
        if self.clients.is_empty() || knobs & 1 != 0 && self.clients.len() < 4 {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a port of loopback");
            self.clients.push(socket);
        }
        let (Some(forward), Some(client)) = (&self.forward, self.clients.last()) else {
            return;
        };
        let to = forward.local_addr().expect("it is bound");
        // What is too long for a datagram is the client's problem.
        let _ = client.send_to(data, to);
    }

    fn packet(&mut self, packet: &[u8]) {
        let segments = Segments {
            packets: 1,
            bytes: packet.len() as u64,
        };
        self.with(|relay, cx| relay.packet(VM, packet, segments, cx));
    }

    fn with<T>(&mut self, work: impl FnOnce(&mut Relay, &mut Context<'_>) -> T) -> T {
        let cx = &mut Context {
            now_ns: self.now_ns,
            out: &mut self.out,
            poller: &self.poller,
        };
        work(&mut self.relay, cx)
    }

    /// Serves what is ready, and checks everything that was sent.
    fn settle(&mut self) {
        let mut ready = Vec::new();
        if self.forward.is_some() || self.service.is_some() || self.heard.is_some() {
            self.poller
                .wait(Some(0), &mut ready)
                .expect("the set can be waited on");
        }
        for readiness in ready {
            assert_eq!(readiness.token.subsystem, Subsystem::Relay);
            self.with(|relay, cx| relay.on_ready(readiness, cx));
        }
        while let Some(question) = self.relay.next_question() {
            assert!((1..=4_096).contains(&question.message.len()));
            self.questions.push(question);
        }
        let counts = self.relay.counts(VM);
        assert!(counts.dns_connections <= DNS_CONNECTIONS);
        assert!(counts.associations <= ASSOCIATIONS);
        assert!(counts.loopback_streams <= LOOPBACK);
        assert!(counts.loopback_exchanges <= LOOPBACK);
        // What is listed is what there is.
        let live = self.relay.live(0).count() as u64;
        let each = [
            counts.streams,
            counts.associations,
            counts.dns_connections,
            counts.loopback_streams,
            counts.loopback_exchanges,
        ];
        assert_eq!(live, u64::from(each.iter().sum::<u32>()));
        assert_eq!(live, counts.begun - counts.ended);
        for bytes in self.out.frames() {
            let frame = Frame::parse(bytes).expect("a frame of the port");
            let packets = userspace_nat::fake::segments(frame.vnet, frame.l3);
            assert!(packets.iter().all(|packet| is_right(packet)));
            let Some(l3) = packets.last() else {
                continue;
            };
            let packet = Ipv4::parse(l3).and_then(Packet::parse);
            let packet = packet.expect("a packet");
            assert_eq!(packet.ip.destination, IpAddr::from(GUEST));
            match packet.transport {
                Transport::Tcp(tcp) => {
                    let port = usize::from(tcp.destination.wrapping_sub(1_000));
                    if let Some(last) = self.last.get_mut(port) {
                        *last = Some((packet.ip.source, tcp));
                    }
                }
                Transport::Udp(udp) if udp.source == LED => {}
                Transport::Udp(udp) => self.client_port = udp.source,
                Transport::Icmp(_) | Transport::Other => {}
            }
        }
        self.out.clear();
    }

    fn end(&mut self) {
        for _ in 0..20 {
            self.now_ns += HOUR_NS;
            self.relay.begin_turn();
            self.with(|relay, cx| relay.on_timer(&|_| false, cx));
            self.settle();
        }
        let counts = self.relay.counts(VM);
        assert_eq!((counts.dns_connections, counts.associations), (0, 0));
        assert_eq!((counts.loopback_streams, counts.loopback_exchanges), (0, 0));
        assert_eq!(self.relay.next_deadline_ns(false), None);
    }
}
