//! DNS: a forwarding proxy with a cache.
//!
//! # Theory of operation
//! The proxy receives every packet of a guest to port 53, whatever resolver it addresses; the reply
//! has that address as source. [`Proxy::query`] takes a question, from a datagram ([`Proxy::query_packet`]) or
//! from a TCP connection that the relay terminates. It is answered from the [`cache`], or joins an
//! equal question in flight, or goes to the resolvers of the VM's policy; AAAA is answered empty
//! for guests that reach nothing by IPv6 ([`no_ipv6`]). [`Proxy::next_reply`] returns the replies that are ready. The engine waits on the sockets: they are added to its
//! [`crate::poll::Poller`], which calls [`Proxy::on_ready`] and, at [`Proxy::next_deadline_ns`],
//! [`Proxy::on_timer`]. No call blocks.
//!
//! The upstream query is built from the cache key alone: the guest's id, port, case and EDNS
//! options are not sent. An answer is accepted only from the resolver asked, to the port asked
//! from, under the random id, for the question asked (RFC 5452 section 9).
//!
//! Updates, transfers and signed messages are not supported (NOTIMP). The presence of EDNS and its
//! DO bit are passed through. EDNS options are not: an OPT is valid for one hop, and is neither
//! forwarded nor cached (RFC 6891 section 6.1.1). So cookies and client subnet are not forwarded.
//!
//! The VMs of one policy share cached answers ([`AnswerPolicy::view`]). A VM can infer from the time of
//! an answer that another of them asked the same before. It cannot evict more than its share
//! ([`cache`]).
use std::net::SocketAddr;

use slipgate_abi::DropReason;

use crate::{
    datagram::{Datagram, is_unicast},
    poll::Poller,
};

pub mod answer;
pub mod cache;
pub mod chain;
mod exchange;
mod in_flight;
mod journal;
pub mod message;
pub mod name;
mod no_ipv6;
pub mod policy;
mod proxy;
pub mod query;
pub mod reply;
pub mod resolvers;
mod scrub;
#[cfg(test)]
mod tests;
mod upstream;

pub use name::Name;
pub use policy::{AllowAll, AnswerPolicy, ExtendedError, NamePolicy, NameVerdict};
pub use proxy::{Guest, Limits, Origin, Proxy, Reply};
pub use resolvers::{DNS_PORT, Resolvers};
pub use upstream::{AsTheHost, Way, Ways};

impl Proxy {
    /// Processes a guest's packet to port 53, as [`Proxy::query`] does for a message. The source of an
    /// IPv6 packet is one that is bound to the guest.
    ///
    /// # Errors
    /// The drop reason to count if there will be no reply.
    pub fn query_packet(
        &mut self,
        guest: Guest<'_>,
        packet: &[u8],
        poller: &Poller,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let datagram = Datagram::parse(packet).ok_or(DropReason::Malformed)?;
        if datagram.from.is_ipv4() && datagram.from.ip() != guest.vm.guest {
            return Err(DropReason::Spoofed);
        }
        if datagram.to.port() != DNS_PORT || datagram.from.port() == 0 {
            return Err(DropReason::ServiceReject);
        }
        if !is_unicast(datagram.to.ip()) {
            return Err(DropReason::Group);
        }
        let origin = Origin::Udp {
            guest: datagram.from,
            server: datagram.to.ip(),
        };
        self.query(guest, origin, datagram.payload, poller, now_ns)
    }
}

impl Reply {
    /// The reply as a packet to the guest; `None` if the query came over TCP.
    pub fn to_packet(&self) -> Option<Vec<u8>> {
        let Origin::Udp { guest, server } = self.origin else {
            return None;
        };
        let datagram = Datagram {
            from: SocketAddr::new(server, DNS_PORT),
            to: guest,
            payload: &self.message,
        };
        Some(datagram.emit())
    }
}
