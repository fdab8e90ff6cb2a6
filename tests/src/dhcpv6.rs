//! A DHCPv6 client (RFC 8415) that asks for an address: solicit, request, renew, rebind, confirm,
//! release.
//!
//! It uses a socket of the guest's stack, which has to be sure of its link-local address.
use std::{
    io::ErrorKind,
    net::{Ipv6Addr, SocketAddrV6, UdpSocket},
    time::{Duration, Instant},
};

use crate::{
    error::{Error, Result, Tried},
    frame::Mac,
    netns::NetNs,
};

const ALL_SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
const RETRANSMIT: Duration = Duration::from_millis(500);

/// Types of messages.
mod kind {
    pub(super) const SOLICIT: u8 = 1;
    pub(super) const ADVERTISE: u8 = 2;
    pub(super) const REQUEST: u8 = 3;
    pub(super) const CONFIRM: u8 = 4;
    pub(super) const RENEW: u8 = 5;
    pub(super) const REBIND: u8 = 6;
    pub(super) const REPLY: u8 = 7;
    pub(super) const RELEASE: u8 = 8;
}

/// Codes of options.
mod code {
    pub(super) const CLIENT_ID: u16 = 1;
    pub(super) const SERVER_ID: u16 = 2;
    pub(super) const IA_NA: u16 = 3;
    pub(super) const IA_ADDRESS: u16 = 5;
    pub(super) const REQUESTED: u16 = 6;
    pub(super) const ELAPSED_TIME: u16 = 8;
    pub(super) const STATUS: u16 = 13;
    pub(super) const RAPID_COMMIT: u16 = 14;
    pub(super) const RESOLVERS: u16 = 23;
}

/// What a server said about the client's association.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Answer {
    /// The addresses, each with the times for which it is preferred and valid, seconds.
    pub addresses: Vec<(Ipv6Addr, u32, u32)>,
    /// Time after which the client renews (T1), seconds.
    pub renew_s: u32,
    /// Status of the message or of the association; `None`: success that was not said.
    pub status: Option<u16>,
    /// Resolvers, in order.
    pub resolvers: Vec<Ipv6Addr>,
    /// The server's identity.
    pub server: Vec<u8>,
}

impl Answer {
    /// The addresses that the client may use.
    pub fn usable(&self) -> Vec<Ipv6Addr> {
        let usable = self.addresses.iter().filter(|given| given.2 != 0);
        usable.map(|given| given.0).collect()
    }
}

/// A client on a link.
#[derive(Debug)]
pub struct Client {
    socket: UdpSocket,
    servers: SocketAddrV6,
    client_id: Vec<u8>,
    /// Number of its association.
    association: [u8; 4],
    transaction: u16,
    device: String,
}

impl Client {
    /// Opens a client on a device of a namespace, whose identity is made of this MAC.
    ///
    /// # Errors
    /// There is no such device, or the client's port is taken.
    pub fn open(ns: &NetNs, device: &str, mac: Mac) -> Result<Client> {
        let missing = || Error::unexpected(format!("DHCPv6 on `{device}`: no such device"));
        let ifindex = ns.ifindex(device).ok_or_else(missing)?;
        let socket = ns.run(|| UdpSocket::bind("[::]:546"));
        Ok(Client {
            socket: socket.tried("bind the DHCPv6 client's port")?,
            servers: SocketAddrV6::new(ALL_SERVERS, 547, 0, ifindex),
            client_id: [&[0, 3, 0, 1], &mac[..]].concat(),
            association: mac[2..].try_into().expect("four octets"),
            transaction: 0,
            device: device.to_owned(),
        })
    }

    /// Takes an address, as a client that has none.
    ///
    /// # Errors
    /// No answer came in time.
    pub fn acquire(&mut self, timeout: Duration) -> Result<Answer> {
        let offer = self.ask(kind::SOLICIT, None, &[], timeout)?;
        let offered = offer.usable();
        self.ask(kind::REQUEST, Some(&offer.server), &offered, timeout)
    }

    /// Takes an address by two messages (rapid commit).
    ///
    /// # Errors
    /// No reply came in time.
    pub fn acquire_rapidly(&mut self, timeout: Duration) -> Result<Answer> {
        let wanted = (kind::SOLICIT, kind::REPLY);
        self.exchange(wanted, None, &[], true, timeout)
    }

    /// Extends the time of addresses that this server gave.
    ///
    /// # Errors
    /// No answer came in time.
    pub fn renew(
        &mut self,
        server: &[u8],
        addresses: &[Ipv6Addr],
        timeout: Duration,
    ) -> Result<Answer> {
        self.ask(kind::RENEW, Some(server), addresses, timeout)
    }

    /// Extends the time of addresses that any server gave.
    ///
    /// # Errors
    /// No answer came in time.
    pub fn rebind(&mut self, addresses: &[Ipv6Addr], timeout: Duration) -> Result<Answer> {
        self.ask(kind::REBIND, None, addresses, timeout)
    }

    /// Asks whether addresses are right on this link.
    ///
    /// # Errors
    /// No answer came in time.
    pub fn confirm(&mut self, addresses: &[Ipv6Addr], timeout: Duration) -> Result<Answer> {
        self.ask(kind::CONFIRM, None, addresses, timeout)
    }

