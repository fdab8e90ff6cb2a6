//! A guest's SYN that its server answers by the acknowledgement of a former connection.
//!
//! # Theory of operation
//! A port that is used again toward a server before its rest is over ([`crate::nat_ports`]) may be that
//! of a connection which the server has in TIME-WAIT. RFC 6191 lets a server pass over it for a SYN with
//! a later timestamp or sequence number. But Linux derives both from addresses and ports, and the former
//! connection may have come from another port of the guest's: half of such SYNs look old. The server
//! answers them by a bare acknowledgement of the former connection. A guest resets that (RFC 9293 section
//! 3.10.7.3), which ends the TIME-WAIT, and sends its SYN again: after a second, or, as Linux does since
//! 5.7, after some 10 ms.
//!
//! That time is saved: the engine, which keeps the SYN of a flow that got such a port, sends the reset
//! and the SYN again in the guest's place as soon as the acknowledgement comes, once for each flow. Both
//! are counted in the flow, as if the guest had sent them; the acknowledgement is a late segment, which
//! the guest does not get. A flow whose SYN is not kept gets it, and its guest does the same by itself.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{DropReason, SlotIndex, tcp::Flags};

use super::{Finish, Job};
use crate::{
    datapath::Datapath,
    packet::{
        Transport,
        build::{self, Segment},
    },
    port::{Frame, VirtioNetHdr},
    state::{Core, VmState},
};

impl<D: Datapath> Core<D> {
    /// Handles a bare acknowledgement of a server to a flow whose SYN it has not answered.
    pub(super) fn challenged(&mut self, vm: &mut VmState, job: Job<'_>, slot: SlotIndex) -> Finish {
        match self.ask_again(vm, &job, slot) {
            Some(()) => Finish::Drop(DropReason::NoFlow),
            None => self.world_sent_to_flow(vm, job, slot),
        }
    }

    /// Resets the former connection and repeats the SYN of a flow. Returns `None` if that is the guest's to
    /// do.
    fn ask_again(&mut self, vm: &VmState, job: &Job<'_>, slot: SlotIndex) -> Option<()> {
        let Transport::Tcp(tcp) = job.packet.transport else {
            return None;
        };
        let generation = self.nat.datapath.slot(slot).generation().load(Relaxed);
        let guest = self.nat.flows.entry(slot)?.guest;
        let kept = self.kept_syns.take(slot, generation)?;
        let syn = Frame::parse(&kept)?;
        let reset = Segment {
            source: guest.local_port,
            destination: guest.remote_port,
            sequence: tcp.acknowledgement,
            acknowledgement: 0,
            flags: Flags::RST,
        };
        let out = &mut self.out;
        build::tcp(&mut out.packet, guest.local, guest.remote, reset);
        if !out.queue.has_room(2, out.packet.len() + syn.l3.len()) {
            return None;
        }
        let reset = (VirtioNetHdr::default(), &out.packet[..]);
        for (vnet, l3) in [reset, (syn.vnet, syn.l3)] {
            let queued = out.queue.as_guest(&vm.net, vnet, l3);
            debug_assert!(queued.is_ok(), "there is room for both");
        }
        Some(())
    }
}
