//! A VMM that gives its guest's rings, and the driver behind them.
//!
//! Input: `features (8) | step …`. A step is a byte that says who does what, and its operands: messages
//! on the connection, whole or in pieces, with descriptors or without; chains, kicks, and writes
//! anywhere in the guest's memory, rings included; frames for the guest, and bytes of a socket that go
//! straight into its buffers.
use userspace_nat::{
    guest_link::{
        Packet,
        vhost_user::fake::{ALL, FakeVmm, MEMORY, MEMORY_LEN},
    },
    port::{MAX_FRAME, VNET_LEN, VirtioNetHdr},
};

use crate::tape::Tape;

/// Steps of an input at most.
const MOST_STEPS: usize = 256;
/// Frames that one step reads.
const FRAMES_AT_ONCE: usize = 128;
/// Bytes that may be queued for the guest, with those of one more frame.
const MOST_KEPT: usize = (512 << 10) + MAX_FRAME;

/// Passes what a VMM says, and its driver does.
pub fn vhost_user(input: &[u8]) {
    let mut tape = Tape::new(input);
    let mut vmm = FakeVmm::new();
    let mut into = vec![0; MAX_FRAME];
    vmm.set_up(u64::from_be_bytes(tape.array()) & ALL);
    let mut kept = 0;
    for _ in 0..MOST_STEPS {
        if tape.is_at_end() {
            break;
        }
        step(&mut tape, &mut vmm, &mut kept);
        for _ in 0..FRAMES_AT_ONCE {
            match vmm.next(&mut into) {
                Packet::Frame(len) => check(&into[..len]),
                Packet::Malformed(_) => {}
                Packet::Nothing => break,
            }
        }
        if !vmm.is_connected() {
            // Whatever it was, the next one is served.
            vmm.connect();
            vmm.set_up(ALL);
            assert!(vmm.is_connected());
            kept = 0;
        }
    }
}

fn step(tape: &mut Tape<'_>, vmm: &mut FakeVmm, kept: &mut usize) {
    let place = |tape: &mut Tape<'_>| {
        let at = u64::from(tape.u16()) << (tape.u8() % 6);
        MEMORY - 64 + at % (MEMORY_LEN + 128)
    };
    match tape.u8() % 8 {
        0 => {
            let bytes = tape.bytes();
            vmm.say(&bytes[..bytes.len().min(1_024)], &[]);
        }
        1 => {
            let number = u32::from(tape.u8() % 24);
            let fds = vmm.fds();
            let count = usize::from(tape.u8() % 4);
            let first = usize::from(tape.u8()) % fds.len();
            let fds: Vec<_> = fds
                .iter()
                .cycle()
                .skip(first)
                .take(count)
                .copied()
                .collect();
            let len = usize::from(tape.u8());
            vmm.ask(number, tape.take(len), &fds);
        }
        2 => {
            let ring = usize::from(tape.u8() % 2);
            let first = tape.u16() % 64;
            let count = 1 + tape.u8() % 6;
            let buffers: Vec<_> = (0..count)
                .map(|_| {
                    let way = if tape.u8().is_multiple_of(16) {
                        ring != 0
                    } else {
                        ring == 0
                    };
                    (place(tape), tape.u16().into(), way)
                })
                .collect();
            vmm.make_available(ring, first, &buffers);
            vmm.kick(ring);
        }
        3 => {
            let at = place(tape);
            vmm.poke(at, tape.bytes());
        }
        4 => vmm.kick(usize::from(tape.u8() % 2)),
        5 => {
            let vnet = VirtioNetHdr::decode(&tape.array());
            // The engine makes those that can be.
            let plain = VirtioNetHdr::default();
            let vnet = if vnet.gso_type & 1 == 0 {
                plain
            } else {
                csum()
            };
            let len = 64 + usize::from(tape.u16()) % 60_000;
            let frame = [&vnet.encode()[..], &vec![0x45; len]].concat();
            if vmm.link.send(&frame).is_none() {
                *kept += frame.len();
            }
            if !vmm.turn().is_empty() || !vmm.used(0).is_empty() {
                *kept = 0;
            }
            assert!(
                *kept <= MOST_KEPT,
                "{kept} bytes wait for a guest that reads nothing"
            );
        }
        6 => {
            // Bytes of a socket go into the guest's buffers by one copy.
            let (most, sent) = (usize::from(tape.u16()), usize::from(tape.u16()));
            let comes = !tape.u8().is_multiple_of(8);
            vmm.receive(1 + most % 60_000, &vec![0x45; sent % 60_000], comes);
        }
        _ => {
            if tape.u8().is_multiple_of(8) {
                vmm.set_up(ALL);
            }
        }
    }
}

/// A frame whose checksum is to be completed.
fn csum() -> VirtioNetHdr {
    VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 6,
        ..VirtioNetHdr::default()
    }
}

/// Checks the properties of a frame that the engine relies on.
fn check(frame: &[u8]) {
    let (header, frame) = frame.split_first_chunk::<VNET_LEN>().expect("a header");
    let vnet = VirtioNetHdr::decode(header);
    if vnet.needs_csum() {
        let field = usize::from(vnet.csum_start) + usize::from(vnet.csum_offset);
        assert!(field + 2 <= frame.len());
    }
    if vnet.gso_type != VirtioNetHdr::GSO_NONE {
        assert!(vnet.needs_csum() && vnet.gso_size > 0);
        assert!(usize::from(vnet.hdr_len) < frame.len());
    }
}
