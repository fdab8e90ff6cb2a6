//! Long segments of a guest whose rings the engine serves: by one copy to the socket, or whole to whoever
//! else decides about them.
use std::{
    io::Read as _,
    net::{Ipv4Addr as Address, TcpListener, TcpStream},
    os::{fd::OwnedFd, unix::net::UnixListener},
    time::Duration,
};

use nix::sys::{
    epoll::EpollTimeout,
    socket::{setsockopt, sockopt},
};
use slipgate_abi::{SlotIndex, Verdict, tcp::Flags};

use super::{
    tests::{FIRST, GUEST_AT, InMemory, MACS, ROW, SERVER_AT, WORLD_AT, tables, tcp_of},
    *,
};
use crate::{
    fake::packets,
    guest_link::{
        RingLink,
        vhost_user::fake::{ALL, FakeVmm, MEMORY},
    },
    packet::{Transport, transport::Tcp},
    tcp::Segment,
};

pub(super) const RX: usize = 0;
const TX: usize = 1;
/// Buffers for the guest, of a page each and so many, and of the guest.
pub(super) const RX_BUFFERS: u64 = MEMORY + 0x1_0000;
pub(super) const RX_CHAINS: u16 = 63;
const PAGE: u64 = 0x1000;
const TX_BUFFERS: u64 = MEMORY + 0x8_0000;
/// Where the VMM reads counts, and the word of bytes that went by one copy.
const TALLY: u64 = 0xf_0000;
const DIRECT: u64 = 11;
const SET_TALLY: u32 = 0x5347_0001;
const SET_VRING_KICK: u32 = 12;
const LONG: usize = 60_000;

pub(super) fn byte(at: usize) -> u8 {
    (at * 7 / 3) as u8
}

fn bytes(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(byte).collect()
}

/// A guest's connection to a server on loopback, which stands.
pub(super) struct Scene {
    pub(super) port: UserspacePort<InMemory>,
    pub(super) vmm: FakeVmm,
    pub(super) server: TcpStream,
    /// The flow's own socket.
    pub(super) socket: OwnedFd,
    pub(super) batch: Batch,
    /// Chains of the guest so far, and those for it that were read.
    sent: u16,
    read: u16,
    /// What we have sent, up to which the guest acknowledges.
    pub(super) ours: u32,
}

impl Scene {
    /// `receives`: size of the server's receive queue.
    pub(super) fn new(receives: usize) -> Self {
        Self::with_mss(receives, 1_460)
    }

