//! Two builds take each other's place under traffic: not one frame meets no program.

use std::{
    fs::File,
    io::Write,
    net::UdpSocket,
    os::fd::{AsFd as _, AsRawFd},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use std::io;

use super::*;
use crate::{
    Datapath, Owner, ReadOnlyMaps, probe,
    testing::{datapath, in_netns, run, vm_spec},
    vm,
};

const PORT: u16 = 7_777;

/// Returns a UDP datagram from the guest to the host's own address on the TAP. The stack delivers
/// it unless a program drops it.
fn frame(tap_mac: [u8; 6]) -> Vec<u8> {
    let mut ip = vec![
        0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0, 10, 9, 9, 2, 10, 9, 9, 1,
    ];
    let sum: u32 = ip
        .chunks(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let mut frame = tap_mac.to_vec();
    frame.extend([2, 0, 0, 0, 0, 7, 8, 0]);
    frame.extend(ip);
    frame.extend([0x13, 0x88]);
    frame.extend(PORT.to_be_bytes());
    frame.extend([0, 12, 0, 0, b'p', b'i', b'n', b'g']);
    frame
}

fn open_tap(name: &str) -> File {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .unwrap();
    // SAFETY: a struct of integers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
    // SAFETY: the request with its struct.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert_eq!(answer, 0, "{}", io::Error::last_os_error());
    file
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Sends frames while `change` is called again and again with the ifindex of their TAP, which has
/// the program of `datapath` by then. No frame may get past it.
fn check_no_gap(datapath: &Datapath, hook: Hook, mut change: impl FnMut(usize, IfIndex)) {
    let mut tap = open_tap("g0");
    run("ip addr add 10.9.9.1/24 dev g0");
    run("ip link set g0 up");
    let network = crate::NetworkWatch::open().unwrap();
    let link = network.network().link_by_name("g0").unwrap().clone();
    let frame = frame(link.mac.unwrap());
    let host = UdpSocket::bind(("10.9.9.1", PORT)).unwrap();
    host.set_read_timeout(Some(Duration::from_secs(5))).unwrap();

    // Positive control: without a program, it arrives.
    tap.write_all(&frame).unwrap();
    host.recv(&mut [0; 64]).unwrap();
    host.set_nonblocking(true).unwrap();

    datapath
        .attach(Program::GuestEgress, link.ifindex, hook)
        .unwrap();
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        // Also if a change fails: the scope waits for the thread.
        let _stop = StopAtEnd(&stop);
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                tap.write_all(&frame).unwrap();
                sent.fetch_add(1, Relaxed);
            }
        });
        for turn in 0..200 {
            let before = sent.load(Relaxed);
            change(turn, link.ifindex);
            // Some frames meet each.
            while sent.load(Relaxed) < before + 20 {
                std::thread::yield_now();
            }
        }
    });
    assert!(sent.load(Relaxed) >= 4_000);
    let leaked = host.recv(&mut [0; 64]);
    assert!(leaked.is_err(), "a frame met no program");
}

fn check_no_gap_between_builds(hook: Hook) {
    let first = datapath();
    std::fs::write(
        first.paths().run_dir.join(crate::paths::BUILD_FILE),
        "another",
    )
    .unwrap();
    let second = datapath();
    check_no_gap(&first, hook, |turn, tap| {
        [&second, &first][turn % 2]
            .attach(Program::GuestEgress, tap, hook)
            .unwrap();
    });
}

#[test]
fn no_frame_meets_no_program_under_a_link() {
    in_netns("no_frame_meets_no_program_under_a_link", || {
        check_no_gap_between_builds(Hook::Tcx);
    });
}

#[test]
fn no_frame_meets_no_program_under_a_filter() {
    in_netns("no_frame_meets_no_program_under_a_filter", || {
        check_no_gap_between_builds(Hook::Clsact);
    });
}

/// Somebody comes in front 100 times, and each time the program moves.
#[test]
fn no_frame_meets_no_program_while_it_moves_to_the_front() {
    in_netns(
        "no_frame_meets_no_program_while_it_moves_to_the_front",
        || {
            let datapath = datapath();
            let other = probe::pass_program().unwrap();
            let mut theirs: Option<OwnedFd> = None;
            check_no_gap(&datapath, Hook::Tcx, |turn, tap| match turn % 2 {
                0 => {
                    // Not by its descriptor alone: a process that another test forked has a copy.
                    if let Some(theirs) = theirs.take() {
                        bpf::link_detach(theirs.as_fd()).unwrap();
                    }
                    let first = bpf::ChainPosition::First;
                    theirs = Some(bpf::link_create_tcx(other.as_fd(), tap, first).unwrap());
                }
                _ => datapath.move_to_front(Program::GuestEgress, tap).unwrap(),
            });
        },
    );
}

