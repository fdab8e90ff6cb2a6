//! DNS: a forwarding proxy with a cache.
//!
//! # Theory of operation
//! The proxy receives every packet of a guest to port 53, whatever resolver it addresses; the reply
//! has that address as source. [`Proxy::query`] takes a question, from a datagram ([`datagram`]) or
//! from a TCP connection that the relay terminates. It is answered from the [`cache`], or joins an
//! equal question in flight, or goes to the resolvers of the VM's policy. [`Proxy::next_reply`]
//! returns the replies that are ready. The engine waits on the sockets: they are added to its
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
//! The VMs of one policy share cached answers ([`Telling::view`]). A VM can infer from the time of
//! an answer that another of them asked the same before. It cannot evict more than its share
//! ([`cache`]).

pub mod answer;
#[cfg(test)]
mod by_rules_test;
pub mod cache;
pub mod chain;
pub mod datagram;
mod exchange;
#[cfg(test)]
mod hickory;
mod in_flight;
mod journal;
pub mod message;
pub mod name;
pub mod policy;
mod proxy;
pub mod query;
pub mod reply;
pub mod resolvers;
#[cfg(test)]
mod rig;
mod scrub;
mod upstream;

pub use name::Name;
pub use policy::{AllowAll, ExtendedError, NamePolicy, NameVerdict, Telling};
pub use proxy::{Limits, Origin, Proxy, Reply};
pub use resolvers::{DNS_PORT, Resolvers};

/// Most file descriptors that the proxy's sockets use under these limits.
pub const fn max_descriptors(limits: &Limits) -> usize {
    limits.exchanges * exchange::MAX_SOCKETS
}
