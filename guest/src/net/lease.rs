//! The guest's network configuration: a DHCP lease (RFC 2131), or the command line's static
//! address; and beside it what a router advertises by IPv6.

use alloc::{boxed::Box, vec, vec::Vec};
use core::net::Ipv4Addr;

use smoltcp::{
    socket::dhcpv4::{Event, RetryConfig, Socket},
    time::Duration,
    wire::DhcpPacket,
};

use super::{
    ipv6::Ipv6Lease,
    stack::{Stack, Turn},
};
use crate::{
    command::StaticAddress,
    platform::{Nic, Platform},
};

/// Network configuration of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Address of the guest.
    pub address: Ipv4Addr,
    /// Prefix length of the guest's network, bits.
    pub prefix: u8,
    /// Default router; `None` without one.
    pub router: Option<Ipv4Addr>,
    /// Addresses of the resolvers.
    pub dns: Vec<Ipv4Addr>,
    /// Largest IP packet in bytes (option 26); `None` if the server does not give it.
    pub mtu: Option<u16>,
    /// DHCP server that gave the lease; `None` for a static address.
    pub server: Option<Ipv4Addr>,
    /// Address and router by IPv6; `None` until a workload needs them.
    pub ipv6: Option<Ipv6Lease>,
}

impl From<StaticAddress> for Lease {
    fn from(given: StaticAddress) -> Self {
        Lease {
            address: given.address,
            prefix: given.prefix,
            router: Some(given.router),
            dns: given.dns.into_iter().collect(),
            mtu: None,
            server: None,
            ipv6: None,
        }
    }
}

/// Requested options (RFC 2132): subnet mask, router, resolvers, MTU.
const OPTIONS: &[u8] = &[1, 3, 6, OPTION_MTU];
const OPTION_MTU: u8 = 26;
/// Least MTU that RFC 2132, 5.1, allows.
const MTU_MIN: u16 = 68;
/// Time after which an unanswered message is sent again.
const RETRY: Duration = Duration::from_millis(500);

/// Takes a lease and configures the stack with it. Returns `None` if no server answers until
/// `deadline_ns`. The lease is renewed for as long as the stack is driven.
pub fn acquire<P: Platform, N: Nic>(
    stack: &mut Stack<'_, P, N>,
    deadline_ns: u64,
) -> Option<Lease> {
    let mut socket = Socket::new();
    let mut retry = RetryConfig::default();
    retry.discover_timeout = RETRY;
    retry.initial_request_timeout = RETRY;
    socket.set_retry_config(retry);
    socket.set_parameter_request_list(OPTIONS);
    // The socket is never removed.
    socket.set_receive_packet_buffer(Box::leak(vec![0; 1500].into_boxed_slice()));
    let handle = stack.sockets.add(socket);
    let lease = stack.drive(|stack| {
        if let Some(Event::Configured(config)) = stack.sockets.get_mut::<Socket>(handle).poll() {
            return Turn::Done(Some(Lease {
                address: config.address.address(),
                prefix: config.address.prefix_len(),
                router: config.router,
                dns: config.dns_servers.iter().copied().collect(),
                mtu: config.packet.as_ref().and_then(mtu),
                server: Some(config.server.identifier),
                ipv6: None,
            }));
        }
        match stack.now_ns() {
            now_ns if now_ns >= deadline_ns => Turn::Done(None),
            _ => Turn::Waiting(Some(deadline_ns)),
        }
    })?;
    stack.configure(&lease);
    Some(lease)
}

fn mtu(packet: &DhcpPacket<&[u8]>) -> Option<u16> {
    let option = packet.options().find(|option| option.kind == OPTION_MTU)?;
    let mtu = u16::from_be_bytes(option.data.try_into().ok()?);
    (mtu >= MTU_MIN).then_some(mtu)
}
