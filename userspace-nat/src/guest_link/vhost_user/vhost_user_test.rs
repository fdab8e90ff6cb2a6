use std::{
    fs::File,
    net::SocketAddr,
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::net::UnixStream,
    },
    sync::Arc,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        socket::{SockFlag, accept4},
    },
};
use slipgate_abi::Ip4;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use super::{
    fake::{ALL, CHAINS, FakeVmm, MEMORY, MEMORY_LEN},
    message::{self, request},
    session::TX,
    *,
};
use crate::{
    guest_link::{GuestLink, stream::ENOUGH_QUEUED},
    packet::Version,
    port::MAX_FRAME,
    tcp::{Header, headers_len, write_headers},
};

const SERVER: Ip4 = Ip4 {
    octets: [203, 0, 113, 10],
};
const GUEST: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
const MACS: [u8; 14] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
const MSS: u16 = 1_460;
/// Address, length, and whether the device writes it.
type Buffer = (u64, u32, bool);

/// Where buffers are, behind the rings.
const BUFFERS: u64 = MEMORY + 0x1_0000;

/// A frame with its header, as the engine has it.
pub(super) fn tcp(payload_len: usize) -> Vec<u8> {
    let mut l3: Vec<u8> = (0..headers_len(Version::V4) + payload_len)
        .map(|at| at as u8)
        .collect();
    let header = Header {
        sequence: 1,
        acknowledgement: 7,
        flags: 0x10,
        window: 9,
        ..Header::default()
    };
    let vnet = write_headers(
        &mut l3,
        SocketAddr::new(SERVER.into(), 443),
        SocketAddr::new(GUEST.into(), 50_000),
        &header,
        MSS,
    );
    [&vnet.encode()[..], &MACS, &l3].concat()
}

/// As it is in the guest's buffers, which are so many.
fn in_buffers(frame: &[u8], buffers: u16) -> Vec<u8> {
    let (header, frame) = frame.split_at(VNET_LEN);
    [header, &buffers.to_le_bytes(), frame].concat()
}

fn ready(features: u64) -> FakeVmm {
    let mut vmm = FakeVmm::new();
    vmm.set_up(features);
    assert_eq!(vmm.wrong, None);
    assert!(vmm.is_connected());
    vmm
}

#[test]
fn a_frame_of_the_guest_passes_whole_however_it_is_cut() {
    for features in [ALL, feature::ALL] {
        let mut vmm = ready(features);
        let frame = tcp(60_000);
        let bytes = in_buffers(&frame, 0);
        let mut into = vec![0; MAX_FRAME];
        for cuts in [&[0][..], &[0, 12], &[0, 5, 11, 13, 14, 4_000]] {
            vmm.poke(BUFFERS, &bytes);
            let ends = cuts[1..].iter().copied().chain([bytes.len()]);
            let buffers: Vec<_> = cuts
                .iter()
                .zip(ends)
                .map(|(from, to)| (BUFFERS + *from as u64, (to - from) as u32, false))
                .collect();
            vmm.make_available(TX, 3, &buffers);
            vmm.kick(TX);
            assert_eq!(vmm.next(&mut into), Packet::Frame(frame.len()), "{cuts:?}");
            assert_eq!(into[..frame.len()], frame);
            assert_eq!(vmm.next(&mut into), Packet::Nothing);
            vmm.turn();
            assert_eq!(vmm.used(TX).last(), Some(&(3, 0)));
        }
        assert_eq!(vmm.used(TX).len(), 3);
    }
}

#[test]
fn a_frame_for_the_guest_fills_as_many_buffers_as_it_needs() {
    let mut vmm = ready(ALL);
    let frame = tcp(9_000);
    let given = |nth: u16| (BUFFERS + 0x1000 * u64::from(nth), 4_096, true);
    // Two are too few, and nothing of them is touched.
    vmm.make_available(RX, 0, &[given(0)]);
    vmm.make_available(RX, 1, &[given(1)]);
    vmm.calls(RX);
    assert_eq!(vmm.link.send(&frame), None);
    assert!(vmm.turn().is_empty());
    assert_eq!((vmm.used(RX), vmm.calls(RX)), (vec![], 0));
    vmm.make_available(RX, 2, &[given(2)]);
    vmm.kick(RX);
    let left = (frame.len() + 2 - 8_192) as u32;
    assert_eq!(vmm.used(RX), [(0, 4_096), (1, 4_096), (2, left)]);
    assert_eq!(vmm.peek(BUFFERS, frame.len() + 2), in_buffers(&frame, 3));
    assert_eq!(vmm.calls(RX), 1);
}

#[test]
fn the_chains_of_a_frame_become_the_drivers_at_once() {
    let mut vmm = ready(ALL);
    let frame = tcp(6_300);
    let ring = MEMORY + 0x2000 + 2;
    let memory = vmm.memory.clone();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut seen = std::collections::BTreeSet::new();
            while !is_over.load(relaxed) {
                let index = memory.load::<u16>(GuestAddress(ring), relaxed);
                seen.insert(index.expect("an index") % CHAINS);
            }
            seen
        });
        for _ in 0..2_000 {
            for nth in 0..CHAINS {
                let at = BUFFERS + 100 * u64::from(nth);
                vmm.make_available(RX, nth, &[(at, 100, true)]);
            }
            assert_eq!(vmm.link.send(&frame), None);
            assert!(vmm.turn().is_empty());
        }
        is_over.store(true, relaxed);
        // The index moves from none of a frame's chains to all of them.
        let seen = watch.join().expect("it watches");
        assert!(seen.iter().eq(&[0]), "{seen:?}");
    });
    let left = (frame.len() + 2) as u32 - 63 * 100;
    assert_eq!(vmm.used(RX).last(), Some(&(63, left)));
}