/// Somebody's filter comes in front 100 times, and each time slipgate's moves. Some processes die in a move:
/// a stand-in is left, behind or without the filter.
#[test]
fn no_frame_meets_no_program_while_a_filter_moves_to_the_front() {
    const EGRESS: Program = Program::GuestEgress;
    in_netns(
        "no_frame_meets_no_program_while_a_filter_moves_to_the_front",
        || {
            let datapath = datapath();
            let (theirs, other) = (
                datapath.paths().pin("theirs"),
                probe::pass_program().unwrap(),
            );
            let ours = datapath.paths().pin(EGRESS.name());
            let tc = |what: &str, handle: usize, program: Option<&Path>| {
                let filter = format!("dev g0 ingress pref 1 handle {handle} bpf");
                let program = program.map(|pin| format!("da pinned {}", pin.display()));
                run(&format!(
                    "tc filter {what} {filter} {}",
                    program.unwrap_or_default()
                ));
            };
            check_no_gap(&datapath, Hook::Clsact, |turn, tap| {
                if turn % 2 == 0 {
                    if turn % 4 == 2 {
                        tc("add", 0x5348, Some(&ours));
                    }
                    if turn % 8 == 2 {
                        tc("del", 0x5347, None);
                    }
                    // The one that comes last at a priority runs first.
                    bpf::obj_pin(other.as_fd(), &theirs).unwrap();
                    tc("add", turn + 1, Some(&theirs));
                    std::fs::remove_file(&theirs).unwrap();
                    let standing = datapath.standing(EGRESS, tap).unwrap();
                    assert!(!standing.is_first(), "{standing}");
                } else {
                    datapath.move_filter_to_front(EGRESS, tap).unwrap();
                    let standing = datapath.standing(EGRESS, tap).unwrap();
                    assert!(standing.is_first(), "{standing}");
                    let filters = run("tc filter show dev g0 ingress");
                    assert_eq!(filters.matches("handle 0x534").count(), 1, "{filters}");
                    tc("del", turn, None);
                }
            });
        },
    );
}

/// A process dies while a twin is in its program's place: no process has the array open then, by which
/// the twin calls the program.
#[test]
fn a_twin_does_its_programs_work_when_no_process_is_left() {
    in_netns(
        "a_twin_does_its_programs_work_when_no_process_is_left",
        || {
            const EGRESS: Program = Program::GuestEgress;
            let first = datapath();
            let mut tap = open_tap("g0");
            run("ip link set g0 up");
            let device = crate::NetworkWatch::open().unwrap();
            let device = device.network().link_by_name("g0").unwrap().clone();
            let paths = first.paths().clone();
            let owner = Owner::take(first.maps(), &paths, &[]).unwrap();
            let spec = vm::VmSpec {
                tap_ifindex: Some(device.ifindex),
                ..vm_spec("a")
            };
            let row = vm::open(first.maps(), &owner, &spec).unwrap().row;
            let by_twin = bpf::link_create_tcx(
                first.twin(EGRESS).unwrap(),
                device.ifindex,
                bpf::ChainPosition::First,
            )
            .unwrap();
            let attached = Attached {
                program: EGRESS,
                ifindex: device.ifindex,
                by: AttachedBy::Link,
            };
            let pin = paths.pin(&attached.pin_name());
            bpf::obj_pin(by_twin.as_fd(), &pin).unwrap();
            let twin = program_id(first.twin(EGRESS).unwrap()).unwrap();
            drop((first, by_twin, owner));

            let maps = ReadOnlyMaps::open_pinned(&paths.pin_dir).unwrap();
            let mut send_and_check = |sent: u64| {
                // Its source address is not the VM's.
                tap.write_all(&frame(device.mac.unwrap())).unwrap();
                let drops = maps.drops(row).unwrap();
                assert_eq!(drops.spoofed.packets, sent, "{drops:?}");
            };
            assert_eq!(link::program_at(&pin, device.ifindex), Some(twin));
            send_and_check(1);
            let second = datapath();
            let program = program_id(second.program(EGRESS).unwrap()).unwrap();
            assert_eq!(link::program_at(&pin, device.ifindex), Some(program));
            send_and_check(2);
        },
    );
}
