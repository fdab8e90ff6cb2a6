//! A server behind an inspect rule, and guests that send to it segment by segment.
//!
//! The server has SYN cookies, so any segment with the numbers of a handshake may begin a
//! connection. Checked: no byte of a hello for another name lies where the first bytes of a
//! connection are, whatever a guest does.
use std::collections::HashMap;

use slipgate_abi::{Ip4, VmId, tcp::Flags};
use slipgate_policy::{Name, wire};
use userspace_nat::{
    dns::{NamePolicy, answer::Answer},
    fake::{
        hellos::{client_hello, records},
        packets,
    },
    name_gate::{ByRules, SharedJudge},
    port::VirtioNetHdr,
};

use super::rig::{Rig, VMS};
use crate::{
    tape::Tape,
    vms::{GUEST, ip},
};

/// Address of the server, open only under the inspect rule.
pub(super) const SERVER: (Ip4, u16) = (ip(198, 51, 100, 77), 443);
pub(super) const NAME: &str = "api.ok.test";
const DENIED: &str = "evil.test";
/// Initial sequence number of each connection that a guest opens by these steps, and of its server.
pub(crate) const ISN: u32 = 1_000;
const SERVER_ISN: u32 = 5_000;

/// Payloads of a segment.
pub(crate) mod carries {
    pub(crate) const NOTHING: u8 = 0;
    pub(crate) const ALLOWED: u8 = 1;
    pub(crate) const DENIED: u8 = 2;
    /// Hello for the other name, in a packet larger than the uplink's MTU.
    pub(crate) const DENIED_LARGE: u8 = 3;
    /// Zeroes, in a packet larger than the uplink's MTU.
    pub(crate) const LARGE: u8 = 4;
    pub(crate) const COUNT: u8 = 5;
}

/// Returns the hello for a server, in one record.
pub(crate) fn hello(name: &str) -> Vec<u8> {
    records(&client_hello(name), 1_000)
}

/// Data that reached the server.
#[derive(Default)]
pub(super) struct Server {
    /// Sequence number of the last SYN of each client.
    isns: HashMap<(Ip4, u16), u32>,
}

impl Server {
    /// Processes an IPv4 packet that reached the world.
    pub(super) fn sees(&mut self, packet: &[u8]) {
        let header_len = usize::from(packet[0] & 0xf) * 4;
        let is_first = packet[6] & 0x1f == 0 && packet[7] == 0;
        if packet[9] != 6 || packet[16..20] != SERVER.0.octets || !is_first {
            return;
        }
        let Some((header, rest)) = packet[header_len..].split_first_chunk::<20>() else {
            return;
        };
        let [source, destination] =
            [0, 2].map(|at| u16::from_be_bytes([header[at], header[at + 1]]));
        if destination != SERVER.1 {
            return;
        }
        let octets = [packet[12], packet[13], packet[14], packet[15]];
        let client = (Ip4 { octets }, source);
        let sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        if header[13] & Flags::SYN != 0 {
            assert_eq!(header[13] & (Flags::FIN | Flags::RST), 0, "contradictory");
            self.isns.insert(client, sequence);
        }
        let options_len = usize::from(header[12] >> 4) * 4 - header.len();
        let payload = rest.get(options_len..).unwrap_or_default();
        let Some(isn) = self.isns.get(&client) else {
            assert!(payload.is_empty(), "without a SYN");
            return;
        };
        let place = sequence.wrapping_sub(isn.wrapping_add(1)) as usize;
        let hello = hello(DENIED);
        if place < hello.len() {
            let says = |part: &[u8]| part == DENIED.as_bytes();
            let before = payload.len().min(hello.len() - place);
            assert!(
                !payload[..before].windows(DENIED.len()).any(says),
                "a server could read another name"
            );
        }
    }
}

/// Resolves the name for a VM, which opens its address.
pub(super) fn tell(judge: &SharedJudge, vm: u32, now_ns: u64) {
    let name = wire(NAME).expect("a name");
    let mut message = vec![0, 0, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0];
    message.extend(&*name);
    message.extend([0, 1, 0, 1]);
    message.extend(&*name);
    message.extend([0, 1, 0, 1, 0, 0, 14, 16, 0, 4]);
    message.extend(SERVER.0.octets);
    let answer = Answer {
        message: message.into(),
        ttls: Box::default(),
        extended_rcode: 0,
        lifetime_s: None,
    };
    let _ = ByRules(judge.clone()).answer(VmId::new(vm), Name(&name), &answer, 0, now_ns);
}

/// Sends a guest's segment. Operands: `row and port (1) | flags (1) | place in its stream (1) |
/// acknowledges so much (1) | carries (1)`. Place 0 is the SYN's, 1 the first byte's, 2 the byte
/// after the hello; others follow from there.
pub(super) fn segment(rig: &mut Rig, tape: &mut Tape<'_>) {
    let (from, flags) = (u16::from(tape.u8()), tape.u8());
    let (place, acknowledged) = (u32::from(tape.u8()), u32::from(tape.u8()));
    let payload = match tape.u8() % carries::COUNT {
        carries::NOTHING => Vec::new(),
        carries::ALLOWED => hello(NAME),
        carries::DENIED => hello(DENIED),
        carries::DENIED_LARGE => [&hello(DENIED)[..], &[0; 2_000]].concat(),
        _ => vec![0; 2_000],
    };
    let row = 1 + from % VMS;
    if flags & Flags::SYN != 0 {
        rig.tell_name(row);
    }
    let behind_hello = hello(NAME).len() as u32;
    let at = match place {
        0 | 1 => place,
        further => 1 + behind_hello + (further - 2),
    };
    let (sequence, ack) = (ISN + at, SERVER_ISN + acknowledged);
    let guest = (GUEST, 1_000 + from / 32);
    let packet = packets::tcp(guest, SERVER, flags, sequence, ack, &[], &payload);
    let packet = packets::may_fragment(packet);
    let mut kernel = rig.kernel.borrow_mut();
    kernel.guest_sends(row, VirtioNetHdr::default(), &packet);
}

/// Sends a segment of the server. Operands: `client (1) | flags (1) | place in its stream (1) | of
/// the guest's it acknowledges so much (1) | payload (1)`. 255 acknowledges the whole hello.
pub(super) fn server_says(rig: &mut Rig, tape: &mut Tape<'_>) {
    let (which, flags) = (usize::from(tape.u8()), tape.u8());
    let (place, acknowledged) = (u32::from(tape.u8()), u32::from(tape.u8()));
    let payload = match tape.u8() % 4 {
        0 => Vec::new(),
        1 => userspace_nat::fake::hellos::server_hello(false),
        2 => vec![0; 10],
        _ => vec![0; 2_000],
    };
    let mut clients: Vec<_> = rig.server.isns.keys().copied().collect();
    clients.sort_unstable_by_key(|(address, port)| (address.octets, *port));
    let Some(client) = clients.get(which % clients.len().max(1)) else {
        return;
    };
    let ack = match acknowledged {
        255 => ISN + 1 + hello(NAME).len() as u32,
        less => ISN + less,
    };
    let sequence = SERVER_ISN + place;
    let packet = packets::tcp(SERVER, *client, flags, sequence, ack, &[], &payload);
    let packet = packets::may_fragment(packet);
    let mut kernel = rig.kernel.borrow_mut();
    kernel.world_sends(VirtioNetHdr::default(), &packet);
}