#[test]
fn a_driver_is_told_of_a_frame_whichever_chain_it_waits_for() {
    let mut vmm = ready(feature::ALL);
    for round in 0..2 {
        for nth in 0..3_u16 {
            let at = BUFFERS + 0x1000 * u64::from(nth);
            vmm.make_available(RX, nth, &[(at, 4_096, true)]);
        }
        vmm.calls(RX);
        // It waits for the first.
        let used_event = MEMORY + 0x1000 + 4 + 2 * u64::from(CHAINS);
        vmm.poke(used_event, &(3_u16 * round).to_le_bytes());
        assert_eq!(vmm.link.send(&tcp(9_000)), None);
        vmm.turn();
        assert_eq!(vmm.used(RX).len(), 3 + 3 * usize::from(round));
        assert_eq!(vmm.calls(RX), 1, "{round}");
    }
}

#[test]
fn a_chain_longer_than_its_ring_is_none() {
    const INDIRECT: u16 = 4;
    for (nth, flag) in [(RX, 2), (TX, 0)] {
        for (count, is_one) in [(CHAINS, true), (CHAINS + 1, false), (4_096, false)] {
            let mut vmm = ready(ALL);
            let table: Vec<u8> = (1..=count)
                .flat_map(|next| {
                    let flags = flag | u16::from(next < count);
                    let half = [flags.to_le_bytes(), next.to_le_bytes()].concat();
                    [&BUFFERS.to_le_bytes()[..], &4_u32.to_le_bytes(), &half].concat()
                })
                .collect();
            vmm.poke(BUFFERS + 0x1000, &table);
            vmm.make_available(nth, 0, &[(BUFFERS + 0x1000, table.len() as u32, false)]);
            let flags_at = MEMORY + nth as u64 * 0x4000 + 12;
            vmm.poke(flags_at, &INDIRECT.to_le_bytes());
            let what = format!("{nth} {count}");
            if nth == RX {
                assert_eq!(vmm.link.send(&tcp(100)), None);
                assert_eq!(vmm.turn().is_empty(), is_one, "{what}");
            } else {
                vmm.kick(TX);
                let mut into = vec![0; MAX_FRAME];
                assert_ne!(vmm.next(&mut into), Packet::Nothing, "{what}");
            }
            // A broken ring gets nothing back.
            assert_eq!(vmm.used(nth).len(), usize::from(is_one), "{what}");
        }
    }
}

#[test]
fn empty_buffers_cost_nothing() {
    let mut vmm = ready(ALL);
    for nth in 0..CHAINS {
        vmm.make_available(RX, nth, &[(BUFFERS, 0, true)]);
    }
    assert_eq!(vmm.link.send(&tcp(100)), None);
    assert_eq!(vmm.turn().len(), 1);
    assert_eq!(vmm.link.send(&tcp(100)), Some(DropReason::StaleVm));
    assert!(vmm.used(RX).is_empty());
}

#[test]
fn a_vmm_without_memory_has_no_input() {
    let mut vmm = FakeVmm::new();
    let mut into = vec![0; MAX_FRAME];
    let enable = [1_u32, 1].map(u32::to_ne_bytes).concat();
    vmm.ask(request::SET_VRING_ENABLE, &enable, &[]);
    assert!(vmm.link.has_input());
    assert_eq!(vmm.next(&mut into), Packet::Nothing);
    assert!(!vmm.link.has_input());
    // It is looked at when it is set up.
    vmm.set_up(ALL);
    assert!(vmm.link.has_input());
}

#[test]
fn a_guest_gets_segments_and_checksums_as_it_accepts_them() {
    let legacy = feature::PROTOCOL_FEATURES;
    let mut vmm = ready(legacy);
    for nth in 0..3 {
        let at = BUFFERS + 0x1000 * u64::from(nth);
        vmm.make_available(RX, 2 * nth, &[(at, 10, true), (at + 10, 2_000, true)]);
    }
    assert_eq!(vmm.link.send(&tcp(2_000)), None);
    assert!(vmm.turn().is_empty());
    let header = VNET_LEN as u32 + 14 + headers_len(Version::V4) as u32;
    assert_eq!(vmm.used(RX), [(0, header + 1_460), (2, header + 540)]);
    assert_eq!(vmm.peek(BUFFERS, VNET_LEN), [0; VNET_LEN]);
    // One that no buffer of such a driver can hold is lost, and told.
    let too_long = [&[0; VNET_LEN][..], &MACS, &[0x45; 3_000]].concat();
    assert_eq!(vmm.link.send(&too_long), None);
    let lost = |len| Lost {
        reason: DropReason::TooBig,
        vnet: VirtioNetHdr::default(),
        len,
    };
    assert_eq!(vmm.turn(), [lost(too_long.len())]);
}

#[test]
fn frames_wait_for_buffers_and_are_bounded() {
    let mut vmm = ready(ALL);
    let frame = tcp(60_000);
    let mut sent = 0;
    while vmm
        .link
        .queued()
        .is_some_and(|queued| queued < ENOUGH_QUEUED)
    {
        assert_eq!(vmm.link.send(&frame), None);
        sent += 1;
    }
    assert!((ENOUGH_QUEUED / frame.len()..10).contains(&sent), "{sent}");
    let lost = (0..100).find_map(|_| vmm.link.send(&frame));
    assert_eq!(lost, Some(DropReason::EngineBusy));
    // A ring that does not run takes nothing.
    vmm.stop(RX);
    assert_eq!(vmm.link.send(&frame), Some(DropReason::StaleVm));
    assert!(
        vmm.link
            .queued()
            .is_none_or(|queued| queued >= ENOUGH_QUEUED)
    );
}

