//! Forwarded UDP: one socket of the host, and a port of the gateway for each client.
//!
//! A client's first datagram is assigned a port of the gateway toward the guest, by which the
//! guest's answers are matched to the client. The association ends after the idle timeout of a UDP
//! flow (RFC 4787 REQ-5). The host's socket may be bound to any address: an answer has the address
//! that the client used as source (`IP_PKTINFO`,
//! `IPV6_PKTINFO`).
use std::{
    collections::HashMap,
    io::{self, IoSlice, IoSliceMut},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::AsRawFd,
};

use slipgate_abi::VmId;

use nix::{
    libc,
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg,
        setsockopt, sockopt,
    },
};

use super::Target;
use crate::{inet, record::RelayedFlow};

/// Socket of a forwarded UDP port.
#[derive(Debug)]
pub(super) struct DatagramSocket {
    socket: UdpSocket,
    pub(super) target: Target,
}

/// A client of a forwarded port, and the host's address that it uses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Client {
    /// Key of the [`DatagramSocket`] in the relay.
    pub(super) socket: u32,
    pub(super) addr: SocketAddr,
    pub(super) host: IpAddr,
    /// Interface by which it came, for an address of the host that has a meaning on a link only; else 0.
    pub(super) ifindex: u32,
}

/// A client and its port toward the guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Association {
    pub(super) client: Client,
    pub(super) guest: SocketAddr,
    pub(super) active_ns: u64,
    pub(super) flow: RelayedFlow,
}

impl DatagramSocket {
    pub(super) fn new(socket: UdpSocket, target: Target) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        match socket.local_addr()? {
            SocketAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?,
            SocketAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?,
        }
        Ok(Self { socket, target })
    }

    pub(super) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// Receives one datagram. Returns its length and the client; `key` is the socket's. `None` for an
    /// error of an earlier datagram (a client that is gone), or a datagram without source.
    pub(super) fn receive(
        &self,
        key: u32,
        buffer: &mut [u8],
    ) -> io::Result<Option<(usize, Client)>> {
        // It is the longer of the two.
        let mut space = nix::cmsg_space!(libc::in6_pktinfo);
        let mut parts = [IoSliceMut::new(buffer)];
        let received = recvmsg::<SockaddrStorage>(
            self.socket.as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_DONTWAIT,
        );
        let received = match received {
            Ok(received) => received,
            Err(nix::Error::ECONNREFUSED) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let host = received.cmsgs()?.find_map(|message| match message {
            ControlMessageOwned::Ipv4PacketInfo(info) => {
                let host = Ipv4Addr::from_bits(u32::from_be(info.ipi_spec_dst.s_addr));
                Some((IpAddr::from(host), 0))
            }
            ControlMessageOwned::Ipv6PacketInfo(info) => {
                let host = Ipv6Addr::from(info.ipi6_addr.s6_addr);
                let ifindex = host.is_unicast_link_local().then_some(info.ipi6_ifindex);
                Some((IpAddr::from(host), ifindex.unwrap_or(0)))
            }
            _ => None,
        });
        let addr = received.address.as_ref().and_then(inet::address_of);
        Ok(addr.zip(host).map(|(addr, (host, ifindex))| {
            let client = Client {
                socket: key,
                addr,
                host,
                ifindex,
            };
            (received.bytes, client)
        }))
    }

    /// Sends an answer to a client. If the socket buffer is full the datagram is lost, as on a
    /// link.
    pub(super) fn send(&self, client: &Client, payload: &[u8]) -> io::Result<()> {
        let (info4, info6);
        let info = match client.host {
            IpAddr::V4(host) => {
                info4 = libc::in_pktinfo {
                    ipi_ifindex: 0,
                    ipi_spec_dst: libc::in_addr {
                        s_addr: host.to_bits().to_be(),
                    },
                    ipi_addr: libc::in_addr { s_addr: 0 },
                };
                ControlMessage::Ipv4PacketInfo(&info4)
            }
            IpAddr::V6(host) => {
                info6 = libc::in6_pktinfo {
                    ipi6_addr: libc::in6_addr {
                        s6_addr: host.octets(),
                    },
                    ipi6_ifindex: client.ifindex,
                };
                ControlMessage::Ipv6PacketInfo(&info6)
            }
        };
        sendmsg(
            self.socket.as_raw_fd(),
            &[IoSlice::new(payload)],
            &[info],
            MsgFlags::MSG_DONTWAIT,
            Some(&SockaddrStorage::from(client.addr)),
        )?;
        Ok(())
    }
}

/// All associations, indexed for datagrams from either side.
#[derive(Debug, Default)]
pub(super) struct Associations {
    /// Association by VM id and port of the gateway.
    by_port: HashMap<(VmId, u16), Association>,
    by_client: HashMap<Client, u16>,
}

impl Associations {
    pub(super) fn port_of(&self, client: &Client) -> Option<u16> {
        self.by_client.get(client).copied()
    }

    pub(super) fn has_port(&self, vm: VmId, port: u16) -> bool {
        self.by_port.contains_key(&(vm, port))
    }

    pub(super) fn insert(&mut self, vm: VmId, port: u16, association: Association) {
        self.by_client.insert(association.client, port);
        self.by_port.insert((vm, port), association);
    }

    pub(super) fn get(&self, vm: VmId, port: u16) -> Option<&Association> {
        self.by_port.get(&(vm, port))
    }

    pub(super) fn get_mut(&mut self, vm: VmId, port: u16) -> Option<&mut Association> {
        self.by_port.get_mut(&(vm, port))
    }

    pub(super) fn remove(&mut self, vm: VmId, port: u16) -> Option<Association> {
        let association = self.by_port.remove(&(vm, port))?;
        self.by_client.remove(&association.client);
        Some(association)
    }

    /// Flows of all associations.
    pub(super) fn flows(&self) -> impl Iterator<Item = &RelayedFlow> {
        self.by_port.values().map(|association| &association.flow)
    }

    /// Removes and returns the associations that were silent since before `since_ns`.
    pub(super) fn expire(&mut self, since_ns: u64) -> Vec<Association> {
        let silent: Vec<(VmId, u16)> = self
            .by_port
            .iter()
            .filter(|(_, association)| association.active_ns < since_ns)
            .map(|(key, _)| *key)
            .collect();
        let silent = silent.into_iter();
        silent
            .filter_map(|(vm, port)| self.remove(vm, port))
            .collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_port.is_empty()
    }
}
