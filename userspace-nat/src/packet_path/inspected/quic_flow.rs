//! A guest's datagrams of an inspected flow over UDP.
use slipgate_abi::SlotIndex;
use slipgate_policy::Destination;

use crate::{
    inspection::{
        Refused,
        quic::{self, Effort, Passage},
        sessions::{Inspected, Inspection, Kind, MAX_HELD},
        tcp::SLOW_NS,
    },
    packet::transport::UDP_HEADER_LEN,
    packet_path::{Job, inspected::naming::Naming},
    port::VirtioNetHdr,
    state::Rules,
};

/// Outcome for a guest's frame.
pub(super) struct Outcome {
    /// Treatment of the frame itself.
    pub(super) passage: Result<Passage, Refused>,
    /// Whether it is dropped because the engine has no room or no time for it.
    pub(super) is_busy: bool,
    /// Earlier frames that were held and go on now.
    pub(super) released: Vec<(VirtioNetHdr, Vec<u8>)>,
}

/// Inspects a guest's UDP frame of a flow that must be QUIC. Returns `None` when the inspection is
/// one of TCP.
pub(super) fn inspect(
    rules: &mut Rules,
    inspected: &mut Inspected,
    inspection: &mut Inspection,
    (slot, to): (SlotIndex, Destination),
    job: &Job<'_>,
    now_ns: u64,
) -> Option<Outcome> {
    let Kind::Quic {
        flow,
        ends_ns,
        named,
    } = &mut inspection.kind
    else {
        return None;
    };
    let vm = inspection.vm;
    let mut by = Naming::new(&rules.judge, vm, to, now_ns);
    let others = inspected.held(vm) - inspection.held;
    let mut is_busy = false;
    let mut passage = Ok(Passage::Goes);
    let mut effort = Effort::new(&mut inspected.of_vm(vm).of_guest, now_ns);
    for datagram in datagrams(job) {
        // There must be room for what is kept of an Initial before it is parsed.
        if others + flow.held() >= MAX_HELD
            && quic::initials(datagram).is_ok_and(|initials| !initials.is_empty())
        {
            is_busy = true;
            break;
        }
        passage = match flow.datagram(datagram, &mut effort, &mut |name| by.may(name, named)) {
            // Behind a waiting datagram a later one may pass, but not in the same frame.
            Ok(Passage::Goes) if passage == Ok(Passage::Held) && flow.is_undecided() => passage,
            // A frame with a datagram that is dropped is dropped as a whole: the rest of it is not
            // parsed.
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
        rules.opened_by(slot, inspection.generation, name);
    }
    Some(Outcome {
        passage,
        is_busy,
        released,
    })
}

/// Returns the datagrams that a UDP frame becomes.
pub(super) fn datagrams<'a>(job: &Job<'a>) -> impl Iterator<Item = &'a [u8]> {
    let payload = job.packet.ip.payload().get(UDP_HEADER_LEN..);
    let payload = payload.unwrap_or_default();
    let vnet = job.frame.vnet;
    let each = match vnet.gso_type {
        VirtioNetHdr::GSO_NONE => payload.len(),
        _ => usize::from(vnet.gso_size),
    };
    // An empty datagram counts as one.
    let empty = payload.is_empty().then_some(payload);
    payload.chunks(each.max(1)).chain(empty)
}