#[test]
fn no_data_is_made_behind_a_frame_that_waits() {
    const KIB: usize = 1 << 10;
    let mut vmm = ready(ALL);
    let nobody = FakeVmm::new().link;
    let frame = tcp(1_000);
    let link = std::mem::replace(&mut vmm.link, nobody);
    let mut link = GuestLink::Rings(Box::new(link));
    assert_eq!(link.room(false), Some(256 * KIB));
    assert_eq!(link.room(true), Some(384 * KIB));
    assert_eq!(link.send(&frame), None);
    assert_eq!(link.room(false), Some(0));
    // A busy flow and relayed connections have their turns: these leave less than is drained in one.
    assert_eq!(link.room(true), Some(128 * KIB - frame.len()));
    // The driver adds a buffer, and no kick tells of it.
    vmm.make_available(RX, 0, &[(BUFFERS, 0x1000, true)]);
    assert_eq!(link.room(false), Some(256 * KIB));
    let GuestLink::Rings(rings) = &mut link else {
        panic!("no rings");
    };
    rings.settle();
    assert!(rings.has_drained());
    assert!(!rings.has_drained());
}

#[test]
fn a_queue_that_is_emptied_without_a_kick_says_so_once() {
    let mut vmm = ready(ALL);
    assert!(!vmm.link.has_drained());
    assert_eq!(vmm.link.send(&tcp(100)), None);
    vmm.turn();
    assert!(!vmm.link.has_drained());
    vmm.make_available(RX, 0, &[(BUFFERS, 0x1000, true)]);
    vmm.turn();
    assert_eq!(vmm.used(RX).len(), 1);
    assert!(vmm.link.has_drained());
    assert!(!vmm.link.has_drained());
}

#[test]
fn a_ring_goes_on_where_it_was() {
    let mut vmm = ready(ALL);
    let frame = tcp(100);
    let mut into = vec![0; MAX_FRAME];
    for round in 0..3 * CHAINS {
        vmm.poke(BUFFERS, &in_buffers(&frame, 0));
        let len = frame.len() as u32 + 2;
        vmm.make_available(TX, round % CHAINS, &[(BUFFERS, len, false)]);
        vmm.kick(TX);
        assert_eq!(vmm.next(&mut into), Packet::Frame(frame.len()), "{round}");
        assert_eq!(vmm.next(&mut into), Packet::Nothing);
        if round % 50 == 49 {
            assert_eq!(vmm.stop(TX), u32::from(round) + 1);
            vmm.set_up(ALL);
        }
        if round == 100 {
            // The VMM was away.
            vmm.connect();
            assert!(vmm.link.refusal(VirtioNetHdr::default(), 1).is_some());
            vmm.set_up(ALL);
        }
    }
    assert!(vmm.calls(TX) > 0);
}

/// Cloud Hypervisor takes the driver's own index for where a ring goes on, when it connects again and when
/// it restores a guest.
#[test]
fn buffers_that_are_in_a_ring_stay_whatever_the_vmm_says() {
    let mut vmm = ready(ALL);
    let frame = tcp(100);
    let bytes = in_buffers(&frame, 0);
    let mut into = vec![0; MAX_FRAME];
    for nth in 0..3 {
        let at = BUFFERS + 0x1000 * u64::from(nth);
        vmm.make_available(RX, nth, &[(at, 0x1000, true)]);
    }
    assert_eq!(vmm.link.send(&frame), None);
    vmm.turn();
    assert_eq!(vmm.used(RX).len(), 1);
    vmm.connect();
    vmm.poke(BUFFERS + 0x8000, &bytes);
    vmm.make_available(TX, 0, &[(BUFFERS + 0x8000, bytes.len() as u32, false)]);
    vmm.set_up(ALL);
    for _ in 0..2 {
        assert_eq!(vmm.link.send(&frame), None);
    }
    assert!(vmm.turn().is_empty());
    let heads: Vec<_> = vmm.used(RX).into_iter().map(|(head, _)| head).collect();
    assert_eq!(heads, [0, 1, 2]);
    assert_eq!(vmm.next(&mut into), Packet::Frame(frame.len()));
    assert_eq!(vmm.next(&mut into), Packet::Nothing);
}

#[test]
fn the_rings_of_several_pairs_are_read_in_turns_and_those_for_the_guest_by_the_first() {
    let mut vmm = ready(ALL);
    vmm.ask(request::GET_QUEUE_NUM, &[], &[]);
    let most = [17_u32, 5, 8, 16, 0].map(u32::to_ne_bytes).concat();
    assert_eq!(vmm.answers(), most);
    vmm.give_pair(1);
    assert_eq!(vmm.wrong, None);
    let mut into = vec![0; MAX_FRAME];
    const EACH: u16 = 40;
    for (nth, len) in [(TX, 100), (TX + 2, 200)] {
        let bytes = in_buffers(&tcp(len), 0);
        let at = BUFFERS + 0x1000 * nth as u64;
        vmm.poke(at, &bytes);
        for first in 0..EACH {
            vmm.make_available(nth, first, &[(at, bytes.len() as u32, false)]);
        }
    }
    vmm.kick(TX + 2);
    let (short, long) = (tcp(100).len(), tcp(200).len());
    let mut read = Vec::new();
    while let Packet::Frame(len) = vmm.next(&mut into) {
        assert!(len == short || len == long);
        read.push(len);
    }
    let of = |read: &[usize], len| read.iter().filter(|it| **it == len).count();
    assert_eq!((of(&read, short), of(&read, long)), (40, 40));
    // Neither waits for the other's end.
    assert!(
        of(&read[..32], short) >= 8 && of(&read[..32], long) >= 8,
        "{read:?}"
    );
    vmm.turn();
    for nth in [TX, TX + 2] {
        assert_eq!(vmm.used(nth).len(), usize::from(EACH));
        assert!(vmm.calls(nth) > 0);
    }
    // A rest of the second pair's ring goes back to that.
    let frame = tcp(50_000);
    vmm.poke(BUFFERS, &in_buffers(&frame, 0));
    vmm.make_available(TX + 2, 0, &[(BUFFERS, frame.len() as u32 + 2, false)]);
    vmm.kick(TX + 2);
    assert_eq!(vmm.next(&mut into), Packet::Frame(frame.len()));
    assert_eq!(into[..frame.len()], frame);
    assert_eq!(vmm.used(TX + 2).len(), usize::from(EACH) + 1);
    // Frames for the guest are all in the first pair's ring, where it has given buffers in both.
    for nth in [RX, RX + 2] {
        for first in 0..2 {
            let at = BUFFERS + 0x1000 * (2 * nth as u64 + u64::from(first));
            vmm.make_available(nth, first, &[(at, 0x1000, true)]);
        }
        vmm.kick(nth);
    }
    for _ in 0..2 {
        assert_eq!(vmm.link.send(&tcp(100)), None);
    }
    assert!(vmm.turn().is_empty());
    assert_eq!((vmm.used(RX).len(), vmm.used(RX + 2).len()), (2, 0));
    // A ring that is broken is its own loss.
    vmm.make_available(TX, 0, &[(MEMORY + MEMORY_LEN, 100, false)]);
    vmm.kick(TX);
    assert_eq!(vmm.next(&mut into), Packet::Malformed(0));
    vmm.poke(BUFFERS, &in_buffers(&tcp(100), 0));
    vmm.make_available(TX + 2, 1, &[(BUFFERS, short as u32 + 2, false)]);
    vmm.kick(TX + 2);
    assert_eq!(vmm.next(&mut into), Packet::Frame(short));
    assert_eq!(vmm.next(&mut into), Packet::Nothing);
    assert!(!vmm.link.has_input());
}