    /// Gives addresses back.
    ///
    /// # Errors
    /// No answer came in time.
    pub fn release(
        &mut self,
        server: &[u8],
        addresses: &[Ipv6Addr],
        timeout: Duration,
    ) -> Result<Answer> {
        self.ask(kind::RELEASE, Some(server), addresses, timeout)
    }

    fn ask(
        &mut self,
        kind: u8,
        server: Option<&[u8]>,
        addresses: &[Ipv6Addr],
        timeout: Duration,
    ) -> Result<Answer> {
        let wanted = match kind {
            kind::SOLICIT => kind::ADVERTISE,
            _ => kind::REPLY,
        };
        self.exchange((kind, wanted), server, addresses, false, timeout)
    }

    /// Sends a message until an answer of the wanted type comes.
    fn exchange(
        &mut self,
        (kind, wanted): (u8, u8),
        server: Option<&[u8]>,
        addresses: &[Ipv6Addr],
        is_rapid: bool,
        timeout: Duration,
    ) -> Result<Answer> {
        self.transaction += 1;
        let [high, low] = self.transaction.to_be_bytes();
        let transaction = [0x5a, high, low];
        let mut message = [&[kind], &transaction[..]].concat();
        put(&mut message, code::CLIENT_ID, &self.client_id);
        if let Some(server) = server {
            put(&mut message, code::SERVER_ID, server);
        }
        put(&mut message, code::ELAPSED_TIME, &[0, 0]);
        put(
            &mut message,
            code::REQUESTED,
            &code::RESOLVERS.to_be_bytes(),
        );
        if is_rapid {
            put(&mut message, code::RAPID_COMMIT, &[]);
        }
        let mut association = [&self.association[..], &[0; 8]].concat();
        for address in addresses {
            let data = [&address.octets()[..], &[0; 8]].concat();
            put(&mut association, code::IA_ADDRESS, &data);
        }
        put(&mut message, code::IA_NA, &association);
        let end = Instant::now() + timeout;
        while Instant::now() < end {
            self.socket
                .send_to(&message, self.servers)
                .tried(format!("send a DHCPv6 message on `{}`", self.device))?;
            let next = end.min(Instant::now() + RETRANSMIT);
            while let Some(got) = self.receive(next)? {
                if let Some(answer) = self.read(&got, wanted, transaction) {
                    return Ok(answer);
                }
            }
        }
        Err(Error::unexpected(format!(
            "no DHCPv6 answer to a message of type {kind} on `{}` in time",
            self.device
        )))
    }

    fn receive(&self, deadline: Instant) -> Result<Option<Vec<u8>>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        let set = self.socket.set_read_timeout(Some(left));
        set.tried("set the time that a DHCPv6 answer may take")?;
        let mut buffer = [0; 2_048];
        match self.socket.recv(&mut buffer) {
            Ok(len) => Ok(Some(buffer[..len].to_vec())),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(None),
            Err(e) => Err(e).tried("receive a DHCPv6 answer"),
        }
    }

    /// Reads a message; `None`: it is another's, or malformed.
    fn read(&self, message: &[u8], wanted: u8, transaction: [u8; 3]) -> Option<Answer> {
        let [kind, a, b, c, rest @ ..] = message else {
            return None;
        };
        let all = options(rest)?;
        let is_ours = all.contains(&(code::CLIENT_ID, &self.client_id));
        if (*kind, [*a, *b, *c]) != (wanted, transaction) || !is_ours {
            return None;
        }
        let mut answer = Answer::default();
        for (code, data) in all {
            match code {
                code::SERVER_ID => answer.server = data.to_vec(),
                code::STATUS => answer.status = Some(status(data)?),
                code::RESOLVERS => {
                    let addresses = data.chunks_exact(16).filter_map(address);
                    answer.resolvers = addresses.collect();
                }
                code::IA_NA if data.get(..4)? == self.association => {
                    answer.renew_s = word(data.get(4..)?)?;
                    for (code, data) in options(data.get(12..)?)? {
                        match code {
                            code::STATUS => answer.status = Some(status(data)?),
                            code::IA_ADDRESS => answer.addresses.push((
                                address(data)?,
                                word(data.get(16..)?)?,
                                word(data.get(20..)?)?,
                            )),
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        Some(answer)
    }
}

fn put(message: &mut Vec<u8>, code: u16, data: &[u8]) {
    message.extend(code.to_be_bytes());
    message.extend((data.len() as u16).to_be_bytes());
    message.extend(data);
}

fn options(mut rest: &[u8]) -> Option<Vec<(u16, &[u8])>> {
    let mut all = Vec::new();
    while !rest.is_empty() {
        let (head, after) = rest.split_first_chunk::<4>()?;
        let [k0, k1, l0, l1] = *head;
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        let (data, after) = after.split_at_checked(len)?;
        all.push((u16::from_be_bytes([k0, k1]), data));
        rest = after;
    }
    Some(all)
}

fn word(data: &[u8]) -> Option<u32> {
    data.first_chunk().map(|word| u32::from_be_bytes(*word))
}

fn status(data: &[u8]) -> Option<u16> {
    data.first_chunk().map(|word| u16::from_be_bytes(*word))
}

fn address(data: &[u8]) -> Option<Ipv6Addr> {
    data.first_chunk::<16>()
        .map(|octets| Ipv6Addr::from(*octets))
}
