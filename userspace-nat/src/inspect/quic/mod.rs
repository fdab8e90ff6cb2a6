//! QUIC: the client's Initial packets, whose keys anybody can make who sees the first (RFC 9001).
//!
//! # Theory of operation
//! A client may begin a connection by any datagram, also in a flow that carries one already: servers
//! tell connections apart by their ids. So every packet with a long header is looked at for as long
//! as the flow lives, and those with a short one pass: they belong to a connection that was begun,
//! or to none. That is why such a flow stays in the engine.
//!
//! | what a datagram has | what is done |
//! | --- | --- |
//! | only packets with short headers, or Handshake and 0-RTT | passes, once a connection was let in |
//! | an Initial of a connection that is not decided | held, until its ClientHello is whole |
//! | an Initial with a whole ClientHello, or more of one that was let in | judged; what was held goes on in its order |
//! | an Initial that can't be opened | dropped |
//! | an Initial that opens by the keys of two connections, more of them than a client sends | refused |
//! | what can't be taken apart, an unknown version | refused |
//!
//! The hello lies in CRYPTO frames, in any order over several packets. As the datagrams go on as
//! they came, a byte that comes again must be the same byte: else the flow is ended. After a
//! HelloRetryRequest another hello follows in the same stream, and is judged like the first.
use std::collections::HashMap;

use super::{HostName, Refused, client_hello, reassembly::Reassembly};
use crate::port::VirtioNetHdr;

mod keys;
mod packet;

pub use keys::{Keys, Version};
pub use packet::{Initial, crypto_frames, initials};

/// Connections of a flow that are known at once. One that is over is not told apart from one that
/// is not, so who begins more needs another flow.
const MAX_CONNECTIONS: usize = 16;
/// Most that a client says in Initial packets, bytes: two hellos.
const MAX_CRYPTO: usize = 2 * client_hello::MAX_LEN;
/// Initial packets in a datagram.
const MAX_INITIALS: usize = 8;
/// Frames held of a flow.
const MAX_FRAMES: usize = 16;

/// An inspected flow of QUIC.
#[derive(Debug, Default)]
pub struct Flow {
    connections: Vec<Connection>,
    /// Frames that wait for a decision, as they came.
    waiting: Vec<(VirtioNetHdr, Vec<u8>)>,
    /// A connection was let in.
    is_open: bool,
}

#[derive(Debug)]
struct Connection {
    /// The id that its keys are made of.
    original: Box<[u8]>,
    keys: HashMap<Version, Keys>,
    crypto: Reassembly,
    /// Of the stream, what was judged and let by.
    judged: usize,
}

/// What becomes of a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Passage {
    /// It goes on, behind what was held.
    Goes,
    /// It is held with the others.
    Held,
    /// It goes nowhere.
    Dropped,
}

impl Flow {
    /// Looks at a guest's datagram. `may` tells whether a server of this name may be spoken to.
    /// With [`Passage::Held`] the caller keeps its frame by [`Flow::hold`].
    pub fn datagram(
        &mut self,
        datagram: &[u8],
        may: &mut dyn FnMut(&HostName) -> bool,
    ) -> Result<Passage, Refused> {
        let initials = initials(datagram)?;
        if initials.is_empty() {
            return match self.is_open {
                true => Ok(Passage::Goes),
                false => Err(Refused::Unknown),
            };
        }
        if initials.len() > MAX_INITIALS {
            return Err(Refused::TooLong);
        }
        for initial in &initials {
            let Some((at, payload)) = self.open(initial)? else {
                // No server can open it, or all of them but us: a number past its field's end.
                return Ok(Passage::Dropped);
            };
            self.connections[at].take(&payload)?;
            self.connections[at].judge(may)?;
        }
        if self.is_undecided() {
            return Ok(Passage::Held);
        }
        self.is_open = true;
        Ok(Passage::Goes)
    }

    /// Keeps a frame that is held: from L3 on.
    pub fn hold(&mut self, vnet: VirtioNetHdr, l3: &[u8]) -> Result<(), Refused> {
        if self.waiting.len() >= MAX_FRAMES {
            return Err(Refused::TooLong);
        }
        self.waiting.push((vnet, l3.to_vec()));
        Ok(())
    }

    /// Whether more must be said of a connection before what is of it may go on.
    pub fn is_undecided(&self) -> bool {
        !self.connections.iter().all(Connection::is_decided)
    }

    /// Whether a connection was let in.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// What was held and may go on now, as it came.
    pub fn release(&mut self) -> Vec<(VirtioNetHdr, Vec<u8>)> {
        if self.is_undecided() {
            return Vec::new();
        }
        std::mem::take(&mut self.waiting)
    }

    /// What waits for a decision.
    pub fn waiting(&self) -> &[(VirtioNetHdr, Vec<u8>)] {
        &self.waiting
    }

    /// Memory held, bytes.
    pub fn held(&self) -> usize {
        let crypto = self.connections.iter().map(|c| c.crypto.held());
        let waiting = self.waiting.iter().map(|(_, l3)| l3.capacity());
        crypto.chain(waiting).sum()
    }

    /// The connection that an Initial is of, and its frames; `None`: nobody can open it. One that
    /// opens by the keys of two can be read in two ways: it is refused.
    fn open(&mut self, initial: &Initial<'_>) -> Result<Option<(usize, Vec<u8>)>, Refused> {
        let mut found = None;
        let mut is_new = true;
        for (at, connection) in self.connections.iter_mut().enumerate() {
            is_new &= *connection.original != *initial.destination;
            if let Some(payload) = initial.open(connection.keys(initial.version))
                && found.replace((at, payload)).is_some()
            {
                return Err(Refused::Malformed);
            }
        }
        if !is_new {
            return Ok(found);
        }
        let mut connection = Connection {
            original: initial.destination.into(),
            keys: HashMap::new(),
            crypto: Reassembly::new(0),
            judged: 0,
        };
        let Some(payload) = initial.open(connection.keys(initial.version)) else {
            return Ok(found);
        };
        if found.is_some() {
            return Err(Refused::Malformed);
        }
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err(Refused::Limit);
        }
        self.connections.push(connection);
        Ok(Some((self.connections.len() - 1, payload)))
    }
}

impl Connection {
    fn keys(&mut self, version: Version) -> &Keys {
        let original = &self.original;
        self.keys
            .entry(version)
            .or_insert_with(|| Keys::of_client(version, original))
    }

    /// Takes the frames of a packet in.
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
        self.judged > 0 && self.judged == self.crypto.whole().len() && !self.crypto.has_islands()
    }
}

#[cfg(test)]
#[path = "../quic_test.rs"]
mod tests;