#[test]
fn a_driver_that_lies_loses_its_ring_only() {
    let far = MEMORY + MEMORY_LEN;
    let mut into = vec![0; MAX_FRAME];
    let lies: [(&str, &[Buffer]); 7] = [
        ("outside", &[(far - 100, 2_000, false)]),
        ("far outside", &[(u64::MAX - 10, 2_000, false)]),
        ("written", &[(BUFFERS, 2_000, true)]),
        ("empty", &[(BUFFERS, 0, false)]),
        ("empty later", &[(BUFFERS, 99, false), (BUFFERS, 0, false)]),
        ("both", &[(BUFFERS, 2_000, false), (BUFFERS, 1, true)]),
        (
            "too much",
            &[(BUFFERS, u32::MAX, false), (BUFFERS, u32::MAX, false)],
        ),
    ];
    for (what, buffers) in lies {
        let mut vmm = ready(ALL);
        vmm.make_available(TX, 0, buffers);
        vmm.kick(TX);
        assert!(
            matches!(vmm.next(&mut into), Packet::Malformed(_)),
            "{what}"
        );
        assert_eq!(vmm.next(&mut into), Packet::Nothing, "{what}");
        // The VMM's connection stands, and its other ring serves.
        assert!(vmm.is_connected(), "{what}");
        vmm.make_available(RX, 0, &[(BUFFERS, 2_000, true)]);
        assert_eq!(vmm.link.send(&tcp(100)), None);
        vmm.turn();
        assert_eq!(vmm.used(RX).len(), 1, "{what}");
        vmm.make_available(RX, 1, &[(far - 10, 2_000, true)]);
        assert_eq!(vmm.link.send(&tcp(100)), None);
        assert_eq!(vmm.turn().len(), 1, "{what}");
        assert_eq!(vmm.link.send(&tcp(100)), Some(DropReason::StaleVm));
    }
    // An index that jumps, and a chain that loops.
    let mut vmm = ready(ALL);
    let ring = MEMORY + 0x4000;
    vmm.poke(ring + 0x1000 + 2, &(CHAINS + 1).to_le_bytes());
    vmm.kick(TX);
    assert_eq!(vmm.next(&mut into), Packet::Malformed(0));
    let mut vmm = ready(ALL);
    let one = [&BUFFERS.to_le_bytes()[..], &[100, 0, 0, 0, 1, 0, 0, 0]].concat();
    vmm.make_available(TX, 0, &[(BUFFERS, 100, false)]);
    vmm.poke(ring, &one);
    vmm.kick(TX);
    // It ends with the ring's length: 64 times 100 bytes that are no frame.
    assert_ne!(vmm.next(&mut into), Packet::Nothing);
    assert_eq!(vmm.next(&mut into), Packet::Nothing);
    // Chains that are no frames are given back, and counted.
    let mut vmm = ready(ALL);
    let chains: [(u64, u32, bool); 3] = [
        (BUFFERS, 1, false),
        (BUFFERS, 12, false),
        (BUFFERS, 100_000, false),
    ];
    for (nth, chain) in chains.into_iter().enumerate() {
        vmm.make_available(TX, nth as u16, &[chain]);
    }
    vmm.kick(TX);
    for _ in chains {
        assert!(matches!(vmm.next(&mut into), Packet::Malformed(_)));
    }
    assert_eq!(vmm.next(&mut into), Packet::Nothing);
    assert_eq!(vmm.used(TX).len(), 3);
}

