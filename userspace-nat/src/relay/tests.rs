//! The relay between real sockets on loopback and a second TCP stack that is the guest, over a
//! link that may lose, duplicate and reorder. The clock is the tests' own.

mod beside;
mod datagrams;
mod dns;
mod exchanges;
mod guest;
mod host_sockets;
mod ipv6;
mod live;
mod loopback;
mod many;
mod many_flows;
mod namespace;
mod single;
mod spliced;
mod streams;
mod turns;
mod world;
