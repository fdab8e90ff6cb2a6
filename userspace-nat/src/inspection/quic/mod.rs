//! QUIC: reads the client's Initial packets, whose keys derive from the first of them (RFC 9001).
//!
//! # Theory of operation
//! A client may begin a connection with any datagram, also in a flow that already carries one:
//! servers distinguish connections by their ids. So every packet with a long header is examined for
//! as long as the flow lives. Packets with a short header pass: they belong to a connection that
//! was begun, or to none. For this reason such a flow stays in the engine.
//!
//! The destination id alone determines the connection of an Initial, as it does for a server: the
//! id with which the connection began, or the one with which the server answered, which is read
//! from the server's Initials. Another id begins another connection. So each Initial is opened with
//! the keys of one connection, and a packet that opens with two keys gains nothing (AES-GCM does
//! not commit to a key). An attacker who knows the first id can forge a server's answer. So a
//! packet to a server's id is dropped if it also opens with the keys derived from that id. An id
//! that a server chose in an answer to no known connection begins none: the server takes packets to
//! it as part of a connection that it has.
//!
//! | what a datagram has | what is done |
//! | --- | --- |
//! | only packets with short headers, or Handshake and 0-RTT | passes, once a connection was let in |
//! | an Initial of a connection that is not decided | held, until its ClientHello is whole |
//! | an Initial with a whole ClientHello, or more of one that was let in | judged; what was held goes on in its order |
//! | an Initial, and less than 1,200 bytes in all (RFC 9000 section 14.1) | dropped unread |
//! | an Initial that can't be opened, or of a connection that made room for another | dropped |
//! | Initials that can't be opened, again and again | refused |
//! | an Initial, and the VM has had as many opened as it may for now ([`effort`]) | dropped |
//! | DTLS ([`dtls`]), which may have the same port (RFC 9443) | dropped |
//! | what can't be taken apart, an unknown version, more packets than a client sends | refused |
//!
//! The hello lies in CRYPTO frames, in any order over several packets. The datagrams are forwarded
//! unchanged, so a byte that is repeated must be the same byte; otherwise the flow is ended. After
//! a HelloRetryRequest another hello follows in the same stream, and is judged like the first.
//!
//! Of [`MAX_CONNECTIONS`] known and decided connections, the one whose last Initial is the oldest
//! makes room for the next. It may still be live, and its data is forgotten. So its later Initials
//! are dropped, and its ids are remembered for that.
use crate::{
    inspection::{HostName, Refused, client_hello, reassembly::Reassembly},
    port::VirtioNetHdr,
};

mod dtls;
pub mod effort;
mod keys;
mod packet;
mod shut;

pub use effort::{Allowance, Effort};
#[cfg(test)]
pub(crate) use keys::DERIVED;
pub use keys::{Keys, Version};
pub use packet::{Initial, crypto_frames, initials};

use effort::OverBudget;
use shut::ShutIds;

/// Least payload of a datagram with an Initial packet of a client's, bytes (RFC 9000 section 14.1).
pub const MIN_DATAGRAM: usize = 1_200;
/// Most connections of a flow that are known at once.
const MAX_CONNECTIONS: usize = 16;
/// Most CRYPTO data of a client in Initial packets, bytes: two hellos.
const MAX_CRYPTO: usize = 2 * client_hello::MAX_LEN;
/// Most Initial packets in a datagram.
const MAX_INITIALS: usize = 8;
/// Maximum number of unanswered connections with the same client id on which a server's packet is
/// tried. A client with an empty id has one such connection at a time.
const MAX_NAMESAKES: usize = 2;
/// Memory of a connection in addition to its keys and its CRYPTO data, bytes.
const CONNECTION_HELD: usize = size_of::<Connection>() + 3 * packet::MAX_ID + 64;
/// Most frames held of a flow.
const MAX_FRAMES: usize = 16;

/// Inspection state of a QUIC flow.
#[derive(Debug, Default)]
pub struct Flow {
    /// Known connections, that with the oldest last Initial first.
    connections: Vec<Connection>,
    shut: ShutIds,
    /// Frames that wait for a decision, unchanged.
    waiting: Vec<(VirtioNetHdr, Vec<u8>)>,
    /// Whether a connection was admitted.
    is_open: bool,
    /// Cost spent on Initials that did not open.
    wasted: u32,
}

