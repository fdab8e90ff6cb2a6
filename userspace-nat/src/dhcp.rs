//! DHCP server (RFC 2131, options RFC 2132) with one fixed address per VM.
//!
//! # Theory of operation
//! There is no pool and no stored lease: the address belongs to the VM for its whole life. So every
//! answer follows from the message and the VM's configuration alone.
//!
//! | message | recognized by | answer |
//! | --- | --- | --- |
//! | DISCOVER | | OFFER |
//! | REQUEST, SELECTING | server id and requested address | ACK; NAK for another address; nothing when it takes another server's offer |
//! | REQUEST, INIT-REBOOT | requested address | ACK; NAK for another |
//! | REQUEST, RENEWING or REBINDING | ciaddr | ACK; NAK for another |
//! | INFORM | ciaddr | ACK without lease |
//! | DECLINE, RELEASE | | none: the VM keeps the address |
//!
//! The destination of an answer follows RFC 2131 section 4.1. There are no relays on a guest's
//! link, so giaddr must be zero.
use std::net::{Ipv4Addr, SocketAddr};

use slipgate_abi::DropReason;
use smoltcp::wire::{
    ArpHardware, DHCP_CLIENT_PORT, DHCP_SERVER_PORT, DhcpFlags, DhcpMessageType, DhcpOpCode,
    DhcpOption, DhcpPacket, DhcpRepr, EthernetAddress,
};

use crate::{datagram::Datagram, stats::Tally, vm::VmNet};

/// Lease time in answers, seconds.
pub const LEASE_S: u32 = 86_400;
/// Renewal time (T1), seconds (RFC 2131 section 4.4.5).
pub const RENEW_S: u32 = LEASE_S / 2;
/// Rebinding time (T2), seconds (RFC 2131 section 4.4.5).
pub const REBIND_S: u32 = LEASE_S / 8 * 7;
/// Smallest BOOTP message, bytes (RFC 1542 section 2.1); some clients require it.
const MIN_LEN: usize = 300;
/// Magic cookie before the options (RFC 2131 section 3).
const MAGIC: u32 = 0x6382_5363;

/// Option codes that smoltcp has no name for (RFC 2132).
mod code {
    pub(super) const INTERFACE_MTU: u8 = 26;
    pub(super) const BROADCAST_ADDRESS: u8 = 28;
    pub(super) const REQUESTED_ADDRESS: u8 = 50;
    pub(super) const MESSAGE_TYPE: u8 = 53;
    pub(super) const SERVER_ID: u8 = 54;
    pub(super) const RENEWAL_TIME: u8 = 58;
    pub(super) const REBINDING_TIME: u8 = 59;
    pub(super) const CLIENT_ID: u8 = 61;
}

/// Result of a DHCP message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Reply as an IPv4 packet; `None` if none is due. A reply to 255.255.255.255 is sent by L2
    /// broadcast or to the guest's MAC.
    pub reply: Option<Vec<u8>>,
    /// MAC of the guest, if none is configured. It is for callers that keep it: the programs learn
    /// it by themselves, and a guest may return with another.
    pub guest_mac: Option<[u8; 6]>,
}

/// Answers a guest's IPv4 packet to UDP port 67.
///
/// # Errors
/// The drop reason to count if the message is malformed or comes from another MAC than the guest's.
pub fn handle(vm: &VmNet, packet: &[u8]) -> Result<Outcome, DropReason> {
    let datagram = Datagram::parse(packet).ok_or(DropReason::Malformed)?;
    if datagram.to.port() != DHCP_SERVER_PORT {
        return Err(DropReason::ServiceReject);
    }
    let message =
        DhcpPacket::new_checked(datagram.payload).map_err(|_| DropReason::ServiceReject)?;
    let request = Request::parse(&message).ok_or(DropReason::ServiceReject)?;
    if vm.guest_mac.is_some_and(|known| known != request.mac.0) {
        return Err(DropReason::Spoofed);
    }
    let answer = request.decide(vm)?;
    vm.stats.tally(Tally::DhcpMessage, 1);
    Ok(Outcome {
        reply: answer.map(|answer| request.reply(vm, answer)),
        guest_mac: vm.guest_mac.is_none().then_some(request.mac.0),
    })
}

/// A DHCP message from a client.
struct Request<'p> {
    kind: DhcpMessageType,
    xid: u32,
    broadcast: bool,
    mac: EthernetAddress,
    ciaddr: Ipv4Addr,
    requested: Option<Ipv4Addr>,
    server: Option<Ipv4Addr>,
    client_id: Option<&'p [u8]>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Offer,
    Ack,
    /// Answer to INFORM: configuration without a lease.
    Inform,
    Nak,
}

impl<'p> Request<'p> {
    fn parse(packet: &'p DhcpPacket<&'p [u8]>) -> Option<Self> {
        let mac = packet.client_hardware_address();
        let ethernet =
            packet.hardware_type() == ArpHardware::Ethernet && packet.hardware_len() == 6;
        let request = packet.opcode() == DhcpOpCode::Request && packet.magic_number() == MAGIC;
        let direct = packet.relay_agent_ip().is_unspecified();
        if !(ethernet && request && direct && mac.is_unicast()) || mac.0 == [0; 6] {
            return None;
        }
        let mut this = Self {
            kind: DhcpMessageType::Unknown(0),
            xid: packet.transaction_id(),
            broadcast: packet.flags().contains(DhcpFlags::BROADCAST),
            mac,
            ciaddr: packet.client_ip(),
            requested: None,
            server: None,
            client_id: None,
        };
        for DhcpOption { kind, data } in packet.options() {
            let address = || <[u8; 4]>::try_from(data).map(Ipv4Addr::from).ok();
            match kind {
                code::MESSAGE_TYPE => this.kind = DhcpMessageType::from(*data.first()?),
                code::REQUESTED_ADDRESS => this.requested = Some(address()?),
                code::SERVER_ID => this.server = Some(address()?),
                code::CLIENT_ID if !data.is_empty() => this.client_id = Some(data),
                _ => {}
            }
        }
        Some(this)
    }