#[test]
fn a_vmm_that_lies_loses_its_connection() {
    let long = |value: u64| value.to_ne_bytes().to_vec();
    let word = |nth: u32, value: u32| [nth.to_ne_bytes(), value.to_ne_bytes()].concat();
    let table = |regions: &[[u64; 4]]| {
        let count = word(regions.len() as u32, 0);
        let regions = regions.iter().flatten().flat_map(|it| it.to_ne_bytes());
        count.into_iter().chain(regions).collect::<Vec<u8>>()
    };
    let page = |at: u64| [at, 4_096, at, 0];
    let refused = |number: u32, body: &[u8], fds: usize, wrong: Wrong| {
        let mut vmm = ready(ALL);
        let fd = vmm.fds()[0];
        vmm.ask(number, body, &vec![fd; fds]);
        assert_eq!(vmm.wrong, Some(wrong), "{number} {body:?}");
        assert!(vmm.is_closed());
        // The next one is served.
        vmm.connect();
        vmm.set_up(ALL);
        assert!(vmm.is_connected());
    };
    refused(99, &[], 0, Wrong::Request(99));
    refused(request::SET_OWNER, &[], 1, Wrong::Descriptors(3));
    refused(request::SET_FEATURES, &long(1 << 3), 0, Wrong::Body(2));
    refused(request::SET_FEATURES, &[0; 7], 0, Wrong::Body(2));
    refused(request::SET_MEM_TABLE, &table(&[]), 0, Wrong::Body(5));
    refused(
        request::SET_MEM_TABLE,
        &[2, 0, 0, 0, 0, 0, 0, 0],
        0,
        Wrong::Body(5),
    );
    let pages = table(&[page(0), page(4_096)]);
    refused(request::SET_MEM_TABLE, &pages, 1, Wrong::Descriptors(5));
    for regions in [
        &[page(0), page(0)][..],
        &[[0, MEMORY_LEN + 4_096, 0, 0]],
        &[[0, 4_096, 0, MEMORY_LEN]],
        &[[0, 4_096, 0, u64::MAX - 4_095]],
        &[[0, 0, 0, 0]],
        &[[1, 4_096, 0, 0]],
        &[[u64::MAX - 4_095, 4_096, 0, 0]],
    ] {
        let (body, fds) = (table(regions), regions.len());
        refused(request::SET_MEM_TABLE, &body, fds, Wrong::Memory);
    }
    refused(request::SET_VRING_NUM, &word(0, 3), 0, Wrong::Ring);
    refused(request::SET_VRING_NUM, &word(0, 0), 0, Wrong::Ring);
    refused(request::SET_VRING_NUM, &word(32, 64), 0, Wrong::Body(8));
    refused(request::SET_VRING_BASE, &word(0, 1 << 16), 0, Wrong::Ring);
    refused(request::GET_VRING_BASE, &word(32, 0), 0, Wrong::Body(11));
    // A file tells of nothing; nor does none.
    refused(request::SET_VRING_KICK, &long(0), 1, Wrong::Kick);
    refused(request::SET_VRING_KICK, &long(1 << 8), 0, Wrong::Kick);
    refused(request::SET_VRING_KICK, &long(0), 0, Wrong::Descriptors(12));
    refused(request::SET_VRING_KICK, &long(0), 2, Wrong::Descriptors(12));
    refused(request::SET_VRING_CALL, &long(33), 1, Wrong::Body(13));

    // Rings elsewhere.
    for at in [0, 8, u64::MAX - 3] {
        let mut vmm = FakeVmm::new();
        let kick = vmm.fds()[1];
        vmm.set_up(ALL);
        let places = [at; 4].map(u64::to_ne_bytes).concat();
        let body = [word(0, 0), places].concat();
        vmm.ask(request::SET_VRING_ADDR, &body, &[]);
        vmm.ask(request::SET_VRING_KICK, &long(0), &[kick]);
        assert_eq!(vmm.wrong, Some(Wrong::Ring), "{at}");
    }
    // Other versions, answers, and what is too long.
    for header in [[1, 0, 0], [1, 2, 0], [1, 5, 0], [1, 1, 513]] {
        let mut vmm = FakeVmm::new();
        let bytes: Vec<u8> = header
            .iter()
            .flat_map(|it: &u32| it.to_ne_bytes())
            .collect();
        vmm.say(&bytes, &[]);
        assert_eq!(vmm.wrong, Some(Wrong::Header), "{header:?}");
    }
}

/// However many there are: the kernel gives those for which there is room.
#[test]
fn descriptors_of_a_message_that_has_too_many_are_closed() {
    let mut vmm = ready(ALL);
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let fds = [writer.as_raw_fd(); message::MOST_FDS + 1];
    vmm.ask(request::SET_MEM_TABLE, &[0; 8], &fds);
    assert_eq!(vmm.wrong, Some(Wrong::Header));
    drop(writer);
    let mut ended = [PollFd::new(reader.as_fd(), PollFlags::empty())];
    assert_eq!(
        poll(&mut ended, PollTimeout::ZERO),
        Ok(1),
        "none is left open"
    );
}

#[test]
fn messages_come_in_pieces_and_are_answered() {
    let mut vmm = FakeVmm::new();
    for byte in [1_u32, 1, 0].iter().flat_map(|word| word.to_ne_bytes()) {
        vmm.say(&[byte], &[]);
    }
    let offered = vmm.answers();
    let words = [1_u32, 5, 8].map(u32::to_ne_bytes).concat();
    assert_eq!(
        offered,
        [words, feature::ALL.to_ne_bytes().to_vec()].concat()
    );
    vmm.set_up(ALL);
    // Whoever has agreed on answers gets one to each request that asks for one.
    let agreed = feature::REPLY_ACK.to_ne_bytes();
    vmm.ask(request::SET_PROTOCOL_FEATURES, &agreed, &[]);
    let asks = [3_u32, 9, 0].map(u32::to_ne_bytes).concat();
    vmm.say(&asks, &[]);
    let answer = [3_u32, 5, 8, 0, 0].map(u32::to_ne_bytes).concat();
    assert_eq!(vmm.answers(), answer);
}

#[test]
fn nobody_is_served_after_the_only_one() {
    let mut vmm = FakeVmm::new();
    vmm.link.is_for_one = true;
    vmm.set_up(ALL);
    let listener = vmm.link.listener.as_ref().unwrap().as_raw_fd();
    vmm.say(&[0xff; 12], &[]);
    assert_eq!(vmm.wrong, Some(Wrong::Header));
    assert!(accept4(listener, SockFlag::SOCK_NONBLOCK).is_err());
    assert_eq!(vmm.link.send(&tcp(1)), Some(DropReason::StaleVm));
}

