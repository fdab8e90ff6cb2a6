//! A real TAP behind the card, in a network namespace of its own. Frames from the guest come back
//! to it: a filter on the TAP turns each frame around.
use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use slipgate_testbed::{NetNs, require_root_and_tun};
use slipgate_vmm::virtio::{
    VirtioDevice,
    net::{IoMethod, Net, NetConfig, NetCounters, NetError},
};

use super::driver::{HEADER, MAC, Rig, unconfined};

const ALL: u64 = u64::MAX;

/// Opens `queues` descriptors of one TAP, `tap0` of the namespace.
pub(crate) fn open(ns: &NetNs, flags: libc::c_int, queues: usize) -> io::Result<Vec<OwnedFd>> {
    ns.run(|| (0..queues).map(|_| open_queue(flags)).collect())
}

fn open_queue(flags: libc::c_int) -> io::Result<OwnedFd> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: an ifreq is plain data, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"tap0") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the request outlives the call and is the type TUNSETIFF takes.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file.into())
}

pub(crate) const USUAL: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// Returns a namespace with a TAP that is up and turns frames around. The TAP is removed with its
/// descriptors.
pub(crate) fn turning(name: &str, queues: usize) -> (NetNs, Vec<OwnedFd>) {
    let ns = NetNs::new(name).unwrap();
    let multi = if queues > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    let taps = open(&ns, USUAL | multi, queues).unwrap();
    ns.ip("link set tap0 txqueuelen 2000 up").unwrap();
    let ifindex = ns.ifindex("tap0").unwrap();
    ns.run(|| turn_around(ifindex)).unwrap();
    (ns, taps)
}

/// Attaches a program to the TAP (tcx, first in the chain) that redirects each frame to the TAP.
fn turn_around(ifindex: u32) -> io::Result<()> {
    const BPF_PROG_LOAD: libc::c_int = 5;
    const BPF_PROG_ATTACH: libc::c_int = 8;
    const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
    const BPF_TCX_INGRESS: u32 = 46;
    const BPF_REDIRECT: u64 = 23;
    // r1 = ifindex; r2 = 0; call bpf_redirect; exit
    let program: [u64; 4] = [
        0x01b7 | u64::from(ifindex) << 32,
        0x02b7,
        0x85 | BPF_REDIRECT << 32,
        0x95,
    ];
    let license = c"Dual MIT/GPL";
    let mut load = [0_u8; 120];
    load[..4].copy_from_slice(&BPF_PROG_TYPE_SCHED_CLS.to_ne_bytes());
    load[4..8].copy_from_slice(&(program.len() as u32).to_ne_bytes());
    load[8..16].copy_from_slice(&(program.as_ptr() as u64).to_ne_bytes());
    load[16..24].copy_from_slice(&(license.as_ptr() as u64).to_ne_bytes());
    let fd = bpf(BPF_PROG_LOAD, &load)?;
    // SAFETY: the kernel has just created it.
    let program = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut attach = [0_u8; 40];
    attach[..4].copy_from_slice(&ifindex.to_ne_bytes());
    attach[4..8].copy_from_slice(&program.as_raw_fd().to_ne_bytes());
    attach[8..12].copy_from_slice(&BPF_TCX_INGRESS.to_ne_bytes());
    // Without a link the program stays attached until the device is removed.
    bpf(BPF_PROG_ATTACH, &attach).map(drop)
}

fn bpf(command: libc::c_int, attributes: &[u8]) -> io::Result<libc::c_int> {
    let (at, bytes) = (attributes.as_ptr(), attributes.len());
    // SAFETY: the attributes, and what they point to, outlive the call.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, command, at, bytes) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(answer as libc::c_int)
}

/// Returns a UDP datagram of `bytes` in all, with a checksum to be completed.
pub(crate) fn datagram(bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; bytes];
    frame[..6].copy_from_slice(&MAC);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
    frame[12..14].copy_from_slice(&[8, 0]);
    let l3 = (bytes - 14) as u16;
    frame[14..24].copy_from_slice(&[0x45, 0, (l3 >> 8) as u8, l3 as u8, 0, 0, 0x40, 0, 64, 17]);
    frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    let l4 = l3 - 20;
    frame[34..40].copy_from_slice(&[0x10, 0, 0x20, 0, (l4 >> 8) as u8, l4 as u8]);
    frame
}

/// Returns a TCP segment of `bytes` in all.
pub(crate) fn segment(bytes: usize) -> Vec<u8> {
    let mut frame = datagram(bytes);
    frame[23] = 6;
    frame[46] = 0x50;
    frame[47] = 0x10;
    frame
}

