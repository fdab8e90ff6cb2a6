//! A DHCP client (RFC 2131): DISCOVER, OFFER, REQUEST, ACK, and renewal.
//!
//! It sends and receives on a packet socket, because a host without an address can't take the
//! unicast answer that a server may send when the broadcast flag is clear (RFC 2131, 4.1).

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use smoltcp::wire::{DhcpMessageType, DhcpOption, DhcpPacket, DhcpRepr, EthernetAddress};

use crate::{
    error::{Error, Result, Tried, checked_len},
    frame::{FrameBuilder, Mac, Packet},
    netns::NetNs,
    sockets,
};

const OPTION_MTU: u8 = 26;
const RETRANSMIT: Duration = Duration::from_millis(500);

/// Lease that a DHCP server granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Address of the guest.
    pub address: Ipv4Addr,
    /// Prefix length of the mask.
    pub prefix: u8,
    /// Address of the default gateway.
    pub router: Option<Ipv4Addr>,
    /// Name servers, in order.
    pub dns: Vec<Ipv4Addr>,
    /// MTU in bytes (option 26).
    pub mtu: Option<u16>,
    /// Time for which the lease is granted.
    pub duration: Duration,
    /// The server's identifier (option 54).
    pub server: Ipv4Addr,
    /// Time from the first DISCOVER to the ACK.
    pub took: Duration,
}

/// Takes a lease on `device` in `ns`, retransmitting until `timeout`.
///
/// # Errors
/// No lease came within `timeout`, or the packet socket fails.
pub fn acquire(ns: &NetNs, device: &str, mac: Mac, timeout: Duration) -> Result<Lease> {
    let started = Instant::now();
    let client = Client::open(ns, device, mac)?;
    let offer = client.ask(DhcpMessageType::Discover, None, started + timeout)?;
    let ack = client.ask(DhcpMessageType::Request, Some(&offer), started + timeout)?;
    Ok(Lease {
        took: started.elapsed(),
        ..ack
    })
}

/// Requests the same address again, as a renewing client does (broadcast, `ciaddr` filled).
///
/// # Errors
/// No acknowledgement came within the time limit, or the packet socket fails.
pub fn renew(
    ns: &NetNs,
    device: &str,
    mac: Mac,
    lease: &Lease,
    timeout: Duration,
) -> Result<Lease> {
    let started = Instant::now();
    // The guest's own stack sees the answer too, and would say "port unreachable".
    let _port = ns
        .run(|| std::net::UdpSocket::bind("0.0.0.0:68"))
        .tried("bind the DHCP client's port")?;
    let mut client = Client::open(ns, device, mac)?;
    client.address = lease.address;
    let ack = client.ask(DhcpMessageType::Request, Some(lease), started + timeout)?;
    Ok(Lease {
        took: started.elapsed(),
        ..ack
    })
}

/// Configures `device` with the lease's address, route and MTU, in place of its former ones.
///
/// # Errors
/// The kernel refuses a setting.
pub fn apply(ns: &NetNs, device: &str, lease: &Lease) -> Result<()> {
    if let Some(mtu) = lease.mtu {
        ns.ip(&format!("link set {device} mtu {mtu}"))?;
    }
    ns.ip(&format!(
        "addr replace {}/{} dev {device}",
        lease.address, lease.prefix
    ))?;
    if let Some(router) = lease.router {
        ns.ip(&format!("route replace default via {router} dev {device}"))?;
    }
    Ok(())
}

struct Client {
    socket: OwnedFd,
    ifindex: u32,
    mac: Mac,
    transaction: u32,
    /// The address it already has, when renewing; else 0.0.0.0.
    address: Ipv4Addr,
    device: String,
}

impl Client {
    fn open(ns: &NetNs, device: &str, mac: Mac) -> Result<Client> {
        let missing = || Error::unexpected(format!("DHCP on `{device}`: there is no such device"));
        let ifindex = ns.ifindex(device).ok_or_else(missing)?;
        let socket = ns.run(|| sockets::packet(libc::SOCK_DGRAM, libc::ETH_P_IP as u16));
        let socket = socket.tried("open a packet socket for DHCP")?;
        // Unique enough to tell parallel guests apart: the time in nanoseconds and the descriptor.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let transaction =
            now.unwrap_or_default().subsec_nanos() ^ (socket.as_raw_fd() as u32) << 24;
        let (address, device) = (Ipv4Addr::UNSPECIFIED, device.to_owned());
        Ok(Client {
            socket,
            ifindex,
            mac,
            transaction,
            address,
            device,
        })
    }

