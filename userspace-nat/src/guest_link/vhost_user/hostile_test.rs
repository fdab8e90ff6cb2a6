//! A VMM and a driver that do anything: what becomes of each frame, and what the engine is given.
use proptest::{collection::vec, prelude::*, sample::select};

use super::{
    fake::{ALL, CHAINS, FakeVmm, MEMORY, MEMORY_LEN},
    session::TX,
    tests::tcp,
    *,
};
use crate::port::MAX_FRAME;

/// Where buffers are, behind the rings.
const BUFFERS: u64 = MEMORY + 0x1_0000;
const RING_LEN: u64 = 0x4000;
const AVAILABLE: u64 = 0x1000;
/// Length of a frame's header in a ring, with the number of buffers.
const HEADER_LEN: usize = VNET_LEN + 2;

/// A buffer of a chain: guest address, length, and whether it is for the other way than the ring is.
type Buffer = (u64, u32, bool);

/// What a driver and its VMM do to rings that stay where they are.
#[derive(Clone, Debug)]
enum Deed {
    /// Makes a chain available.
    Chain(usize, u16, Vec<Buffer>),
    /// Makes a chain of the guest available that begins as a long segment.
    Long(u16, Vec<Buffer>),
    /// Writes a descriptor: ring, place, address, length, flags, next.
    Descriptor(usize, u16, u64, u32, u16, u16),
    /// Writes a word of the available ring: its flags, index, or an entry.
    Available(usize, u16, u16),
    Kick(usize),
    /// A frame is for the guest.
    Frame(usize),
    /// A socket has so many bytes for the guest, of which there may be room for this number in its buffers;
    /// they are received into them, and become a frame if something comes of it.
    Space(usize, usize, bool),
    /// Goes away, and comes again with these features.
    Reconnect(bool),
    /// Stops a ring, or has both go on.
    Stop(usize),
    SetUp,
}

/// Places of buffers: inside, across the end of memory, and far outside. Not in the rings, where the
/// device's own writes would be the guest's.
fn place() -> impl Strategy<Value = u64> {
    let end = MEMORY + MEMORY_LEN;
    prop_oneof![
        8 => BUFFERS..end - 0x1_0000,
        1 => end - 64..end + 64,
        1 => select(vec![0, 1, u64::MAX, u64::MAX - 7, 1 << 63]),
    ]
}

fn len() -> impl Strategy<Value = u32> {
    prop_oneof![6 => 1_u32..2_000, 1 => Just(0), 1 => select(vec![65_600, u32::MAX])]
}

fn deed() -> impl Strategy<Value = Deed> {
    let ring = || 0..2_usize;
    let buffer = || (place(), len(), prop::bool::weighted(0.05));
    prop_oneof![
        6 => (ring(), 0..CHAINS, vec(buffer(), 1..5)).prop_map(|(r, f, b)| Deed::Chain(r, f, b)),
        2 => (0..CHAINS, vec(buffer(), 2..5)).prop_map(|(f, b)| Deed::Long(f, b)),
        1 => (ring(), 0..CHAINS, place(), len(), 0..8_u16, any::<u16>())
            .prop_map(|(r, nth, at, len, flags, next)| Deed::Descriptor(r, nth, at, len, flags, next)),
        1 => (ring(), 0..CHAINS + 3, any::<u16>()).prop_map(|(r, at, w)| Deed::Available(r, at, w)),
        4 => ring().prop_map(Deed::Kick),
        6 => (1..3_000_usize).prop_map(Deed::Frame),
        4 => (1..3_000_usize, 1..3_000_usize, prop::bool::weighted(0.8))
            .prop_map(|(len, most, comes)| Deed::Space(len, most, comes)),
        1 => any::<bool>().prop_map(Deed::Reconnect),
        1 => ring().prop_map(Deed::Stop),
        1 => Just(Deed::SetUp),
    ]
}

/// What became of frames so far.
#[derive(Default, Debug)]
struct Books {
    /// Frames for the guest that the link took, and those of them that are in its buffers.
    taken: usize,
    placed: usize,
    /// Frames of the guest, and chains that are none, each given back once.
    frames: usize,
    malformed: usize,
    given_back: usize,
    /// Indices of the used rings as last read.
    used: [u16; 2],
}

impl Books {
    /// Reads what the device has given back.
    fn read(&mut self, vmm: &FakeVmm) {
        for (nth, sum) in [(RX, &mut self.placed), (TX, &mut self.given_back)] {
            let index = vmm.peek(MEMORY + nth as u64 * RING_LEN + 0x2000 + 2, 2);
            let index = u16::from_le_bytes([index[0], index[1]]);
            *sum += usize::from(index.wrapping_sub(self.used[nth]));
            self.used[nth] = index;
        }
    }
}

