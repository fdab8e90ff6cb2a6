//! A guest's datagrams of an inspected flow.
use slipgate_abi::{Command, DropReason, PortHeader};

use crate::{
    datapath::Datapath,
    inspection::{
        quic::{self, Effort, Passage},
        sessions::{Inspection, Kind, MAX_HELD, held_segments},
        tcp::SLOW_NS,
    },
    packet::{icmp::Unreachable, transport::UDP_HEADER_LEN},
    packet_path::{
        Disposition, Finish, Job,
        inspected::naming::{Naming, destination},
    },
    port::{ETHERTYPE_IPV4, OutboxFull, VirtioNetHdr},
    reply::IcmpError,
    state::{Core, VmState},
};

impl<D: Datapath> Core<D> {
    /// A guest's UDP frame of this flow: QUIC or nothing.
    pub(crate) fn quic_from_guest(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: u32,
        mut inspection: Box<Inspection>,
        now_ns: u64,
    ) -> Option<Finish> {
        let Kind::Quic {
            flow,
            ends_ns,
            named,
        } = &mut inspection.kind
        else {
            self.inspected.put(slot, inspection);
            return Some(Finish::Drop(DropReason::Refused));
        };
        let to = destination(&self.datapath.slot(slot).guest_tuple());
        let mut by = Naming::new(&self.judge, vm.net.id, to, now_ns);
        let others = self.inspected.held(vm.net.id) - inspection.held;
        let mut is_busy = false;
        let mut passage = Ok(Passage::Goes);
        let mut effort = Effort::new(&mut self.inspected.of_vm(vm.net.id).of_guest, now_ns);
        for datagram in datagrams(&job) {
            // What is kept of an Initial must have room before it is looked at.
            if others + flow.held() >= MAX_HELD
                && quic::initials(datagram).is_ok_and(|initials| !initials.is_empty())
            {
                is_busy = true;
                break;
            }
            passage = match flow.datagram(datagram, &mut effort, &mut |said| by.may(said, named)) {
                // Behind what waits another packet may go at once, but not with it.
                Ok(Passage::Goes) if passage == Ok(Passage::Held) && flow.is_undecided() => passage,
                // What is left out is so with its frame: the rest of that is not looked at.
                last @ (Err(_) | Ok(Passage::Dropped | Passage::Unread)) => {
                    passage = last;
                    break;
                }
                this => this,
            };
        }
        is_busy |= passage == Ok(Passage::Unread);
        let opened_by = by.last;
        let (vnet, l3) = (job.frame.vnet, job.packet.ip.bytes);
        is_busy |= passage == Ok(Passage::Held) && others + flow.held() + l3.len() > MAX_HELD;
        let passage = match passage {
            Ok(_) if is_busy => Ok(Passage::Dropped),
            Ok(Passage::Held) => flow.hold(vnet, l3).map(|()| Passage::Held),
            passage => passage,
        };
        let released = match passage {
            Ok(Passage::Goes) => flow.release(),
            _ => Vec::new(),
        };
        *ends_ns = match flow.is_undecided() {
            false => None,
            true => Some(ends_ns.unwrap_or(now_ns + SLOW_NS)),
        };
        if let Some(name) = opened_by {
            self.opened_by.insert(slot, (inspection.generation, name));
        }
        let header = PortHeader {
            code: Command::Forward as u8,
            flags: 0,
            vm_row: vm.net.row,
            id: vm.net.id,
        };
        for (vnet, l3) in &released {
            if let Err(OutboxFull) = self.out.push(header, ETHERTYPE_IPV4, *vnet, l3) {
                vm.net
                    .stats
                    .dropped(DropReason::EngineBusy, held_segments(*vnet, l3));
            }
        }
        match passage {
            // Behind what was held, which is written at the end of the batch.
            Ok(Passage::Goes) if !released.is_empty() => {
                self.inspected.put(slot, inspection);
                match self.out.push(header, ETHERTYPE_IPV4, vnet, l3) {
                    Ok(()) => Some(Finish::Dispose(Disposition::Consumed)),
                    Err(OutboxFull) => Some(Finish::Drop(DropReason::EngineBusy)),
                }
            }
            Ok(Passage::Goes) => {
                self.inspected.put(slot, inspection);
                None
            }
            Ok(Passage::Held) => {
                self.inspected.put(slot, inspection);
                Some(Finish::Dispose(Disposition::Consumed))
            }
            Ok(Passage::Dropped | Passage::Unread) => {
                self.inspected.put(slot, inspection);
                Some(Finish::Drop(match is_busy {
                    true => DropReason::EngineBusy,
                    false => DropReason::Malformed,
                }))
            }
            Err(why) => {
                self.inspected.end(slot, &inspection);
                self.end_inspected(vm, slot, why, now_ns);
                let error = IcmpError::Unreachable(Unreachable::Prohibited);
                let out = &mut self.out;
                vm.answers
                    .icmp_to_guest(&vm.net, &job.packet, error, out, now_ns);
                Some(Finish::Drop(DropReason::Refused))
            }
        }
    }
}

/// The datagrams that a UDP frame becomes.
pub(crate) fn datagrams<'a>(job: &Job<'a>) -> impl Iterator<Item = &'a [u8]> {
    let payload = job.packet.ip.payload().get(UDP_HEADER_LEN..);
    let payload = payload.unwrap_or_default();
    let vnet = job.frame.vnet;
    let each = match vnet.gso_type {
        VirtioNetHdr::GSO_NONE => payload.len(),
        _ => usize::from(vnet.gso_size),
    };
    // An empty datagram is one too.
    let empty = payload.is_empty().then_some(payload);
    payload.chunks(each.max(1)).chain(empty)
}