/// A long frame of TCP in the guest's buffers, whose headers are in one of them.
fn long_frame(vmm: &mut FakeVmm, first: u16) -> Vec<u8> {
    let frame = tcp(50_000);
    vmm.poke(BUFFERS, &in_buffers(&frame, 0));
    let len = frame.len() as u32 + 2;
    let buffers = [(BUFFERS, 100, false), (BUFFERS + 100, len - 100, false)];
    vmm.make_available(TX, first, &buffers);
    vmm.kick(TX);
    frame
}

#[test]
fn of_a_long_segment_the_headers_are_copied_once_and_the_rest_stays() {
    let mut vmm = ready(ALL);
    let frame = long_frame(&mut vmm, 0);
    let mut into = vec![0xee; MAX_FRAME];
    let (packet, rest) = vmm.next_beginning(&mut into);
    let rest = rest.expect("a rest");
    assert_eq!(packet, Packet::Frame(frame.len()));
    let here = frame.len() - rest.len();
    assert!((VNET_LEN + 14 + 40..200).contains(&here), "{here}");
    // The guest writes other headers, a chain and other payload meanwhile.
    let other: Vec<u8> = vec![0x77; frame.len() + 2];
    vmm.poke(BUFFERS, &other);
    assert_eq!(into[..here], frame[..here]);
    assert!(
        into[here..].iter().all(|byte| *byte == 0xee),
        "no more is copied"
    );
    vmm.turn();
    assert_eq!(vmm.used(TX), [], "its chain is not the guest's yet");
    assert!(rest.copy_to(&mut into[here..frame.len()]));
    assert_eq!(into[..here], frame[..here], "they are not read again");
    assert_eq!(into[here..frame.len()], other[..rest.len()]);
    assert_eq!(vmm.link.finish(rest), Packet::Nothing);
    vmm.turn();
    assert_eq!(vmm.used(TX), [(0, 0)]);
    assert_eq!(vmm.next(&mut into), Packet::Nothing);
    long_frame(&mut vmm, 5);
    assert!(vmm.next_beginning(&mut into).1.is_some());
}

#[test]
fn other_long_frames_are_copied_whole() {
    let mut into = vec![0; MAX_FRAME];
    for change in [
        // UDP, a fragment's protocol of IPv6, a short header of IPv4, ARP.
        |frame: &mut Vec<u8>| frame[VNET_LEN + 14 + 9] = 17,
        |frame: &mut Vec<u8>| {
            frame[VNET_LEN + 14] = 0x60;
            frame[VNET_LEN + 14 + 6] = 44;
        },
        |frame: &mut Vec<u8>| frame[VNET_LEN + 14] = 0x44,
        |frame: &mut Vec<u8>| frame[VNET_LEN + 14] = 0,
    ] {
        let mut vmm = ready(ALL);
        let mut frame = tcp(50_000);
        frame[..VNET_LEN].fill(0);
        change(&mut frame);
        vmm.poke(BUFFERS, &in_buffers(&frame, 0));
        vmm.make_available(TX, 0, &[(BUFFERS, frame.len() as u32 + 2, false)]);
        vmm.kick(TX);
        let (packet, rest) = vmm.next_beginning(&mut into);
        assert_eq!(
            (packet, rest.is_some()),
            (Packet::Frame(frame.len()), false)
        );
        assert_eq!(into[..frame.len()], frame);
        vmm.turn();
        assert_eq!(vmm.used(TX), [(0, 0)]);
    }
}

#[test]
fn a_rest_out_of_memory_breaks_the_ring_before_the_frame_counts() {
    for at in [MEMORY + MEMORY_LEN - 1, MEMORY - 1, u64::MAX - 5, 0] {
        let mut vmm = ready(ALL);
        let frame = tcp(50_000);
        vmm.poke(BUFFERS, &in_buffers(&frame, 0));
        let rest = frame.len() as u32 + 2 - 1_000;
        let chain = [(BUFFERS, 1_000, false), (at, rest, false)];
        vmm.make_available(TX, 0, &chain);
        vmm.kick(TX);
        let mut into = vec![0; MAX_FRAME];
        let (packet, rest) = vmm.next_beginning(&mut into);
        assert_eq!((packet, rest.is_some()), (Packet::Malformed(0), false));
        vmm.turn();
        assert_eq!(vmm.used(TX), []);
    }
}

#[test]
fn a_long_frame_with_a_header_that_is_refused_is_given_back() {
    let mut vmm = ready(ALL);
    let mut frame = tcp(50_000);
    // Another segment size than any.
    frame[4..6].fill(0);
    vmm.poke(BUFFERS, &in_buffers(&frame, 0));
    vmm.make_available(TX, 3, &[(BUFFERS, frame.len() as u32 + 2, false)]);
    vmm.kick(TX);
    let mut into = vec![0; MAX_FRAME];
    let (packet, rest) = vmm.next_beginning(&mut into);
    assert_eq!(
        (packet, rest.is_some()),
        (Packet::Malformed(frame.len()), false)
    );
    vmm.turn();
    assert_eq!(vmm.used(TX), [(3, 0)]);
}

#[test]
fn a_ring_that_is_broken_when_a_rest_is_given_back_is_counted() {
    let mut vmm = ready(ALL);
    long_frame(&mut vmm, 0);
    let mut into = vec![0; MAX_FRAME];
    let rest = vmm.next_beginning(&mut into).1.expect("a rest");
    // The used ring is nowhere any more.
    let other = GuestMemoryMmap::from_ranges(&[(GuestAddress(1 << 40), 4_096)]).unwrap();
    let known = vmm.link.vmm.as_mut().and_then(|vmm| vmm.memory.as_mut());
    known.unwrap().guest = Arc::new(other);
    assert_eq!(vmm.link.finish(rest), Packet::Malformed(0));
    assert_eq!(vmm.next(&mut into), Packet::Nothing);
}

/// Headers of a frame whose payload is `len` bytes, with those of [`VNET_LEN`].
fn headers(len: usize) -> Vec<u8> {
    let mut frame = tcp(len);
    frame.truncate(VNET_LEN + HEADERS);
    frame
}