    /// Decides the answer (RFC 2131 section 4.3); `None` if the message is not to be answered.
    fn decide(&self, vm: &VmNet) -> Result<Option<Answer>, DropReason> {
        let ack_if = |asked: Ipv4Addr| {
            Ok(Some(if asked == vm.guest {
                Answer::Ack
            } else {
                Answer::Nak
            }))
        };
        match self.kind {
            DhcpMessageType::Discover => Ok(Some(Answer::Offer)),
            DhcpMessageType::Request => match (self.server, self.requested) {
                (Some(server), _) if server != vm.gateway => Ok(None),
                (_, Some(asked)) if self.ciaddr.is_unspecified() => ack_if(asked),
                (None, None) if !self.ciaddr.is_unspecified() => ack_if(self.ciaddr),
                // Table 5 has no such message, yet clients send the server id when they renew.
                (Some(_), None) if !self.ciaddr.is_unspecified() => ack_if(self.ciaddr),
                _ => Err(DropReason::ServiceReject),
            },
            DhcpMessageType::Inform if self.ciaddr == vm.guest => Ok(Some(Answer::Inform)),
            DhcpMessageType::Decline | DhcpMessageType::Release => Ok(None),
            _ => Err(DropReason::ServiceReject),
        }
    }

    fn reply(&self, vm: &VmNet, answer: Answer) -> Vec<u8> {
        let configured = answer != Answer::Nak;
        let leased = matches!(answer, Answer::Offer | Answer::Ack);
        let mask = u32::MAX
            .checked_shl(32 - u32::from(vm.prefix_len.min(32)))
            .unwrap_or(0);
        let mtu = vm.mtu.to_be_bytes();
        let broadcast = (vm.guest.to_bits() | !mask).to_be_bytes();
        let (renew, rebind) = (RENEW_S.to_be_bytes(), REBIND_S.to_be_bytes());
        let mut options = Vec::new();
        let mut push = |kind, data| options.push(DhcpOption { kind, data });
        // RFC 6842: the client's id comes back, whatever its form.
        if let Some(id) = self.client_id {
            push(code::CLIENT_ID, id);
        }
        if leased {
            push(code::RENEWAL_TIME, &renew[..]);
            push(code::REBINDING_TIME, &rebind[..]);
        }
        if configured {
            push(code::BROADCAST_ADDRESS, &broadcast[..]);
            push(code::INTERFACE_MTU, &mtu[..]);
        }
        let to = self.destination(vm, answer);
        let message = DhcpRepr {
            message_type: match answer {
                Answer::Offer => DhcpMessageType::Offer,
                Answer::Ack | Answer::Inform => DhcpMessageType::Ack,
                Answer::Nak => DhcpMessageType::Nak,
            },
            transaction_id: self.xid,
            // Table 3: zero.
            secs: 0,
            client_hardware_address: self.mac,
            // Table 3: ciaddr comes back in an ACK only.
            client_ip: match answer {
                Answer::Ack | Answer::Inform => self.ciaddr,
                Answer::Offer | Answer::Nak => Ipv4Addr::UNSPECIFIED,
            },
            your_ip: if leased {
                vm.guest
            } else {
                Ipv4Addr::UNSPECIFIED
            },
            // siaddr is the next boot server: there is none.
            server_ip: Ipv4Addr::UNSPECIFIED,
            router: configured.then_some(vm.gateway),
            subnet_mask: configured.then(|| Ipv4Addr::from_bits(mask)),
            relay_agent_ip: Ipv4Addr::UNSPECIFIED,
            broadcast: self.broadcast,
            requested_ip: None,
            client_identifier: None,
            server_identifier: Some(vm.gateway),
            parameter_request_list: None,
            dns_servers: configured.then(|| [vm.dns].into_iter().collect()),
            max_size: None,
            lease_duration: leased.then_some(LEASE_S),
            renew_duration: None,
            rebind_duration: None,
            additional_options: &options,
        };
        let mut payload = vec![0; message.buffer_len().max(MIN_LEN)];
        let emitted = message.emit(&mut DhcpPacket::new_unchecked(&mut payload[..]));
        debug_assert!(emitted.is_ok(), "buffer_len() is enough for emit()");
        let from = SocketAddr::new(vm.gateway.into(), DHCP_SERVER_PORT);
        Datagram {
            from,
            to: SocketAddr::new(to.into(), DHCP_CLIENT_PORT),
            payload: &payload,
        }
        .emit()
    }

    /// Destination address of an answer (RFC 2131 section 4.1): ciaddr if set; broadcast for a NAK
    /// or on request; else the assigned address, with the client's MAC.
    fn destination(&self, vm: &VmNet, answer: Answer) -> Ipv4Addr {
        if answer == Answer::Nak {
            Ipv4Addr::BROADCAST
        } else if !self.ciaddr.is_unspecified() && answer != Answer::Offer {
            // ACK and INFORM go only where ciaddr is the guest's own.
            self.ciaddr
        } else if self.broadcast {
            Ipv4Addr::BROADCAST
        } else {
            vm.guest
        }
    }
}

#[cfg(test)]
#[path = "dhcp_test.rs"]
mod tests;
