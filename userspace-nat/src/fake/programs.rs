//! The programs on the in-memory tables. Their decisions are in [`slipgate_abi::datapath`], the
//! same functions that the BPF programs run.
use slipgate_abi::{
    Command, DropReason, Handover, PortHeader,
    datapath::{
        engine_port, guest_egress, handover, ipv4::V4, ipv6::V6, packet::ETHERNET_LEN,
        uplink_ingress,
    },
    portframe::PortFlags,
};

use super::{Kernel, segmentation::segments};
use crate::{
    port::{self, ETHERTYPE_ARP, ETHERTYPE_IPV6, VNET_LEN, VirtioNetHdr, ethertype_of},
    software::{End, Frame, Run},
};

/// The devices. A TAP's index is its VM's row behind `FIRST_TAP`.
pub(super) const ENGINE_PORT: u32 = 0x4000_0000;
pub(super) const FIRST_TAP: u32 = 0x5000_0000;
pub(super) const UPLINK: u32 = 3;

/// The uplink's MAC address: loopback's, which test runs of the BPF programs have.
const HOST_MAC: [u8; 6] = [0; 6];
const ROUTER_MAC: [u8; 6] = [0x02, 0, 0, 0, 1, 1];
const BROADCAST_MAC: [u8; 6] = [0xff; 6];
/// Room before a frame for an Ethernet header; keeps what begins there aligned.
const HEADROOM: usize = 16;

/// Result of the programs' run on a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handling {
    /// The programs translated or answered it.
    Fast,
    /// The programs handed it to the engine, for this reason.
    Engine(Handover),
    /// The programs dropped and counted it.
    Dropped(DropReason),
    /// The programs dropped it without a count.
    Discarded,
    /// The programs left it to the host.
    Passed,
}

impl Kernel {
    /// Sends a packet from a guest to the gateway's MAC, or to broadcast if its destination is a
    /// group.
    pub fn guest_sends(&mut self, row: u16, vnet: VirtioNetHdr, l3: &[u8]) -> Handling {
        let ethertype = ethertype_of(l3);
        let is_group = match ethertype {
            ETHERTYPE_IPV6 => l3.get(24) == Some(&0xff),
            _ => l3.get(16).is_some_and(|first| *first >= 224),
        };
        let frame = self.frame_of_guest(row, is_group, ethertype, l3);
        self.guest_sends_frame(row, vnet, &frame)
    }

    /// Sends an ARP packet from a guest to broadcast.
    pub fn guest_sends_arp(&mut self, row: u16, message: &[u8]) -> Handling {
        let frame = self.frame_of_guest(row, true, ETHERTYPE_ARP, message);
        self.guest_sends_frame(row, VirtioNetHdr::default(), &frame)
    }

    /// Sends a frame from a guest, given from the Ethernet header on.
    pub fn guest_sends_frame(&mut self, row: u16, vnet: VirtioNetHdr, frame: &[u8]) -> Handling {
        let tap = FIRST_TAP + u32::from(row);
        self.on_frame(vnet, tap, ether_type(frame), frame, |run| {
            guest_egress::run(run)
        })
    }

    /// Sends a packet from the world to the host.
    pub fn world_sends(&mut self, vnet: VirtioNetHdr, l3: &[u8]) -> Handling {
        let frame = ethernet(HOST_MAC, ROUTER_MAC, ethertype_of(l3), l3);
        self.world_sends_frame(vnet, &frame)
    }

    /// Sends a frame from the world to the host, given from the Ethernet header on.
    pub fn world_sends_frame(&mut self, vnet: VirtioNetHdr, frame: &[u8]) -> Handling {
        self.on_frame(vnet, self.uplink, ether_type(frame), frame, |run| {
            uplink_ingress::run::<_, ETHERNET_LEN>(run)
        })
    }

    /// Sends an IP packet from the world by an uplink without L2 header. `ether_type`: the type that
    /// the device gives the packet.
    pub fn world_sends_bare(&mut self, vnet: VirtioNetHdr, ether_type: u16, l3: &[u8]) -> Handling {
        self.on_frame(vnet, self.uplink, ether_type, l3, |run| {
            uplink_ingress::run::<_, 0>(run)
        })
    }

    /// Processes a frame that the engine wrote to the port.
    pub(super) fn engine_port(&mut self, bytes: &[u8]) {
        let parsed =
            port::Frame::parse(bytes).expect("the engine writes frames of the port's form");
        let command = Command::from_u8(parsed.header.code);
        let command = command.expect("the engine writes commands that exist");
        let known = self.at_guest.len();
        self.engine_sends_frame(parsed.vnet, &bytes[VNET_LEN..]);
        if command == Command::ToGuest {
            // The guest's device may take no GSO frames.
            for (vm, frame) in self.at_guest.split_off(known) {
                let packets = segments(parsed.vnet, &frame).into_iter();
                self.at_guest.extend(packets.map(|packet| (vm, packet)));
            }
        }
    }