/// Length of a frame's headers, from the Ethernet header on.
const HEADERS: usize = 14 + 40;

#[test]
fn a_frame_whose_payload_is_in_place_fills_as_many_chains_as_it_needs() {
    let mut vmm = ready(ALL);
    for nth in 0..8 {
        let buffer = (BUFFERS + 0x1000 * u64::from(nth), 0x1000, true);
        vmm.make_available(RX, nth, &[buffer]);
    }
    let space = vmm.link.space(Version::V4, HEADERS, 20_000).unwrap();
    vmm.turn();
    assert_eq!(vmm.used(RX), []);
    vmm.link.forget(space);
    // Again from the first on.
    let space = vmm.link.space(Version::V4, HEADERS, 20_000).unwrap();
    let payload = 0x1000 * 2;
    let lost = vmm.link.put_space(&headers(payload), space, payload);
    assert_eq!(lost, None);
    vmm.turn();
    let rest = (12 + HEADERS) as u32;
    assert_eq!(vmm.used(RX), [(0, 0x1000), (1, 0x1000), (2, rest)]);
    let beginning = headers(payload);
    assert_eq!(vmm.peek(BUFFERS, 12 + HEADERS), in_buffers(&beginning, 3));
    // One that is copied comes next.
    assert_eq!(vmm.link.send(&tcp(100)), None);
    vmm.turn();
    assert_eq!(vmm.used(RX)[3], (3, rest + 100));
    assert!(vmm.link.space(Version::V4, HEADERS, 20_000).is_none());
    assert!(vmm.link.space(Version::V4, HEADERS, 16_000).is_some());
}

#[test]
fn there_is_no_space_where_a_frame_could_not_be_put() {
    let with_buffer = |features: u64| {
        let mut vmm = ready(features);
        vmm.make_available(RX, 0, &[(BUFFERS, 0x1_0000, true)]);
        vmm
    };
    let has = |vmm: &mut FakeVmm, version| {
        let space = vmm.link.space(version, HEADERS, 60_000);
        space.map(|space| vmm.link.forget(space)).is_some()
    };
    assert!(has(&mut with_buffer(ALL), Version::V4));
    assert!(has(
        &mut with_buffer(ALL & !feature::MRG_RXBUF),
        Version::V6
    ));
    let mut vmm = with_buffer(ALL & !feature::GUEST_TSO4);
    assert!(!has(&mut vmm, Version::V4) && has(&mut vmm, Version::V6));
    assert!(!has(
        &mut with_buffer(ALL & !feature::GUEST_TSO6),
        Version::V6
    ));
    assert!(!has(
        &mut with_buffer(ALL & !feature::GUEST_CSUM),
        Version::V4
    ));
    let mut vmm = ready(ALL);
    assert!(!has(&mut vmm, Version::V4));
    // Behind one that waits.
    assert_eq!(vmm.link.send(&tcp(100)), None);
    vmm.make_available(RX, 0, &[(BUFFERS, 0x1_0000, true)]);
    vmm.make_available(RX, 1, &[(BUFFERS, 0x1_0000, true)]);
    assert!(!has(&mut vmm, Version::V4));
    vmm.turn();
    assert!(has(&mut vmm, Version::V4));
    // Out of memory: the next frame finds the ring broken.
    let mut vmm = ready(ALL);
    vmm.make_available(RX, 0, &[(MEMORY + MEMORY_LEN - 1, 0x1_0000, true)]);
    assert!(!has(&mut vmm, Version::V4));
    vmm.stop(RX);
    assert!(!has(&mut vmm, Version::V4));
}

/// The engine is done with a space before it hears the VMM. If it were not, the frame would be lost.
#[test]
fn a_space_of_a_ring_that_was_is_of_no_use() {
    let changes: [fn(&mut FakeVmm); 3] = [
        |vmm| {
            vmm.stop(RX);
        },
        |vmm| vmm.connect(),
        // Another frame was put meanwhile.
        |vmm| assert_eq!(vmm.link.send(&tcp(100)), None),
    ];
    for change in changes {
        let mut vmm = ready(ALL);
        vmm.make_available(RX, 0, &[(BUFFERS, 0x1_0000, true)]);
        let space = vmm.link.space(Version::V4, HEADERS, 60_000).unwrap();
        change(&mut vmm);
        vmm.turn();
        let before = vmm.used(RX).len();
        let lost = vmm.link.put_space(&headers(100), space, 100);
        assert_eq!(lost, Some(DropReason::StaleVm));
        vmm.turn();
        assert_eq!(vmm.used(RX).len(), before);
    }
}

/// The engine finishes a frame before it hears the VMM. If it did not, this would be lost, and no more.
#[test]
fn what_was_under_way_when_the_ring_or_the_memory_changed_is_given_back_to_nobody() {
    let stop = |vmm: &mut FakeVmm| {
        let body = [(TX as u32).to_ne_bytes(), [0; 4]].concat();
        vmm.ask(request::GET_VRING_BASE, &body, &[]);
        vmm.turn();
    };
    let changes: [fn(&mut FakeVmm); 2] = [
        |vmm| vmm.set_up(ALL),
        |vmm| {
            vmm.connect();
            vmm.set_up(ALL);
        },
    ];
    for change in changes {
        let mut vmm = ready(ALL);
        let frame = long_frame(&mut vmm, 0);
        let mut into = vec![0; MAX_FRAME];
        let (_, rest) = vmm.next_beginning(&mut into);
        let rest = rest.expect("a rest");
        stop(&mut vmm);
        change(&mut vmm);
        vmm.turn();
        let here = frame.len() - rest.len();
        assert!(rest.copy_to(&mut into[here..frame.len()]));
        assert_eq!(into[here..frame.len()], frame[here..], "it stays mapped");
        let before = vmm.used(TX).len();
        vmm.link.finish(rest);
        vmm.turn();
        assert_eq!(vmm.used(TX).len(), before);
    }
}

