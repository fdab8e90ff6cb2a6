//! ARP (RFC 826): answers requests that the kernel did not answer.
//!
//! The guest has one neighbour, the gateway: a request for any address of its network is answered
//! with the gateway's MAC. Only a request for its own address is not answered, so that its probes
//! (RFC 5227) find the address free.
use std::net::Ipv4Addr;

use slipgate_abi::DropReason;
use smoltcp::wire::{ArpOperation, ArpPacket, ArpRepr, EthernetAddress};

use crate::{stats::Tally, vm::VmNet};

/// Result of an ARP packet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Reply without Ethernet header (EtherType 0x0806); `None` if none is due.
    pub reply: Option<Vec<u8>>,
    /// MAC of the guest, if none is configured. It is for callers that keep it: the programs learn
    /// it by themselves, and a guest may return with another.
    pub guest_mac: Option<[u8; 6]>,
}

/// Answers a guest's ARP packet, given without Ethernet header.
///
/// # Errors
/// The drop reason to count if the packet is malformed, has another sender than the guest, or must
/// not be answered.
pub fn handle(vm: &VmNet, packet: &[u8]) -> Result<Outcome, DropReason> {
    let (operation, mac, sender, target) = read(packet).ok_or(DropReason::Malformed)?;
    // RFC 5227 section 1.1: a probe comes from 0.0.0.0.
    let probe = sender == Ipv4Addr::UNSPECIFIED;
    let another = sender != vm.guest && !probe;
    if another || !mac.is_unicast() || vm.guest_mac.is_some_and(|known| known != mac.0) {
        return Err(DropReason::Spoofed);
    }
    let learned = vm.guest_mac.is_none().then_some(mac.0);
    // What the guest says to all (an announcement, or a probe for its own address) is heard and
    // not answered; so is a reply, nobody having asked.
    if target == vm.guest || operation != ArpOperation::Request {
        return Ok(Outcome {
            reply: None,
            guest_mac: learned,
        });
    }
    let ours = vm.is_ours(target) || vm.is_on_link(target) && is_host_of(vm, target);
    if !ours {
        return Err(DropReason::ServiceReject);
    }
    let reply = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: EthernetAddress(vm.gateway_mac),
        source_protocol_addr: target,
        target_hardware_addr: mac,
        target_protocol_addr: sender,
    };
    let mut out = vec![0; reply.buffer_len()];
    reply.emit(&mut ArpPacket::new_unchecked(&mut out));
    vm.stats.tally(Tally::ArpAnswer, 1);
    Ok(Outcome {
        reply: Some(out),
        guest_mac: learned,
    })
}

/// ARP request from the gateway for the guest's MAC, without Ethernet header.
pub fn request(vm: &VmNet) -> Vec<u8> {
    let request = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Request,
        source_hardware_addr: EthernetAddress(vm.gateway_mac),
        source_protocol_addr: vm.gateway,
        target_hardware_addr: EthernetAddress([0; 6]),
        target_protocol_addr: vm.guest,
    };
    let mut out = vec![0; request.buffer_len()];
    request.emit(&mut ArpPacket::new_unchecked(&mut out));
    out
}

fn read(packet: &[u8]) -> Option<(ArpOperation, EthernetAddress, Ipv4Addr, Ipv4Addr)> {
    match ArpRepr::parse(&ArpPacket::new_checked(packet).ok()?).ok()? {
        ArpRepr::EthernetIpv4 {
            operation,
            source_hardware_addr,
            source_protocol_addr,
            target_protocol_addr,
            ..
        } => Some((
            operation,
            source_hardware_addr,
            source_protocol_addr,
            target_protocol_addr,
        )),
        _ => None,
    }
}

/// Whether the address is neither the network's own address nor its broadcast address.
fn is_host_of(vm: &VmNet, address: Ipv4Addr) -> bool {
    let hosts = u32::MAX.checked_shr(u32::from(vm.prefix_len)).unwrap_or(0);
    let host = address.to_bits() & hosts;
    // RFC 3021: in a /31 both are hosts.
    hosts <= 1 || host != 0 && host != hosts
}

#[cfg(test)]
#[path = "arp_test.rs"]
mod tests;