    /// `mss`: the longest segment that the guest says it takes, bytes.
    pub(super) fn with_mss(receives: usize, mss: u16) -> Self {
        let mut vmm = FakeVmm::own();
        vmm.set_up(ALL);
        let [file, ..] = vmm.fds();
        vmm.ask(SET_TALLY, &TALLY.to_ne_bytes(), &[file]);
        assert_eq!(vmm.wrong, None);
        let dir = tempfile::tempdir().unwrap();
        let nobody = UnixListener::bind(dir.path().join("link")).unwrap();
        let nobody = RingLink::new(nobody.into(), false);
        let link = GuestLink::Rings(Box::new(std::mem::replace(&mut vmm.link, nobody)));
        let mut port = UserspacePort::new(tables(), link, true, 1_500, 1 << 20).unwrap();
        let servers = TcpListener::bind((Address::LOCALHOST, 0)).unwrap();
        setsockopt(&servers, sockopt::RcvBuf, &receives).unwrap();
        let socket = TcpStream::connect(servers.local_addr().unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let [high, low] = mss.to_be_bytes();
        let options = [2, 4, high, low];
        let opener = packets::tcp(WORLD_AT, SERVER_AT, Flags::SYN, FIRST, 0, &options, &[]);
        let packet = Packet::parse(Ip::parse(&opener).unwrap()).unwrap();
        let segment = Segment::read(&tcp_of(&packet), packet.ip.payload());
        let tuple = packet.tuple(FlowTuple::WORLD, Direction::Tx);
        let (sockets, epoll, mut out, _) = port.parts(SystemClock.now_ns());
        let socket = OwnedFd::from(socket);
        let opened = socket.try_clone();
        sockets.begin_stream(tuple.unwrap(), &segment, opened, epoll, &mut out);
        let server = servers.accept().unwrap().0;
        let patience = Some(Duration::from_secs(20));
        server.set_read_timeout(patience).unwrap();
        let mut scene = Self {
            port,
            vmm,
            server,
            socket,
            batch: Batch::new(),
            sent: 0,
            read: 0,
            ours: 0,
        };
        scene.give_buffers(0..RX_CHAINS);
        scene.ours = loop {
            scene.turn();
            if let Some(tcp) = scene.heard().first() {
                break tcp.sequence + 1;
            }
        };
        scene
    }

    /// A turn of the port, with what events there are.
    pub(super) fn turn(&mut self) {
        let mut events = [EpollEvent::empty(); 8];
        let heard = self.port.epoll.wait(&mut events, EpollTimeout::ZERO);
        for event in &events[..heard.unwrap()] {
            self.port.on_ready(event.data() as u32, event.events());
        }
        self.batch.clear();
        self.port.recv(&mut self.batch).unwrap();
    }

    /// Makes buffers available to the port, by number.
    pub(super) fn give_buffers(&mut self, buffers: impl IntoIterator<Item = u16>) {
        for nth in buffers {
            let buffer = (RX_BUFFERS + PAGE * u64::from(nth), PAGE as u32, true);
            self.vmm.make_available(RX, nth, &[buffer]);
        }
    }

    /// Takes the frames for the guest that have come since the last time, each with its header in the ring,
    /// and the buffers in which they were.
    pub(super) fn take_frames(&mut self) -> (Vec<Vec<u8>>, Vec<u16>) {
        let index = self.vmm.peek(MEMORY + 0x2000 + 2, 2);
        let index = u16::from_le_bytes([index[0], index[1]]);
        let used = self.vmm.used(RX);
        let new = usize::from(index.wrapping_sub(self.read));
        self.read = index;
        let (mut frames, mut heads) = (Vec::<Vec<u8>>::new(), Vec::new());
        let mut left = 0;
        for (head, len) in &used[used.len() - new..] {
            let place = RX_BUFFERS + PAGE * u64::from(*head);
            let bytes = self.vmm.peek(place, *len as usize);
            heads.push(*head as u16);
            match frames.last_mut() {
                Some(frame) if left > 0 => frame.extend(bytes),
                _ => {
                    left = u16::from_le_bytes([bytes[10], bytes[11]]);
                    frames.push(bytes);
                }
            }
            left -= 1;
        }
        assert_eq!(left, 0, "a frame has too few chains");
        (frames, heads)
    }

    /// Whether there are some.
    pub(super) fn has_frames(&self) -> bool {
        self.vmm.peek(MEMORY + 0x2000 + 2, 2) != self.read.to_le_bytes()
    }

    /// As [`Self::take_frames`], and the guest has no more use for the buffers.
    pub(super) fn heard_frames(&mut self) -> Vec<Vec<u8>> {
        let (frames, heads) = self.take_frames();
        self.give_buffers(heads);
        frames
    }

    /// Segments for the guest that have come since the last time.
    pub(super) fn heard(&mut self) -> Vec<Tcp> {
        let of = |frame: Vec<u8>| {
            let packet = Packet::parse(Ip::parse(&frame[12 + ETHERNET_LEN..]).unwrap()).unwrap();
            match packet.transport {
                Transport::Tcp(tcp) => tcp,
                _ => panic!("no segment"),
            }
        };
        self.heard_frames().into_iter().map(of).collect()
    }

    /// The guest sends a segment with payload from this place of its stream on, in so many buffers and one
    /// for the header.
    fn send(&mut self, at: usize, payload: &[u8], buffers: usize) {
        let sequence = FIRST + 1 + at as u32;
        let flags = Flags::ACK;
        let packet = packets::tcp(
            GUEST_AT,
            SERVER_AT,
            flags,
            sequence,
            self.ours,
            &[],
            payload,
        );
        self.send_packet(&packet, buffers);
    }

    pub(super) fn send_packet(&mut self, packet: &[u8], buffers: usize) {
        let frame = [&[0; 12][..], &MACS, &[8, 0], packet].concat();
        self.vmm.poke(TX_BUFFERS, &frame);
        let mut chain = vec![(TX_BUFFERS, 12, false)];
        let each = (frame.len() - 12).div_ceil(buffers);
        for from in (12..frame.len()).step_by(each) {
            let len = each.min(frame.len() - from);
            chain.push((TX_BUFFERS + from as u64, len as u32, false));
        }
        self.vmm.make_available(TX, 0, &chain);
        self.sent += 1;
        self.kicked();
        self.turn();
        let given_back = self.vmm.peek(MEMORY + 0x4000 + 0x2000 + 2, 2);
        assert_eq!(given_back, self.sent.to_le_bytes());
    }

    fn kicked(&mut self) {
        if let GuestLink::Rings(link) = &mut self.port.link {
            link.kicked();
        }
    }

    /// Bytes that went by one copy.
    fn direct(&self) -> u64 {
        self.word(DIRECT)
    }

    /// A word of what the VMM is told.
    pub(super) fn word(&self, nth: u64) -> u64 {
        let word = self.vmm.peek(MEMORY + TALLY + 8 * nth, 8);
        u64::from_ne_bytes(word.try_into().unwrap())
    }

    fn arrives(&mut self, from: usize, len: usize) {
        let mut got = vec![0; len];
        self.server.read_exact(&mut got).unwrap();
        assert!(got == bytes(from, len), "other bytes than those sent");
    }

    fn packets_and_bytes(&self) -> (u64, u64) {
        let slot = self.port.tables.0.slot(SlotIndex::new(3));
        (
            slot.tx_packets().load(Relaxed),
            slot.tx_bytes().load(Relaxed),
        )
    }

    pub(super) fn dropped(&self, reason: DropReason) -> u64 {
        let (_, drops) = self.port.tables.stats(VmRow::new(ROW)).snapshot();
        drops.get(reason).packets
    }

    pub(super) fn set_verdict(&self, verdict: Verdict) {
        self.port
            .tables
            .0
            .slot(SlotIndex::new(3))
            .set_verdict(verdict);
    }
}

#[test]
fn a_long_segment_goes_to_the_socket_by_one_copy() {
    let mut scene = Scene::new(1 << 20);
    for (nth, buffers) in [1, 2, 17].into_iter().enumerate() {
        let at = nth * LONG;
        scene.send(at, &bytes(at, LONG), buffers);
        scene.arrives(at, LONG);
        let acknowledged = scene.heard().last().unwrap().acknowledgement;
        assert_eq!(acknowledged, FIRST + 1 + (at + LONG) as u32);
        // All but what is copied with the headers: at most 120 bytes of both.
        let direct = scene.direct() as usize;
        let most = (nth + 1) * LONG;
        assert!(
            most - 120 * (nth + 1) <= direct && direct < most,
            "{direct}"
        );
        let counted = (nth as u64 + 1, (nth as u64 + 1) * (LONG as u64 + 40));
        assert_eq!(scene.packets_and_bytes(), counted);
    }
}

#[test]
fn short_segments_and_those_in_tiny_buffers_are_copied_whole() {
    let mut scene = Scene::new(1 << 20);
    scene.send(0, &bytes(0, 1_000), 1);
    scene.arrives(0, 1_000);
    scene.send(1_000, &bytes(1_000, 10_000), 50);
    scene.arrives(1_000, 10_000);
    assert_eq!(scene.direct(), 0);
    scene.send(11_000, &bytes(11_000, 10_000), 1);
    scene.arrives(11_000, 10_000);
    assert!(scene.direct() > 9_800);
}

#[test]
fn what_a_full_socket_does_not_take_arrives_once() {
    let mut scene = Scene::new(4_096);
    // It is smaller than the window that was announced.
    setsockopt(&scene.socket, sockopt::SndBuf, &4_096).unwrap();
    let (mut at, mut got, mut was_turned_away) = (0, 0, false);
    while at < 4 * LONG {
        scene.send(at, &bytes(at, LONG), 2);
        let acknowledged = (0..1_000).find_map(|_| {
            let told = scene.heard().last().map(|tcp| tcp.acknowledgement);
            if told.is_none() {
                scene.turn();
            }
            told.map(|told| (told - FIRST - 1) as usize)
        });
        let acknowledged = acknowledged.expect("an acknowledgement");
        assert!(acknowledged <= at + LONG);
        was_turned_away |= acknowledged < at + LONG;
        if acknowledged == at {
            scene.arrives(got, at - got);
            got = at;
        }
        at = acknowledged;
    }
    assert!(was_turned_away, "the queue was never full");
    scene.arrives(got, at - got);
    let direct = scene.direct() as usize;
    assert!(direct > 0 && direct <= at);
}

#[test]
fn one_that_came_early_is_kept_and_sent_in_its_turn() {
    let mut scene = Scene::new(1 << 20);
    let late = 5_000;
    scene.send(0, &bytes(0, 1_000), 1);
    scene.send(late, &bytes(late, 20_000), 3);
    assert_eq!(scene.direct(), 0);
    // The guest has other bytes there by now.
    scene.send(1_000, &bytes(1_000, late - 1_000), 1);
    scene.arrives(0, late + 20_000);
    let acknowledged = scene.heard().last().unwrap().acknowledgement;
    assert_eq!(acknowledged, FIRST + 1 + late as u32 + 20_000);
}

#[test]
fn what_the_guest_had_sent_before_is_not_sent_twice() {
    let mut scene = Scene::new(1 << 20);
    scene.send(0, &bytes(0, LONG), 1);
    scene.send(0, &bytes(0, LONG), 1);
    let from = LONG - 10_000;
    scene.send(from, &bytes(from, 30_000), 4);
    scene.arrives(0, LONG + 20_000);
    let direct = scene.direct() as usize;
    assert!(direct > LONG + 20_000 - 240 && direct <= LONG + 20_000);
}

#[test]
fn the_engine_gets_it_whole() {
    let mut scene = Scene::new(1 << 20);
    scene.set_verdict(Verdict::Engine);
    let payload = bytes(0, LONG);
    scene.send(0, &payload, 5);
    assert_eq!(scene.batch.len(), 1);
    let frame = scene.batch.frame(0);
    assert!(frame.ends_with(&payload));
    assert_eq!(frame.len(), L3_AT + 40 + LONG);
    assert_eq!(scene.direct(), 0);
    assert_eq!(scene.packets_and_bytes(), (0, 0));
}

#[test]
fn lengths_that_contradict_each_other_are_malformed() {
    let mut scene = Scene::new(1 << 20);
    let whole = packets::tcp(
        GUEST_AT,
        SERVER_AT,
        Flags::ACK,
        FIRST + 1,
        scene.ours,
        &[],
        &bytes(0, LONG),
    );
    scene.send_packet(&whole[..whole.len() - 1], 3);
    scene.send_packet(&[&whole[..], &[0]].concat(), 3);
    let mut no_header = whole.clone();
    no_header[32] = 0x40;
    scene.send_packet(&no_header, 3);
    assert_eq!(scene.dropped(DropReason::Malformed), 3);
    assert_eq!(scene.direct(), 0);
    scene.send_packet(&whole, 3);
    scene.arrives(0, LONG);
}

#[test]
fn a_refused_flow_leaves_its_bytes_where_they_are() {
    let mut scene = Scene::new(1 << 20);
    scene.set_verdict(Verdict::Drop);
    scene.send(0, &bytes(0, LONG), 2);
    assert_eq!(scene.direct(), 0);
    assert_eq!(scene.dropped(DropReason::Denied), 1);
}

/// Whether the host is short of something is seen in the counts.
#[test]
fn a_vmm_whose_doorbell_finds_no_place_is_counted_and_one_that_breaks_the_protocol_is_not() {
    for (error, count) in [(Errno::ENOSPC, 1), (Errno::ENOMEM, 1), (Errno::EPERM, 0)] {
        let mut scene = Scene::new(1 << 20);
        let GuestLink::Rings(link) = &mut scene.port.link else {
            panic!("no rings");
        };
        link.refuse_kicks(error);
        let [_, kick, ..] = scene.vmm.fds();
        let ring = (RX as u64).to_ne_bytes();
        scene.vmm.ask_unheard(SET_VRING_KICK, &ring, &[kick]);
        scene.turn();
        assert!(scene.vmm.is_closed(), "{error}");
        assert_eq!(scene.dropped(DropReason::EngineBusy), count, "{error}");
    }
}