#[derive(Debug)]
struct Connection {
    /// Id from which the connection's keys derive.
    original: Box<[u8]>,
    /// Id that the client chose for itself.
    client: Box<[u8]>,
    /// Id with which the server answered.
    server: Option<Box<[u8]>>,
    /// Keys derived so far.
    keys: Vec<(KeysOf, Version, Keys)>,
    crypto: Reassembly,
    /// Number of the stream's bytes that were judged and admitted.
    judged: usize,
}

/// Side and connection whose Initial keys are meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum KeysOf {
    Client,
    Server,
    /// The client of a connection that was begun with the server's id of this one.
    ClientByServersId,
}

/// Treatment of a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Passage {
    /// Forward it, after the held ones.
    Goes,
    /// Hold it with the others.
    Held,
    /// Drop the datagram; it is not valid.
    Dropped,
    /// Drop it, because the VM's budget for opening packets is spent.
    Unread,
}

impl Flow {
    /// Examines a guest's datagram. `may` returns whether the rules admit a server of this name. On
    /// [`Passage::Held`] the caller must keep the frame by [`Flow::hold`].
    ///
    /// # Errors
    /// If the flow must be refused: the datagram is not acceptable, or the rules do not admit the
    /// server.
    pub fn datagram(
        &mut self,
        datagram: &[u8],
        effort: &mut Effort<'_>,
        may: &mut dyn FnMut(&HostName) -> bool,
    ) -> Result<Passage, Refused> {
        let initials = initials(datagram)?;
        if dtls::is_in(datagram) && (self.is_open || !initials.is_empty()) {
            return Ok(Passage::Dropped);
        }
        if initials.is_empty() {
            return match self.is_open {
                true => Ok(Passage::Goes),
                false => Err(Refused::Unknown),
            };
        }
        if datagram.len() < MIN_DATAGRAM {
            return Ok(Passage::Dropped);
        }
        if initials.len() > MAX_INITIALS {
            return Err(Refused::TooLong);
        }
        // All of them are opened before anything is kept of one.
        let spent_before = effort.spent();
        let (mut begun, mut payloads) = (Vec::new(), Vec::new());
        for initial in &initials {
            match self.open(initial, &mut begun, effort) {
                Ok(Some(payload)) => payloads.push(payload),
                // No server can open it, or all of them but us: a number past its field's end.
                Ok(None) => {
                    self.wasted += effort.spent() - spent_before;
                    return match self.wasted > effort::MAX_WASTED {
                        true => Err(Refused::Unopened),
                        false => Ok(Passage::Dropped),
                    };
                }
                Err(OverBudget) => return Ok(Passage::Unread),
            }
        }
        for (initial, payload) in initials.iter().zip(&payloads) {
            let Some(connection) = self.connection_of(initial, &mut begun)? else {
                return Ok(Passage::Dropped);
            };
            connection.take(payload)?;
            connection.judge(may)?;
        }
        if self.is_undecided() {
            return Ok(Passage::Held);
        }
        self.is_open = true;
        Ok(Passage::Goes)
    }

    /// Examines a server's datagram, which is forwarded in any case, for the ids that the server
    /// chooses.
    pub fn server_datagram(&mut self, datagram: &[u8], effort: &mut Effort<'_>) {
        let is_long = datagram.first().is_some_and(|first| first & 0x80 != 0);
        if !is_long {
            return;
        }
        let packets = packet::long_packets(datagram).unwrap_or_default();
        for (packet, is_initial) in packets.iter().take(MAX_INITIALS) {
            let mut known = self.connections.iter();
            let is_known = known.any(|c| c.server.as_deref() == Some(packet.source));
            // One that could not be read may be sent again, and be read then.
            let is_known =
                is_known || *is_initial && self.is_answered_by(packet, effort) == Ok(true);
            if !is_known {
                self.shut.take_servers(packet.source);
            }
        }
    }