    /// Sends `kind` until an answer of the fitting type comes.
    fn ask(&self, kind: DhcpMessageType, have: Option<&Lease>, deadline: Instant) -> Result<Lease> {
        let wanted = match kind {
            DhcpMessageType::Discover => DhcpMessageType::Offer,
            _ => DhcpMessageType::Ack,
        };
        let message = self.message(kind, have);
        while Instant::now() < deadline {
            self.send(&message)
                .tried(format!("send a DHCP {kind:?} on `{}`", self.device))?;
            let next = deadline.min(Instant::now() + RETRANSMIT);
            while let Some((got, lease)) = self.receive(next)? {
                if got == wanted {
                    return Ok(lease);
                }
                if got == DhcpMessageType::Nak {
                    return Err(Error::unexpected(format!(
                        "the DHCP server refused ({kind:?}: NAK)"
                    )));
                }
            }
        }
        Err(Error::unexpected(format!(
            "no DHCP answer to {kind:?} on `{}` in time",
            self.device
        )))
    }

    fn message(&self, kind: DhcpMessageType, have: Option<&Lease>) -> Vec<u8> {
        let renewing = !self.address.is_unspecified();
        let options = [DhcpOption {
            kind: 12,
            data: b"testbed",
        }];
        let repr = DhcpRepr {
            message_type: kind,
            transaction_id: self.transaction,
            secs: 0,
            client_hardware_address: EthernetAddress(self.mac),
            client_ip: self.address,
            your_ip: Ipv4Addr::UNSPECIFIED,
            server_ip: Ipv4Addr::UNSPECIFIED,
            router: None,
            subnet_mask: None,
            relay_agent_ip: Ipv4Addr::UNSPECIFIED,
            broadcast: false,
            // A renewing client leaves both out (RFC 2131, 4.3.2).
            requested_ip: have.filter(|_| !renewing).map(|lease| lease.address),
            client_identifier: Some(EthernetAddress(self.mac)),
            server_identifier: have.filter(|_| !renewing).map(|lease| lease.server),
            parameter_request_list: Some(&[1, 3, 6, OPTION_MTU, 51]),
            dns_servers: None,
            max_size: Some(1500),
            lease_duration: None,
            renew_duration: None,
            rebind_duration: None,
            additional_options: &options,
        };
        let mut bytes = vec![0; repr.buffer_len()];
        repr.emit(&mut DhcpPacket::new_unchecked(&mut bytes))
            .expect("the buffer has its length");
        let source = std::net::SocketAddrV4::new(self.address, 68);
        FrameBuilder::udp(source, "255.255.255.255:67")
            .payload(&bytes)
            .build_ip()
    }

    fn send(&self, packet: &[u8]) -> io::Result<usize> {
        let mut to = sockets::link(self.ifindex, libc::ETH_P_IP as u16);
        to.sll_halen = 6;
        to.sll_addr[..6].copy_from_slice(&crate::frame::BROADCAST);
        let len = size_of_val(&to) as libc::socklen_t;
        // SAFETY: packet and address are readable for the lengths given.
        checked_len(unsafe {
            libc::sendto(
                self.socket.as_raw_fd(),
                packet.as_ptr().cast(),
                packet.len(),
                0,
                (&raw const to).cast(),
                len,
            )
        })
    }

    fn receive(&self, deadline: Instant) -> Result<Option<(DhcpMessageType, Lease)>> {
        let mut buffer = [0u8; 2048];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let ready = sockets::poll(&self.socket, libc::POLLIN, left.as_millis() as i32);
            if ready.tried("wait for a DHCP answer")? == 0 {
                return Ok(None);
            }
            // SAFETY: the buffer is writable for its length.
            let len = checked_len(unsafe {
                libc::recv(
                    self.socket.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    0,
                )
            })
            .tried("receive a DHCP answer")?;
            if let Some(answer) = self.parse(&buffer[..len]) {
                return Ok(Some(answer));
            }
        }
    }

    fn parse(&self, ip: &[u8]) -> Option<(DhcpMessageType, Lease)> {
        let packet = Packet::parse_ip(ip)?;
        if (packet.protocol, packet.destination.port()) != (17, 68) {
            return None;
        }
        let message = DhcpPacket::new_checked(packet.payload()).ok()?;
        let repr = DhcpRepr::parse(&message).ok()?;
        if repr.transaction_id != self.transaction {
            return None;
        }
        let mtu = message.options().find(|option| option.kind == OPTION_MTU);
        let lease = Lease {
            address: repr.your_ip,
            prefix: repr
                .subnet_mask
                .map_or(32, |mask| mask.to_bits().leading_ones() as u8),
            router: repr.router,
            dns: repr
                .dns_servers
                .map(|list| list.iter().copied().collect())
                .unwrap_or_default(),
            mtu: mtu.and_then(|option| Some(u16::from_be_bytes(option.data.try_into().ok()?))),
            duration: Duration::from_secs(repr.lease_duration.unwrap_or(0).into()),
            server: repr.server_identifier.unwrap_or(repr.server_ip),
            took: Duration::ZERO,
        };
        Some((repr.message_type, lease))
    }
}
