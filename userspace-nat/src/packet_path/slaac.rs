//! Packets by which a guest configures its IPv6: neighbour discovery, addresses that are new,
//! DHCPv6; and advertisements that nobody asked for.
use std::net::{IpAddr, Ipv6Addr};

use slipgate_abi::DropReason;
use slipgate_model::GuestIpv6;

use super::{Disposition, Finish, done};
use crate::{
    datapath::Datapath,
    dhcpv6::{self, AddressUse},
    flow::is_paused,
    ndp::{
        self, Reply,
        addresses::{self, Bound},
        advertisement, wire,
    },
    packet::Packet,
    port::{ETHERTYPE_IPV6, VirtioNetHdr},
    state::{Core, VmState},
    stats::Tally,
    vm::VmNet,
};

/// Most advertisements in a turn of the loop that nobody asked for.
const ADVERTISEMENTS_PER_TURN: usize = 32;

impl<D: Datapath> Core<D> {
    /// Handles a message of neighbour discovery, or a report of a multicast listener, without
    /// Ethernet header.
    pub(super) fn neighbour_discovery(
        &mut self,
        vm: &mut VmState,
        packet: &[u8],
        now_ns: u64,
    ) -> Finish {
        let Some(net) = vm.net.ipv6 else {
            return Finish::Drop(DropReason::Ipv6);
        };
        let outcome = match ndp::handle(&vm.net, &net, packet) {
            Ok(outcome) => outcome,
            Err(reason) => return Finish::Drop(reason),
        };
        if let Some(address) = outcome.address
            && self.is_hosts(&net, address)
        {
            return Finish::Drop(DropReason::Spoofed);
        }
        if let Some(address) = outcome.address
            && self.bind(vm, address, now_ns) == Bound::Refused
        {
            return Finish::Drop(DropReason::AddressBound);
        }
        match outcome.reply {
            Reply::None => Finish::Dispose(Disposition::Consumed),
            Reply::Packet(reply) => done(self.send_to_guest(vm, &reply)),
            Reply::RouterAdvertisement(_) if !vm.advertisements.take(now_ns) => {
                Finish::Drop(DropReason::OverRate)
            }
            Reply::RouterAdvertisement(to) => done(self.advertise(vm, to)),
        }
    }

    /// Binds the source of a packet to the VM, if it may be the guest's.
    ///
    /// # Errors
    /// The reason for which the packet is counted as dropped: it may not, or too many are bound.
    pub(super) fn bind_source(
        &mut self,
        vm: &VmState,
        source: IpAddr,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let Some(net) = vm.net.ipv6 else {
            return Err(DropReason::Ipv6);
        };
        let address = match source {
            IpAddr::V6(address)
                if ndp::is_guests(&net, vm.net.gateway_mac, address)
                    && !self.is_hosts(&net, address) =>
            {
                address
            }
            _ => return Err(DropReason::Spoofed),
        };
        match self.bind(vm, address, now_ns) {
            Bound::Refused => Err(DropReason::AddressBound),
            Bound::Known | Bound::New | Bound::InPlaceOf(_) => Ok(()),
        }
    }

    /// Answers a packet to UDP port 547.
    pub(super) fn dhcpv6(&mut self, vm: &mut VmState, packet: &Packet<'_>, now_ns: u64) -> Finish {
        let Some(net) = vm.net.ipv6 else {
            return Finish::Drop(DropReason::Ipv6);
        };
        let single = net.single_address();
        let is_withheld = single.is_some_and(|address| self.is_hosts(&net, address));
        let answer = match dhcpv6::handle(&vm.net, &net, packet.ip.bytes, is_withheld) {
            Ok(answer) => answer,
            Err(reason) => return Finish::Drop(reason),
        };
        if let Err(reason) = self.bind_source(vm, packet.ip.source, now_ns) {
            return Finish::Drop(reason);
        }
        let Some(answer) = answer else {
            return Finish::Dispose(Disposition::Consumed);
        };
        match answer.address {
            AddressUse::Unchanged => {}
            // The world may ask for it before the guest has sent anything from it.
            AddressUse::Granted(address) => drop(self.bind(vm, address, now_ns)),
            AddressUse::Released(address) => {
                if let Some(row) = self.nat.datapath.vm6(vm.net.row) {
                    addresses::release(row, address);
                }
            }
        }
        let first = self.out.queue.len();
        let sent = self.send_to_guest(vm, &answer.packet);
        // As of DHCP.
        self.out.queue.are_unprompted_from(first);
        done(sent)
    }

    /// Begins or ends the advertisements of a VM's IPv6, as its description says. Of a network that
    /// ends, its guest is told by a last one.
    pub(crate) fn advertise_ipv6_of(&mut self, vm: &VmNet, now_ns: u64) {
        let before = self.vms.by_id(vm.id).and_then(|vm| vm.net.ipv6);
        if before != vm.ipv6 {
            self.advertisements.remove(vm.id);
            if let Some(ended) = before {
                let (packet, vnet) = (advertisement::end(vm, &ended), VirtioNetHdr::default());
                let out = &mut self.out.queue;
                // If the outbox has no room, the guest finds out by refused packets.
                let _ = out.to_guest(vm, ETHERTYPE_IPV6, vnet, &packet);
            }
        }
        if vm.ipv6.is_some() {
            self.advertisements.add(vm.id, now_ns);
        }
    }

    /// Sends advertisements that are due, as far as a turn's share and the outbox go. A VM that is
    /// frozen or sleeps gets its next one later. Returns whether all were sent.
    pub(crate) fn work_advertisements(&mut self, now_ns: u64) -> bool {
        for _ in 0..ADVERTISEMENTS_PER_TURN {
            if self.out.queue.is_half_full() {
                return false;
            }
            let Some(id) = self.advertisements.take(now_ns) else {
                return true;
            };
            let Some(vm) = self.vms.take_by_id(id) else {
                self.advertisements.remove(id);
                continue;
            };
            if !is_paused(&self.nat.datapath, vm.net.row) {
                // If the outbox has no room, the next one comes.
                let _ = self.advertise(&vm, wire::ALL_NODES);
            }
            self.vms.put(vm);
        }
        false
    }

    fn advertise(&mut self, vm: &VmState, to: Ipv6Addr) -> Result<(), DropReason> {
        let Some(net) = vm.net.ipv6 else {
            return Ok(());
        };
        let packet = advertisement::build(&vm.net, &net, to);
        self.send_to_guest(vm, &packet)?;
        vm.net.stats.tally(Tally::RouterAdvertisement, 1);
        Ok(())
    }

    /// Whether an address of a prefix that is routed to a VM is the host's all the same: it may have
    /// got it since the VM came.
    fn is_hosts(&self, net: &GuestIpv6, address: Ipv6Addr) -> bool {
        net.is_routed && self.nat.network.routes.is_host(address)
    }

    fn bind(&self, vm: &VmState, address: Ipv6Addr, now_ns: u64) -> Bound {
        match self.nat.datapath.vm6(vm.net.row) {
            Some(row) => addresses::bind(row, address, now_ns),
            None => Bound::Refused,
        }
    }

    fn send_to_guest(&mut self, vm: &VmState, packet: &[u8]) -> Result<(), DropReason> {
        let vnet = VirtioNetHdr::default();
        let queued = self
            .out
            .queue
            .to_guest(&vm.net, ETHERTYPE_IPV6, vnet, packet);
        queued.map_err(|_| DropReason::EngineBusy)
    }
}