    /// Whether the packet is a server's first answer in a connection. If so, its source id becomes
    /// the connection's server id.
    fn is_answered_by(
        &mut self,
        initial: &Initial<'_>,
        effort: &mut Effort<'_>,
    ) -> Result<bool, OverBudget> {
        let called = self.connections.iter_mut().rev().filter(|connection| {
            connection.server.is_none() && *connection.client == *initial.destination
        });
        for connection in called.take(MAX_NAMESAKES) {
            let opened = connection.open_by(KeysOf::Server, initial, effort)?;
            if opened.is_some() {
                connection.server = Some(initial.source.into());
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Holds a frame, from L3 on.
    ///
    /// # Errors
    /// If the flow holds too many frames.
    pub fn hold(&mut self, vnet: VirtioNetHdr, l3: &[u8]) -> Result<(), Refused> {
        if self.waiting.len() >= MAX_FRAMES {
            return Err(Refused::TooLong);
        }
        self.waiting.push((vnet, l3.to_vec()));
        Ok(())
    }

    /// Whether a connection needs more data before its held frames may be forwarded.
    pub fn is_undecided(&self) -> bool {
        !self.connections.iter().all(Connection::is_decided)
    }

    /// Whether a connection was admitted.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Removes and returns the held frames, if they may be forwarded now.
    pub fn release(&mut self) -> Vec<(VirtioNetHdr, Vec<u8>)> {
        if self.is_undecided() {
            return Vec::new();
        }
        std::mem::take(&mut self.waiting)
    }

    /// Returns the frames that wait for a decision.
    pub fn waiting(&self) -> &[(VirtioNetHdr, Vec<u8>)] {
        &self.waiting
    }

    /// Memory in use, bytes.
    pub fn held(&self) -> usize {
        let connections = self.connections.iter().map(Connection::held);
        let waiting = self.waiting.iter().map(|(_, l3)| l3.capacity());
        connections.chain(waiting).sum::<usize>() + self.shut.held()
    }

    /// Opens an Initial by the keys of one connection: a known one, one of `begun`, or a new one,
    /// which is added to `begun`. Returns its frames; `None` if no connection opens it, or its ids
    /// are shut.
    fn open(
        &mut self,
        initial: &Initial<'_>,
        begun: &mut Vec<Connection>,
        effort: &mut Effort<'_>,
    ) -> Result<Option<Vec<u8>>, OverBudget> {
        if self.shut.has_past(initial.destination) {
            return Ok(None);
        }
        let known = self.connections.iter_mut();
        let mut called = known.filter(|c| c.is_called(initial.destination));
        match (called.next(), called.next()) {
            (Some(connection), None) => return connection.open(initial, effort),
            // Of servers that give themselves no ids: it may be of either.
            (Some(_), Some(_)) => return Ok(None),
            (None, _) if self.shut.has_servers(initial.destination) => return Ok(None),
            (None, _) => {}
        }
        let mut beginning = begun.iter_mut();
        if let Some(connection) = beginning.find(|c| c.is_called(initial.destination)) {
            return connection.open(initial, effort);
        }
        let mut connection = Connection::begun_by(initial);
        let payload = connection.open(initial, effort)?;
        if payload.is_some() {
            begun.push(connection);
        }
        Ok(payload)
    }

    /// Returns the connection of an Initial that was opened, and makes it the newest. `None`: it
    /// made room for another connection of the same datagram.
    fn connection_of(
        &mut self,
        initial: &Initial<'_>,
        begun: &mut Vec<Connection>,
    ) -> Result<Option<&mut Connection>, Refused> {
        let is_it = |connection: &Connection| connection.is_called(initial.destination);
        if let Some(at) = self.connections.iter().position(is_it) {
            self.connections[at..].rotate_left(1);
        } else if let Some(at) = begun.iter().position(is_it) {
            self.make_room()?;
            self.connections.push(begun.swap_remove(at));
        } else {
            return Ok(None);
        }
        Ok(self.connections.last_mut())
    }

    /// Makes room for one more connection.
    fn make_room(&mut self) -> Result<(), Refused> {
        if self.shut.is_full_of_servers() {
            return Err(Refused::Limit);
        }
        if self.connections.len() < MAX_CONNECTIONS {
            return Ok(());
        }
        let decided = self.connections.iter().position(Connection::is_decided);
        let gone = self.connections.remove(decided.ok_or(Refused::Limit)?);
        self.shut
            .take_past([Some(&*gone.original), gone.server.as_deref()])
    }
}

impl Connection {
    fn begun_by(initial: &Initial<'_>) -> Self {
        Self {
            original: initial.destination.into(),
            client: initial.source.into(),
            server: None,
            keys: Vec::new(),
            crypto: Reassembly::new(0),
            judged: 0,
        }
    }

    fn is_called(&self, id: &[u8]) -> bool {
        *self.original == *id || self.server.as_deref() == Some(id)
    }

    fn keys(
        &mut self,
        of: KeysOf,
        version: Version,
        effort: &mut Effort<'_>,
    ) -> Result<&Keys, OverBudget> {
        let known = self.keys.iter();
        let mut known = known.map(|(kept_of, kept, _)| (*kept_of, *kept));
        let at = match known.position(|kept| kept == (of, version)) {
            Some(at) => at,
            None => {
                effort.derive()?;
                let keys = match (of, &self.server) {
                    (KeysOf::Server, _) => Keys::of_server(version, &self.original),
                    (KeysOf::ClientByServersId, Some(server)) => Keys::of_client(version, server),
                    _ => Keys::of_client(version, &self.original),
                };
                self.keys.reserve_exact(1);
                self.keys.push((of, version, keys));
                self.keys.len() - 1
            }
        };
        Ok(&self.keys[at].2)
    }

    fn open_by(
        &mut self,
        of: KeysOf,
        initial: &Initial<'_>,
        effort: &mut Effort<'_>,
    ) -> Result<Option<Vec<u8>>, OverBudget> {
        effort.attempt()?;
        let keys = self.keys(of, initial.version, effort)?;
        Ok(initial.open(keys))
    }

    /// Opens an Initial that is addressed to this connection. Returns its frames; `None` if its
    /// keys do not open it, or other keys open it too.
    fn open(
        &mut self,
        initial: &Initial<'_>,
        effort: &mut Effort<'_>,
    ) -> Result<Option<Vec<u8>>, OverBudget> {
        let payload = self.open_by(KeysOf::Client, initial, effort)?;
        let is_begin = *self.original == *initial.destination;
        if payload.is_none() || is_begin {
            return Ok(payload);
        }
        let another = self.open_by(KeysOf::ClientByServersId, initial, effort)?;
        Ok(payload.filter(|_| another.is_none()))
    }

    /// Memory in use, bytes.
    fn held(&self) -> usize {
        let keys = self.keys.capacity() * size_of::<(KeysOf, Version, Keys)>();
        CONNECTION_HELD + keys + self.crypto.held()
    }

    /// Processes the frames of a packet.
    fn take(&mut self, payload: &[u8]) -> Result<(), Refused> {
        for (offset, bytes) in crypto_frames(payload)? {
            let end = offset.saturating_add(bytes.len() as u64);
            if end > MAX_CRYPTO as u64 {
                return Err(Refused::TooLong);
            }
            let offset = offset as u32;
            if !self.crypto.insert(offset, bytes, false) {
                return Err(Refused::TooLong);
            }
            if !self.crypto.has(offset, bytes) {
                return Err(Refused::Malformed);
            }
        }
        Ok(())
    }

    fn judge(&mut self, may: &mut dyn FnMut(&HostName) -> bool) -> Result<(), Refused> {
        while let Some(hello) = client_hello::parse(&self.crypto.whole()[self.judged..])? {
            if !may(&hello.name) {
                return Err(Refused::Name);
            }
            self.judged += hello.len;
        }
        Ok(())
    }

    /// Whether all that is there was judged, and something was.
    fn is_decided(&self) -> bool {
        self.judged > 0
            && self.judged == self.crypto.whole().len()
            && !self.crypto.has_out_of_order()
    }
}

#[cfg(test)]
#[path = "../quic_test.rs"]
mod tests;

#[cfg(test)]
#[path = "../quic_two_keys_test.rs"]
mod two_keys;