pub(crate) fn header(flags: u8, gso_type: u8, halves: [u16; 4]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..2].copy_from_slice(&[flags, gso_type]);
    for (to, half) in header[2..10].chunks_exact_mut(2).zip(halves) {
        to.copy_from_slice(&half.to_le_bytes());
    }
    header
}

#[test]
fn offloads_pass_both_ways_untouched() {
    require_root_and_tun!();
    for io in [IoMethod::Vectored, IoMethod::IoUring] {
        let (_ns, taps) = turning("vmmnetoff", 1);
        let mut rig = Rig::new(taps, io);
        rig.start(ALL, 256);
        rig.post(200, 4_096);
        let tso = header(1, 1, [54, 1_448, 34, 16]);
        let uso = header(1, 5, [42, 1_400, 34, 6]);
        let checksum = header(1, 0, [0, 0, 34, 6]);
        for (header, frame) in [
            (checksum, datagram(300)),
            (tso, segment(60_000)),
            (header_ecn(tso), segment(10_000)),
            (uso, datagram(30_000)),
        ] {
            rig.send(header, &frame);
            let mut got = rig.receive();
            // The kernel may change the headers' length; buffers were merged.
            got[2..4].copy_from_slice(&header[2..4]);
            got[10..12].fill(0);
            assert_eq!(got[..HEADER], header);
            assert_eq!(got[HEADER..], frame);
        }
        assert_eq!(rig.pair().drops.values().sum::<u64>(), 0);
        assert_eq!(rig.pair().tx_frames, rig.pair().rx_frames);
    }
}

fn header_ecn(mut header: [u8; HEADER]) -> [u8; HEADER] {
    header[1] |= 0x80;
    header
}

#[test]
fn a_guest_without_offloads_gets_segments_with_checksums() {
    require_root_and_tun!();
    // The guest may send any offload; what it receives has none.
    const GUEST_SIDE: u64 = 1 << 1 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 54 | 1 << 55;
    let (_ns, taps) = turning("vmmnetplain", 1);
    let mut rig = Rig::new(taps, IoMethod::Auto);
    rig.start(ALL & !GUEST_SIDE, 256);
    rig.post(100, 4_096);
    rig.send(header(1, 1, [54, 1_000, 34, 16]), &segment(54 + 3_000));
    for number in 0..3_u8 {
        let got = rig.receive();
        assert_eq!(
            (got[0], got[1], got.len()),
            (0, 0, HEADER + 54 + 1_000),
            "{number}"
        );
        assert_ne!(got[HEADER + 50..HEADER + 52], [0, 0]);
    }
}

#[test]
fn guest_offloads_are_set_on_the_tap() {
    require_root_and_tun!();
    let (_ns, taps) = turning("vmmnetset", 1);
    let mut rig = Rig::new(taps, IoMethod::Auto);
    rig.start(ALL, 256);
    rig.post(100, 4_096);
    let tso = header(1, 1, [54, 1_000, 34, 16]);
    rig.send(tso, &segment(54 + 3_000));
    assert_eq!(rig.receive().len(), HEADER + 54 + 3_000);
    assert_eq!(rig.command(5, 0, &(1_u64 << 1).to_le_bytes()), 0);
    rig.send(tso, &segment(54 + 3_000));
    for _ in 0..3 {
        assert_eq!(rig.receive().len(), HEADER + 54 + 1_000);
    }
}

#[test]
fn queues_are_attached_to_the_tap_and_detached() {
    require_root_and_tun!();
    let (ns, taps) = turning("vmmnetmq", 4);
    let mut rig = Rig::new(taps, IoMethod::Auto);
    let attached = || {
        let link = ns.ip("-d -j link show tap0").unwrap();
        let link: serde_json::Value = serde_json::from_str(&link).unwrap();
        let data = &link[0]["linkinfo"]["info_data"];
        (
            data["numqueues"].as_u64().unwrap(),
            data["numdisabled"].as_u64().unwrap(),
        )
    };
    assert_eq!(attached(), (1, 3));
    rig.start(ALL, 64);
    for (pairs, expected) in [(4_u16, (4, 0)), (2, (2, 2)), (3, (3, 1))] {
        assert_eq!(rig.command(4, 0, &pairs.to_le_bytes()), 0);
        assert_eq!(attached(), expected);
    }
    rig.net.reset();
    assert_eq!(attached(), (1, 3));
    rig.start(ALL, 64);
}