#[test]
fn what_could_not_be_accepted_is_tried_again_without_an_event() {
    // It fails, as if the host had no descriptor.
    let (listener, _other) = UnixStream::pair().unwrap();
    let mut link = RingLink::new(listener.into(), false);
    let epoll = Epoll::new(nix::sys::epoll::EpollCreateFlags::empty()).unwrap();
    assert_eq!(link.accept(&epoll, 1, 5), Accepted::No);
    assert_eq!(link.due_ns(), Some(5 + SHORTAGE_NS));
    // Nobody is there: the event tells of the next, and nothing is due any more.
    let listener = FakeVmm::new().link.listener.take().unwrap();
    link.listener = Some(listener);
    let due_ns = 5 + SHORTAGE_NS;
    assert_eq!(link.accept(&epoll, 1, due_ns), Accepted::No);
    assert_eq!(link.due_ns(), None);
}

/// Has another VMM connect, and a frame pass to its guest.
fn the_next_is_served(vmm: &mut FakeVmm) {
    vmm.connect();
    vmm.set_up(ALL);
    vmm.make_available(RX, 0, &[(BUFFERS, 0x1000, true)]);
    assert_eq!(vmm.link.send(&tcp(100)), None);
    vmm.turn();
    assert_eq!(vmm.used(RX).len(), 1);
}

#[test]
fn a_vmm_that_cannot_be_watched_is_refused_and_the_next_is_served() {
    let mut vmm = FakeVmm::new();
    vmm.let_go();
    assert!(vmm.link.vmm.is_none());
    vmm.connect_unheard();
    let nothing = Epoll(File::open("/dev/null").unwrap().into());
    assert_eq!(vmm.link.accept(&nothing, 1, 5), Accepted::Refused);
    assert_eq!(vmm.link.due_ns(), Some(5 + SHORTAGE_NS));
    assert!(vmm.is_closed(), "it learns of it");
    assert!(vmm.link.warned.0);
    // Whoever waits is not refused in each turn.
    vmm.connect_unheard();
    let before_ns = 4 + SHORTAGE_NS;
    assert_eq!(vmm.link.accept(&nothing, 1, before_ns), Accepted::No);
    assert_eq!(vmm.link.due_ns(), Some(5 + SHORTAGE_NS));
    let due_ns = 5 + SHORTAGE_NS;
    assert_eq!(vmm.link.accept(&nothing, 1, due_ns), Accepted::Refused);
    assert!(vmm.is_closed());
    the_next_is_served(&mut vmm);
    assert!(!vmm.link.warned.0);
}

/// The limit is the whole process's.
#[test]
fn a_message_whose_descriptors_find_no_place_ends_the_connection_and_the_next_one_serves() {
    crate::test_child::passes("guest_link::vhost_user::tests::with_few_descriptors");
}

#[test]
#[ignore = "the child of a_message_whose_descriptors_find_no_place_ends_the_connection_and_the_next_one_serves"]
fn with_few_descriptors() {
    let mut vmm = ready(ALL);
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let next = || File::open("/dev/null").unwrap().as_raw_fd() as u64;
    // What it was started with has any numbers: none above these.
    let _low: Vec<_> = std::iter::repeat_with(|| File::open("/dev/null").unwrap())
        .take_while(|file| file.as_raw_fd() < 500)
        .collect();
    let before = next();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    // There is a place for one of the two.
    setrlimit(Resource::RLIMIT_NOFILE, before + 1, hard).unwrap();
    let fds = [writer.as_raw_fd(); 2];
    vmm.ask(request::SET_MEM_TABLE, &[0; 8], &fds);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert_eq!(vmm.wrong, Some(Wrong::NoPlace));
    drop(writer);
    let mut ended = [PollFd::new(reader.as_fd(), PollFlags::empty())];
    let ended = poll(&mut ended, PollTimeout::ZERO);
    assert_eq!(ended, Ok(1), "none is left open");
    // It gives all anew.
    the_next_is_served(&mut vmm);
}

/// The event is there until the message is read.
#[test]
fn a_message_for_which_the_host_lacks_memory_is_read_later_and_ends_nothing() {
    fn refuse(vmm: &mut FakeVmm, errors: &[Errno]) {
        let vmm = vmm.link.vmm.as_mut().unwrap();
        vmm.connection.refuses = errors.to_vec();
    }
    let mut vmm = FakeVmm::new();
    for error in [Errno::ENOBUFS, Errno::ENOMEM] {
        refuse(&mut vmm, &[error; 3]);
        vmm.ask(request::GET_FEATURES, &[], &[]);
        assert!(
            vmm.answers().ends_with(&feature::ALL.to_ne_bytes()),
            "{error}"
        );
        assert!(vmm.is_connected(), "{error}");
        let connection = &vmm.link.vmm.as_ref().unwrap().connection;
        assert!(connection.refuses.is_empty(), "each was met");
    }
    // Others are ends.
    refuse(&mut vmm, &[Errno::ECONNRESET]);
    vmm.ask(request::GET_FEATURES, &[], &[]);
    assert!(vmm.is_closed());
    assert_eq!(vmm.wrong, None);
}

#[test]
fn a_doorbell_for_which_the_host_has_no_place_ends_the_connection_and_the_next_one_serves() {
    for error in [Errno::ENOSPC, Errno::ENOMEM] {
        let mut vmm = ready(ALL);
        let kick = vmm.fds()[2];
        vmm.link.refuse_kicks(error);
        vmm.ask(request::SET_VRING_KICK, &1_u64.to_ne_bytes(), &[kick]);
        assert_eq!(vmm.wrong, Some(Wrong::NoPlace), "{error}");
        assert!(vmm.is_closed(), "it learns of it");
        the_next_is_served(&mut vmm);
    }
}
