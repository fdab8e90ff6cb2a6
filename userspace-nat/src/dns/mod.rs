//! DNS: a forwarding proxy with a cache.
//!
//! # Theory of operation
//! Every packet of a guest to port 53, whatever resolver it asks, comes here; the reply comes from
//! the address that was asked. [`Proxy::query`] takes a question, from a datagram ([`datagram`]) or
//! from a TCP connection that the relay ends. It is answered from the [`cache`], or joins an equal
//! question in flight, or goes to the resolvers of the VM's policy; [`Proxy::next_reply`] hands out what is
//! ready. The sockets are the engine's to wait on: they are added to its [`crate::poll::Poller`],
//! which calls [`Proxy::on_ready`] and, at [`Proxy::next_deadline_ns`], [`Proxy::on_timer`]. No
//! call waits.
//!
//! The query that goes upstream is built anew, from what the cache key holds: the guest's id, port,
//! case and EDNS options stay here. What comes back is taken only from the resolver asked, to the
//! port asked from, under the random id, for the question asked (RFC 5452 section 9).
//!
//! Not served: updates, transfers and signed messages (NOTIMP). EDNS itself is passed through (its
//! presence and DO), its options are not: an OPT is between neighbours and is neither forwarded nor
//! cached (RFC 6891 section 6.1.1). So cookies and client subnet end here.
//!
//! The cache is common to the VMs of one policy ([`Telling::view`]). A VM can tell by the time of an
//! answer that another of them asked the same before; it can't displace more than its share
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
pub use resolvers::{DNS_PORT, ResolverError, Resolvers, parse_resolv_conf, parse_resolver};

/// Descriptors that the proxy's sockets take at most, under the given limits.
pub const fn max_descriptors(limits: &Limits) -> usize {
    limits.exchanges * exchange::MAX_SOCKETS
}
