//! A DHCP server for one client, on a kernel socket.

use std::net::{Ipv4Addr, UdpSocket};

use slipgate_testbed::NetNs;
use smoltcp::wire::{DhcpMessageType, DhcpOption, DhcpPacket, DhcpRepr};

use crate::served::Served;

/// Configuration that the server offers.
#[derive(Clone, Copy)]
pub(crate) struct Offer {
    pub(crate) address: Ipv4Addr,
    pub(crate) mask: Ipv4Addr,
    pub(crate) server: Ipv4Addr,
    pub(crate) mtu: Option<u16>,
}

/// DHCP server, which stops when dropped.
pub(crate) struct DhcpServer {
    _served: Served,
}

impl DhcpServer {
    /// Starts the server. Broadcasts need a route, which is set to `device`.
    pub(crate) fn start(ns: &NetNs, device: &str, offer: Offer) -> DhcpServer {
        let socket = ns.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 67)).unwrap());
        socket.set_broadcast(true).unwrap();
        ns.ip(&format!(
            "route replace broadcast 255.255.255.255 dev {device}"
        ))
        .unwrap();
        let answer = move |socket: &UdpSocket, request: &[u8]| {
            if let Some(answer) = answer(request, offer) {
                socket
                    .send_to(&answer, (Ipv4Addr::BROADCAST, 68))
                    .expect("broadcast an answer");
            }
        };
        DhcpServer {
            _served: Served::start(ns, "dhcp-server", socket, answer),
        }
    }
}

fn answer(request: &[u8], offer: Offer) -> Option<Vec<u8>> {
    let packet = DhcpPacket::new_checked(request).ok()?;
    let asked = DhcpRepr::parse(&packet).ok()?;
    let message_type = match asked.message_type {
        DhcpMessageType::Discover => DhcpMessageType::Offer,
        DhcpMessageType::Request => DhcpMessageType::Ack,
        _ => return None,
    };
    let mtu = offer.mtu.map(u16::to_be_bytes);
    let options: Vec<DhcpOption<'_>> = mtu
        .iter()
        .map(|mtu| DhcpOption {
            kind: 26,
            data: mtu,
        })
        .collect();
    let given = DhcpRepr {
        message_type,
        client_ip: Ipv4Addr::UNSPECIFIED,
        your_ip: offer.address,
        server_ip: offer.server,
        router: Some(offer.server),
        subnet_mask: Some(offer.mask),
        server_identifier: Some(offer.server),
        client_identifier: None,
        requested_ip: None,
        parameter_request_list: None,
        dns_servers: Some([offer.server].into_iter().collect()),
        max_size: None,
        lease_duration: Some(3600),
        additional_options: &options,
        ..asked
    };
    let mut bytes = vec![0; given.buffer_len()];
    given
        .emit(&mut DhcpPacket::new_unchecked(&mut bytes))
        .expect("emit a DHCP message");
    Some(bytes)
}