    /// Processes a frame of the engine, given from the header that replaces the MAC addresses on.
    pub fn engine_sends_frame(&mut self, vnet: VirtioNetHdr, frame: &[u8]) -> Handling {
        let device = ENGINE_PORT;
        let handling = self.on_frame(vnet, device, ether_type(frame), frame, |run| {
            engine_port::run(run)
        });
        let inserted = self.ordered.take();
        self.flows.extend(inserted);
        let inserted = self.ordered6.take();
        self.flows6.extend(inserted);
        handling
    }

    /// Hands a packet to the engine without running the programs.
    pub fn hand_over(
        &mut self,
        row: u16,
        why: Handover,
        flags: u8,
        vnet: VirtioNetHdr,
        l3: &[u8],
    ) -> Handling {
        let ethertype = ethertype_of(l3);
        let frame = match flags & PortFlags::FROM_UPLINK {
            0 => self.frame_of_guest(row, flags & PortFlags::GROUP != 0, ethertype, l3),
            _ => ethernet(HOST_MAC, ROUTER_MAC, ethertype, l3),
        };
        let tap = FIRST_TAP + u32::from(row);
        self.on_frame(vnet, tap, ethertype, &frame, |run| match ethertype {
            ETHERTYPE_IPV6 => {
                handover::hand_over::<V6, _, ETHERNET_LEN>(run, row.into(), why, flags)
            }
            _ => handover::hand_over::<V4, _, ETHERNET_LEN>(run, row.into(), why, flags),
        })
    }

    /// Runs a program on a frame that arrived by a device.
    fn on_frame(
        &mut self,
        vnet: VirtioNetHdr,
        device: u32,
        ether_type: u16,
        frame: &[u8],
        program: impl FnOnce(Run<'_, &Self>) -> End,
    ) -> Handling {
        let is_to_this_host = device != self.uplink || frame.starts_with(&HOST_MAC);
        let mut buffer = [&[0; HEADROOM], frame].concat();
        let mut frame = Frame::new(vnet, device, ether_type, &mut buffer, HEADROOM);
        frame.is_to_this_host = is_to_this_host;
        let (end, start) = (program(Run::new(self, &frame)), frame.start());
        self.finish(end, vnet, buffer.split_off(start))
    }

    /// Delivers a frame to the place where a program sent it.
    fn finish(&mut self, end: End, vnet: VirtioNetHdr, bytes: Vec<u8>) -> Handling {
        let to = match end {
            End::Dropped(reason) => {
                self.dropped += 1;
                return Handling::Dropped(reason);
            }
            End::Discarded => return Handling::Discarded,
            End::Copied => {
                self.handed_over += 1;
                self.in_ring += 1;
                return Handling::Engine(Handover::Miss);
            }
            End::Passed => return Handling::Passed,
            End::Redirected(to) => to,
        };
        self.last_sent.clone_from(&bytes);
        if to == ENGINE_PORT {
            return self.queue_for_engine(vnet, &bytes);
        }
        let l3 = bytes[ETHERNET_LEN..].to_vec();
        match self.taps.get(&to) {
            Some(tap) => self.at_guest.push((tap.vm, l3)),
            None => self.at_world.push(l3),
        }
        Handling::Fast
    }

    fn queue_for_engine(&mut self, vnet: VirtioNetHdr, bytes: &[u8]) -> Handling {
        self.handed_over += 1;
        let mut frame = vnet.encode().to_vec();
        frame.extend_from_slice(bytes);
        let header = bytes.first_chunk().and_then(PortHeader::decode);
        let why = header.and_then(|header| Handover::from_u8(header.code));
        if self.faults.queue_len != 0 && self.queue.len() >= self.faults.queue_len {
            self.lost += 1;
        } else {
            self.queue.push_back(frame);
        }
        Handling::Engine(why.expect("what is handed over says why"))
    }

    fn frame_of_guest(&self, row: u16, is_group: bool, ether_type: u16, l3: &[u8]) -> Vec<u8> {
        let vm = self.vm(row);
        // SAFETY: a live row; one thread.
        let (guest, gateway) = unsafe { ((*vm.as_ptr()).guest_mac, (*vm.as_ptr()).gateway_mac) };
        let to = if is_group { BROADCAST_MAC } else { gateway };
        ethernet(to, guest, ether_type, l3)
    }
}

fn ethernet(to: [u8; 6], from: [u8; 6], ether_type: u16, l3: &[u8]) -> Vec<u8> {
    [&to, &from, &ether_type.to_be_bytes()[..], l3].concat()
}

/// EtherType of a frame, as the stack reads it.
fn ether_type(frame: &[u8]) -> u16 {
    let bytes = frame.get(12..ETHERNET_LEN);
    bytes.map_or(0, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
}