/// The TAP gives a flow to the queue on which the flow's frames came.
#[test]
fn sixteen_queues_of_a_tap_have_each_its_own_flow() {
    require_root_and_tun!();
    const PAIRS: usize = 16;
    let (_ns, taps) = turning("vmmnet16", PAIRS);
    let mut rig = Rig::new(taps, IoMethod::Auto);
    rig.start(ALL, 64);
    assert_eq!(rig.command(4, 0, &[PAIRS as u8, 0]), 0);
    for pair in 0..PAIRS {
        rig.post_on(2 * pair, 60, 2_000);
    }
    for pair in 0..PAIRS {
        let mut frame = datagram(100);
        // A source port of its own.
        frame[34] = 0x20 + pair as u8;
        let bytes = [&[0; HEADER][..], &frame].concat();
        // The TAP learns the queue of a flow from its first frame.
        let mut tries = 0;
        loop {
            rig.add_on(2 * pair + 1, &bytes);
            let queue = &mut rig.queues[2 * pair + 1];
            queue.kick();
            queue.wait_used();
            std::thread::sleep(std::time::Duration::from_millis(5));
            if let Some((head, _)) = rig.queues[2 * pair].take_used() {
                let at = rig.queues[2 * pair].buffers[&head];
                if rig.read(at + HEADER as u64, frame.len()) == frame {
                    break;
                }
            }
            tries += 1;
            assert!(tries < 40, "nothing came back on pair {pair}");
        }
    }
    for (number, pair) in rig.counters.snapshot().pairs.iter().enumerate() {
        assert!(pair.rx_frames > 0 && pair.tx_frames > 0, "pair {number}");
    }
}

/// Each setting takes a lock of the whole host, and a guest may reset its card as often as it
/// likes. The queue that the test attaches meanwhile stays attached, which shows that the card did
/// not detach it again.
#[test]
fn what_the_tap_has_been_told_is_not_told_again() {
    require_root_and_tun!();
    let (ns, taps) = turning("vmmnetonce", 2);
    let own = taps[1].try_clone().unwrap();
    let mut rig = Rig::new(taps, IoMethod::Auto);
    // SAFETY: an ifreq is plain data, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_ifru.ifru_flags = libc::IFF_ATTACH_QUEUE as libc::c_short;
    // SAFETY: the request outlives the call and is the type TUNSETQUEUE takes.
    let done = unsafe { libc::ioctl(own.as_raw_fd(), libc::TUNSETQUEUE, &raw mut request) };
    assert_eq!(done, 0);
    for _ in 0..10 {
        rig.start(ALL, 64);
        rig.net.reset();
    }
    let link = ns.ip("-d -j link show tap0").unwrap();
    assert!(link.contains("\"numqueues\":2"), "{link}");
}

#[test]
fn a_tap_that_is_down_is_counted() {
    require_root_and_tun!();
    let (ns, taps) = turning("vmmnetdown", 1);
    let mut rig = Rig::new(taps, IoMethod::Auto);
    rig.start(ALL, 64);
    ns.ip("link set tap0 down").unwrap();
    rig.send([0; HEADER], &datagram(100));
    assert_eq!(rig.dropped("tx_link_down"), 1);
    ns.ip("link set tap0 up").unwrap();
    rig.post(1, 2_000);
    rig.send([0; HEADER], &datagram(100));
    assert_eq!(rig.receive().len(), HEADER + 100);
    ns.ip("link del tap0").unwrap();
    rig.send([0; HEADER], &datagram(100));
    assert_eq!(rig.dropped("tx_device_gone"), 1);
    rig.net.reset();
}

#[test]
fn what_is_no_fitting_tap_is_refused() {
    require_root_and_tun!();
    // Each case has a namespace. A child that another test forks holds every descriptor until its
    // exec, so a TAP may outlive its file, and its name can't be used with other flags meanwhile.
    let refusal = |namespace, flags, pairs| {
        let ns = NetNs::new(namespace).unwrap();
        let mut taps = open(&ns, flags, 1).unwrap();
        for _ in 1..pairs {
            taps.push(taps[0].try_clone().unwrap());
        }
        let config = NetConfig::new(MAC, 1500, taps);
        Net::new(config, unconfined(), NetCounters::new(pairs)).err()
    };
    assert!(matches!(
        refusal("vmmnethdr", libc::IFF_TAP | libc::IFF_NO_PI, 1),
        Some(NetError::TapFlags { .. })
    ));
    let layer_3 = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    assert!(matches!(
        refusal("vmmnetl3", layer_3, 1),
        Some(NetError::TapFlags { .. })
    ));
    assert!(matches!(
        refusal("vmmnetone", USUAL, 2),
        Some(NetError::OneQueue { wanted: 2 })
    ));
}
