//! Streams to a guest whose rings the engine serves: by one copy into its buffers, or whole where somebody
//! else decides about them.
use std::{io::Write as _, os::fd::AsRawFd as _};

use slipgate_abi::{SlotIndex, Verdict, tcp::Flags, vm::VmFlags};

use super::{
    rings_tests::{RX_BUFFERS, RX_CHAINS, Scene, byte},
    tests::{FIRST, GUEST_AT, ROW, SERVER_AT},
    *,
};
use crate::{
    fake::packets,
    packet::{Packet, Transport, transport::Tcp},
};

/// The word of bytes that were received straight into the guest's buffers.
const DIRECT: u64 = 12;

/// Payload that is one frame: the window that a guest's segments announce is somewhat larger.
const LONG: usize = 28_000;
/// Chains in which such a frame is, and those that the longest takes for which the window has room.
const CHAINS_OF_LONG: usize = (LONG + 12 + 54).div_ceil(4_096);
const CHAINS_OF_LONGEST: usize = (29_200 + 12 + 54_usize).div_ceil(4_096);

/// What a frame carried: its place in the stream and its payload.
type Carried = (usize, Vec<u8>);

impl Scene {
    fn received_direct(&self) -> u64 {
        self.word(DIRECT)
    }

    /// The server sends so many bytes of its stream, from this place on. All of them are there for one
    /// frame then.
    fn serves(&mut self, from: usize, len: usize) {
        let before = self.readable();
        let bytes: Vec<u8> = (from..from + len).map(byte).collect();
        self.server.write_all(&bytes).unwrap();
        while self.readable() < before + len {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Bytes in the receive queue of the flow's socket.
    #[expect(unsafe_code, reason = "nix has no call for it")]
    fn readable(&self) -> usize {
        let mut len: nix::libc::c_int = 0;
        let socket = self.socket.as_raw_fd();
        // SAFETY: the call writes an int.
        let rc = unsafe { nix::libc::ioctl(socket, nix::libc::FIONREAD, &raw mut len) };
        assert_eq!(rc, 0);
        len as usize
    }

    /// Frames for the guest, whose checksums and lengths are right, until the stream has come up to a
    /// place. Their chains become available again.
    fn gets(&mut self, to: usize) -> Vec<Carried> {
        let mut all = Vec::new();
        self.until(Self::carried, |new| {
            all.extend(new.iter().cloned());
            let end = new.iter().map(|(at, payload)| at + payload.len()).max();
            end.is_some_and(|end| end >= to)
        });
        all
    }

    /// Takes turns until something is the case of what there is then.
    fn until<T>(
        &mut self,
        mut look: impl FnMut(&mut Self) -> T,
        mut is_enough: impl FnMut(&T) -> bool,
    ) -> T {
        for _ in 0..10_000 {
            let seen = look(self);
            if is_enough(&seen) {
                return seen;
            }
            self.turn();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        panic!("nothing came");
    }

    /// Takes turns until a frame for the guest has come somewhere: to it, to the engine, or to an end.
    fn until_judged(&mut self) {
        self.until(
            |scene| {
                let dropped = [DropReason::Denied, DropReason::Frozen, DropReason::TooBig];
                scene.has_frames()
                    || !scene.batch.is_empty()
                    || dropped.into_iter().any(|reason| scene.dropped(reason) > 0)
            },
            |is_judged| *is_judged,
        );
    }

    /// Bytes that wait for buffers.
    fn waiting(&mut self) -> usize {
        match &mut self.port.link {
            GuestLink::Rings(link) => link.queued().unwrap(),
            _ => panic!("no rings"),
        }
    }

    fn carried(&mut self) -> Vec<Carried> {
        let frames = self.heard_frames();
        self.carried_by(frames)
    }

    fn carried_by(&self, frames: Vec<Vec<u8>>) -> Vec<Carried> {
        let first = self.ours;
        let carried = frames.into_iter().filter_map(|frame| {
            let ip = Ip::parse(&frame[12 + ETHERNET_LEN..]).unwrap();
            assert_eq!(frame.len(), 12 + ETHERNET_LEN + ip.bytes.len());
            let packet = Packet::parse(ip).unwrap();
            let Transport::Tcp(tcp) = packet.transport else {
                panic!("no segment");
            };
            let payload = packet.ip.payload()[tcp.header_len..].to_vec();
            let at = tcp.sequence.wrapping_sub(first) as usize;
            (!payload.is_empty()).then_some((at, payload))
        });
        carried.collect()
    }

    fn acknowledges(&mut self, to: usize) {
        let packet = packets::tcp(
            GUEST_AT,
            SERVER_AT,
            Flags::ACK,
            FIRST + 1,
            self.ours + to as u32,
            &[],
            &[],
        );
        self.send_packet(&packet, 1);
    }

    /// A stream of which the next frame will be long.
    fn bulk() -> Self {
        Self::new(1 << 20).in_bulk()
    }

    fn in_bulk(self) -> Self {
        let mut scene = self;
        // The connection stands.
        scene.acknowledges(0);
        scene.serves(0, LONG);
        check(&scene.gets(LONG), 0..LONG);
        scene.acknowledges(LONG);
        assert_eq!(scene.received_direct(), 0);
        scene
    }

    /// The guest has other bytes in its buffers.
    fn spoil_buffers(&mut self) {
        let len = 0x1000 * usize::from(RX_CHAINS);
        self.vmm.poke(RX_BUFFERS, &vec![0xee; len]);
    }

    fn set_flags(&self, flags: u32) {
        let vm = self.port.tables.0.vm(ROW);
        vm.flags().fetch_or(flags, Relaxed);
    }

    fn rx(&self) -> (u64, u64) {
        let slot = self.port.tables.0.slot(SlotIndex::new(3));
        (
            slot.rx_packets().load(Relaxed),
            slot.rx_bytes().load(Relaxed),
        )
    }
}

/// The frames are this part of the stream, in order.
fn check(frames: &[Carried], mut of: std::ops::Range<usize>) {
    for (at, payload) in frames {
        assert_eq!(*at, of.start);
        let is_right = payload.iter().zip(*at..).all(|(it, at)| *it == byte(at));
        assert!(is_right, "other bytes than those sent");
        of.start += payload.len();
    }
    assert_eq!(of.start, of.end);
}

#[test]
fn a_stream_goes_into_the_buffers_by_one_copy() {
    let mut scene = Scene::bulk();
    let (packets, bytes) = scene.rx();
    for nth in 1..20 {
        let (from, to) = (nth * LONG, (nth + 1) * LONG);
        scene.serves(from, LONG);
        check(&scene.gets(to), from..to);
        scene.acknowledges(to);
    }
    assert_eq!(scene.received_direct(), 19 * LONG as u64);
    // As if segmented, each with headers of 40 bytes.
    let (more, more_bytes) = (scene.rx().0 - packets, scene.rx().1 - bytes);
    assert_eq!(more_bytes, 19 * LONG as u64 + 40 * more);
    assert!(more >= 19 * LONG as u64 / 1_460);
}

#[test]
fn short_answers_are_copied() {
    let mut scene = Scene::bulk();
    let mut at = LONG;
    // The first comes where a long one was expected.
    for len in [1_000, 2_000, 10, 16_000] {
        scene.serves(at, len);
        check(&scene.gets(at + len), at..at + len);
        at += len;
        scene.acknowledges(at);
    }
    assert_eq!(scene.received_direct(), 1_000);
}

#[test]
fn what_was_lost_is_sent_again_from_the_socket() {
    let mut scene = Scene::bulk();
    scene.serves(LONG, LONG);
    check(&scene.gets(2 * LONG), LONG..2 * LONG);
    // The guest has other bytes in its buffers by now, and says that all is missing.
    scene.spoil_buffers();
    for _ in 0..4 {
        scene.acknowledges(LONG);
    }
    let again = scene.gets(LONG + 1);
    let whole: usize = again.iter().map(|(_, payload)| payload.len()).sum();
    check(&again, LONG..LONG + whole);
    scene.acknowledges(2 * LONG);
    scene.serves(2 * LONG, LONG);
    let frames = scene.gets(3 * LONG);
    check(&frames, 2 * LONG..3 * LONG);
    assert!(scene.received_direct() >= 2 * LONG as u64);
}

#[test]
fn a_guest_with_too_few_buffers_gets_all_of_it_in_order() {
    let mut scene = Scene::bulk();
    // It gives none back. The last frame has room, but the longest that it might be would have none.
    let whole = usize::from(RX_CHAINS) / CHAINS_OF_LONG;
    let left = usize::from(RX_CHAINS) - (whole - 1) * CHAINS_OF_LONG;
    assert!((CHAINS_OF_LONG..CHAINS_OF_LONGEST).contains(&left));
    let mut kept = Vec::new();
    for nth in 1..=whole {
        scene.serves(nth * LONG, LONG);
        let came = scene.until(
            |scene| scene.take_frames(),
            |(frames, _)| !frames.is_empty(),
        );
        let (frames, heads) = came;
        check(&scene.carried_by(frames), nth * LONG..(nth + 1) * LONG);
        kept.extend(heads);
        scene.acknowledges((nth + 1) * LONG);
    }
    let direct = (whole - 1) * LONG;
    assert_eq!(scene.received_direct(), direct as u64);
    assert_eq!(kept.len(), usize::from(RX_CHAINS));
    // One that waits.
    let (from, to) = ((whole + 1) * LONG, (whole + 2) * LONG);
    scene.serves(from, LONG);
    scene.until(|scene| scene.waiting(), |waiting| *waiting > LONG);
    scene.give_buffers(kept);
    check(&scene.gets(to), from..to);
    assert_eq!(scene.received_direct(), direct as u64);
    scene.acknowledges(to);
    scene.serves(to, LONG);
    check(&scene.gets(to + LONG), to..to + LONG);
    assert_eq!(scene.received_direct(), (direct + LONG) as u64);
}

#[test]
fn the_end_behind_a_long_stream_takes_no_buffers() {
    let mut scene = Scene::bulk();
    scene.server.shutdown(std::net::Shutdown::Write).unwrap();
    let is_end = |tcp: &Tcp| tcp.flags & Flags::FIN != 0;
    let heard = scene.until(Scene::heard, |heard| heard.iter().any(is_end));
    let fin = heard.into_iter().find(is_end).unwrap();
    assert_eq!(fin.sequence, scene.ours + LONG as u32);
    assert_eq!(scene.received_direct(), 0);
}

/// What the guest's buffers get it can read, whatever is decided then.
#[test]
fn nothing_reaches_the_buffers_before_it_is_decided() {
    let changes: [fn(&mut Scene); 5] = [
        |scene| scene.set_verdict(Verdict::Drop),
        |scene| scene.set_verdict(Verdict::Engine),
        |scene| scene.set_flags(VmFlags::FROZEN),
        |scene| scene.set_flags(VmFlags::ASLEEP),
        |scene| {
            scene
                .port
                .tables
                .0
                .slot(SlotIndex::new(3))
                .set_verdict(Verdict::Closing)
        },
    ];
    for (nth, change) in changes.into_iter().enumerate() {
        let mut scene = Scene::bulk();
        scene.spoil_buffers();
        change(&mut scene);
        scene.serves(LONG, LONG);
        scene.until_judged();
        let buffers = scene.vmm.peek(RX_BUFFERS, 0x1000 * usize::from(RX_CHAINS));
        // Frames to which nothing applies, as acknowledgements, have no more than headers.
        let spoilt = buffers.iter().filter(|it| **it != 0xee).count();
        assert!(spoilt < 1_000, "{nth}: {spoilt}");
        assert_eq!(scene.received_direct(), 0, "{nth}");
    }
}

#[test]
fn a_limited_vm_has_its_streams_copied() {
    let mut scene = Scene::bulk();
    scene.set_flags(VmFlags::LIMITED);
    scene.serves(LONG, LONG);
    scene.until_judged();
    assert_eq!(scene.received_direct(), 0);
}

/// They are the engine's to judge.
#[test]
fn segments_longer_than_the_links_packets_are_copied() {
    let mut scene = Scene::with_mss(1 << 20, 8_960);
    scene.acknowledges(0);
    for nth in 0..3 {
        scene.serves(nth * LONG, LONG);
        scene.until_judged();
        scene.acknowledges((nth + 1) * LONG);
    }
    assert_eq!(scene.received_direct(), 0);
    assert_eq!(scene.carried(), []);
}