fn run(deeds: &[Deed]) -> Result<(), TestCaseError> {
    // Without mergeable buffers each frame has a chain.
    let features = |plain: bool| if plain { 0 } else { ALL } & !feature::MRG_RXBUF;
    let mut vmm = FakeVmm::new();
    vmm.set_up(features(false));
    let (mut books, mut into) = (Books::default(), vec![0; MAX_FRAME]);
    for deed in deeds {
        match deed {
            Deed::Chain(ring, first, buffers) => {
                let way = |other: bool| (*ring == RX) != other;
                let buffers: Vec<_> = buffers
                    .iter()
                    .map(|(at, len, other)| (*at, *len, way(*other)))
                    .collect();
                vmm.make_available(*ring, *first, &buffers);
            }
            Deed::Long(first, buffers) => {
                let beginning = [&[0; HEADER_LEN][..], &tcp(3_000)[VNET_LEN..]].concat();
                vmm.poke(BUFFERS, &beginning);
                let mut chain = vec![(BUFFERS, beginning.len() as u32, false)];
                chain.extend(buffers);
                vmm.make_available(TX, *first, &chain);
                vmm.kick(TX);
            }
            Deed::Descriptor(ring, nth, at, len, flags, next) => {
                let place = MEMORY + *ring as u64 * RING_LEN + 16 * u64::from(*nth);
                let flags_and_next = [flags.to_le_bytes(), next.to_le_bytes()].concat();
                let bytes = [&at.to_le_bytes()[..], &len.to_le_bytes(), &flags_and_next];
                vmm.poke(place, &bytes.concat());
            }
            Deed::Available(ring, at, word) => {
                let place = MEMORY + *ring as u64 * RING_LEN + AVAILABLE + 2 * u64::from(*at);
                vmm.poke(place, &word.to_le_bytes());
            }
            Deed::Kick(ring) => vmm.kick(*ring),
            Deed::Frame(len) => {
                let frame = [&[0; VNET_LEN][..], &vec![0x45; 14 + len]].concat();
                books.taken += usize::from(vmm.link.send(&frame).is_none());
            }
            Deed::Space(len, most, comes) => {
                let is_taken = vmm.receive(*most, &vec![0x45; *len], *comes);
                books.taken += usize::from(is_taken == Some(true));
            }
            Deed::Reconnect(plain) => {
                vmm.connect();
                vmm.set_up(features(*plain));
            }
            Deed::Stop(ring) => {
                let body = [(*ring as u32).to_ne_bytes(), [0; 4]].concat();
                vmm.ask(message::request::GET_VRING_BASE, &body, &[]);
                vmm.answers();
            }
            Deed::SetUp => vmm.set_up(features(false)),
        }
        // A turn, in which the frames of a few are read.
        for _ in 0..2 * CHAINS {
            match vmm.next(&mut into) {
                Packet::Frame(len) => {
                    books.frames += 1;
                    check(&into[..len]);
                }
                // A broken ring, which gives nothing back.
                Packet::Malformed(0) => {}
                Packet::Malformed(_) => books.malformed += 1,
                Packet::Nothing => break,
            }
            books.read(&vmm);
        }
        vmm.turn();
        books.read(&vmm);
        let waiting = vmm.link.queue.len();
        prop_assert_eq!(books.taken, books.placed + vmm.lost.len() + waiting);
        prop_assert_eq!(books.given_back, books.frames + books.malformed);
        prop_assert!(vmm.link.queued <= MOST_QUEUED);
    }
    // What waits for a VMM that goes is told.
    vmm.connect();
    prop_assert_eq!(books.taken, books.placed + vmm.lost.len());
    // The next one is served, whatever the rings looked like.
    vmm.clear_rings();
    vmm.set_up(ALL);
    prop_assert!(vmm.is_connected());
    vmm.poke(BUFFERS, &[0; HEADER_LEN + 60]);
    vmm.make_available(TX, 0, &[(BUFFERS, HEADER_LEN as u32 + 60, false)]);
    vmm.kick(TX);
    let read = vmm.next(&mut into);
    prop_assert!(
        matches!(read, Packet::Frame(len) if len == VNET_LEN + 60),
        "{read:?}"
    );
    vmm.make_available(RX, 0, &[(BUFFERS + 0x1000, 2_000, true)]);
    vmm.kick(RX);
    prop_assert!(vmm.link.send(&[0; VNET_LEN + 60]).is_none());
    vmm.turn();
    prop_assert_eq!(vmm.used(RX), [(0, HEADER_LEN as u32 + 60)]);
    Ok(())
}

/// What the engine may rely on.
fn check(frame: &[u8]) {
    let (header, frame) = frame.split_first_chunk::<VNET_LEN>().expect("a header");
    let vnet = VirtioNetHdr::decode(header);
    if vnet.needs_csum() {
        let field = usize::from(vnet.csum_start) + usize::from(vnet.csum_offset);
        assert!(field + 2 <= frame.len(), "{vnet:?}");
    }
    if vnet.gso_type != VirtioNetHdr::GSO_NONE {
        assert!(vnet.needs_csum() && vnet.gso_size > 0, "{vnet:?}");
        assert!(usize::from(vnet.hdr_len) < frame.len(), "{vnet:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn whatever_a_driver_does_each_frame_is_passed_on_lost_or_malformed_once(
        deeds in vec(deed(), 1..120)
    ) {
        run(&deeds)?;
    }
}
