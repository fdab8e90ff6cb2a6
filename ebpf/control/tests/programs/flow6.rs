//! IPv6 of the VM under test: its addresses, and its flows.
use std::net::Ipv6Addr;

use aya::maps::HashMap;
use slipgate_abi::{
    Addresses6, Addresses6Ref, FlowRef, Ip6, Protocol, SlotRef, Tuple6, Vm6, slot::SlotFlags,
    vm6::Vm6Flags,
};

use crate::datapath::*;

pub(crate) const PREFIX: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 0);
pub(crate) const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 1);
pub(crate) const GATEWAY_LOCAL: Ipv6Addr =
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5055, 0xaff, 0xfe00, 0x202);
pub(crate) const GUEST6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0x5054, 0xff, 0xfe01, 0x203);
pub(crate) const GUEST_LOCAL: Ipv6Addr =
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0xff, 0xfe01, 0x203);
/// Of the guest's prefix, but not bound to it.
pub(crate) const UNBOUND: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 7, 7, 7, 7);
pub(crate) const NAT6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 9);
/// Remote address. A test run takes a bare packet's EtherType from the bytes at 12 to 14 of it.
pub(crate) const REMOTE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x86dd, 0, 0, 0, 0, 0x53);

/// A row of `VMS6` for the VM under test: two addresses are bound.
pub(crate) fn vm6() -> Vm6 {
    let mut row = Vm6 {
        flags: Vm6Flags::ON,
        prefix: PREFIX.into(),
        gateway: GATEWAY6.into(),
        gateway_local: GATEWAY_LOCAL.into(),
        ..Vm6::OFF
    };
    row.guests[0] = GUEST_LOCAL.into();
    row.guests[3] = GUEST6.into();
    row
}

/// An IPv6 flow of the VM under test.
pub(crate) fn flow6(protocol: Protocol) -> Flow {
    Flow {
        remote_port: if protocol.is_icmp() { 0 } else { 443 },
        flags: SlotFlags::IPV6,
        ..Flow::new(protocol)
    }
}

impl Loaded {
    pub(crate) fn flows6(&mut self) -> HashMap<&mut aya::maps::MapData, Tuple6, FlowRef> {
        HashMap::try_from(self.ebpf.map_mut("FLOWS6").unwrap()).expect("FLOWS6")
    }

    /// Fills the slot and the addresses of an IPv6 flow, without tuples.
    pub(crate) fn fill6(&mut self, flow: Flow) -> (SlotRef, Addresses6Ref) {
        let generation = self.slots.get(flow.slot).generation + 1;
        let slot = self.fill(flow, generation);
        self.slots.change(flow.slot, |slot| {
            slot.guest = slipgate_abi::Ip4::UNSPECIFIED;
            slot.remote = slipgate_abi::Ip4::UNSPECIFIED;
            slot.nat = slipgate_abi::Ip4::UNSPECIFIED;
        });
        self.addresses6.set(
            flow.slot,
            Addresses6 {
                guest: GUEST6.into(),
                remote: REMOTE6.into(),
                nat: NAT6.into(),
                pad: [0; 16],
            },
        );
        // SAFETY: the mapping lives as long as the datapath, and tests keep it until their end.
        let addresses = unsafe { Addresses6Ref::new(self.addresses6.at(flow.slot)) };
        (slot, addresses)
    }

    /// Puts an IPv6 flow into its slot, its addresses beside it, and both tuples into `FLOWS6`.
    pub(crate) fn admit6(&mut self, flow: Flow) -> SlotRef {
        let (slot, addresses) = self.fill6(flow);
        let entry = FlowRef {
            slot: flow.slot,
            generation: self.slots.get(flow.slot).generation,
        };
        let mut flows = self.flows6();
        let tuples = [addresses.world_tuple(slot), addresses.guest_tuple(slot)];
        for tuple in tuples {
            flows.insert(tuple, entry, 1).expect("insert FLOWS6");
        }
        slot
    }

    /// Addresses bound to the guest.
    pub(crate) fn bind6(&self, place: usize, address: Ipv6Addr) {
        self.vms6
            .change(ROW, |row| row.guests[place] = Ip6::from(address));
    }
}
