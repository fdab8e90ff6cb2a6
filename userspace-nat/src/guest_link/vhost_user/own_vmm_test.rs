//! Tests of the parts of the link that only slipgate's own VMM uses.
use std::os::fd::{AsFd as _, AsRawFd as _};

use nix::sys::{
    eventfd::{EfdFlags, EventFd},
    memfd::{MFdFlags, memfd_create},
};
use vm_memory::{Bytes as _, GuestAddress};

use super::{
    fake::{ALL, FakeVmm, MEMORY, MEMORY_LEN},
    message::request,
    session::{TX, feature},
    tests::tcp,
    *,
};
use crate::{guest_link::stream::ENOUGH_QUEUED, port::MAX_FRAME};

/// Where buffers are, behind the rings.
const BUFFERS: u64 = MEMORY + 0x1_0000;
const RX: usize = 0;

fn ready(features: u64) -> FakeVmm {
    let mut vmm = FakeVmm::own();
    vmm.set_up(features);
    assert_eq!(vmm.wrong, None);
    assert!(vmm.is_connected());
    vmm
}

/// Gives so many buffers of 64 KiB and more to the ring for the guest.
fn give_buffers(vmm: &mut FakeVmm, count: u16) {
    for nth in 0..count {
        vmm.make_available(
            RX,
            nth,
            &[(BUFFERS + 0x1_1000 * u64::from(nth), 0x1_1000, true)],
        );
    }
}

fn start_again(vmm: &mut FakeVmm, features: u64) {
    vmm.set_up(features);
    assert_eq!(vmm.wrong, None);
}

#[test]
fn what_comes_during_a_pause_waits_for_its_end() {
    let mut vmm = ready(ALL);
    give_buffers(&mut vmm, 2);
    assert_eq!(vmm.link.send(&tcp(100)), None);
    vmm.turn();
    assert_eq!(vmm.used(RX).len(), 1);
    vmm.set_base(RX, 1);
    assert_eq!((vmm.stop(RX), vmm.stop(TX)), (1, 0));
    assert_eq!(
        vmm.link.queued(),
        Some(usize::MAX),
        "streams wait in the host's sockets"
    );
    assert_eq!(vmm.link.send(&tcp(200)), None);
    vmm.turn();
    assert_eq!(vmm.used(RX).len(), 1);
    start_again(&mut vmm, ALL);
    vmm.turn();
    assert_eq!(vmm.used(RX).len(), 2);
    assert!(
        vmm.link
            .queued()
            .is_some_and(|queued| queued < ENOUGH_QUEUED)
    );
}

#[test]
fn a_reset_forgets_what_waits_and_its_guest_gets_nothing_until_the_next_driver() {
    let mut vmm = ready(ALL);
    assert_eq!(vmm.link.send(&tcp(100)), None);
    // Counted as the 10 packets that it would have been.
    let long = tcp(14_600);
    assert_eq!(vmm.link.send(&long), None);
    vmm.ask(request::RESET_OWNER, &[], &[]);
    let lost: Vec<_> = vmm.lost.iter().map(|it| (it.reason, it.len)).collect();
    let lens = [tcp(100).len(), long.len()];
    assert_eq!(lost, lens.map(|len| (DropReason::StaleVm, len)));
    assert_eq!(
        vmm.lost[1].vnet,
        VirtioNetHdr::decode(long.first_chunk().unwrap())
    );
    assert_eq!(vmm.link.send(&tcp(100)), Some(DropReason::StaleVm));
    start_again(&mut vmm, ALL);
    give_buffers(&mut vmm, 2);
    vmm.kick(RX);
    assert!(vmm.used(RX).is_empty());
    assert_eq!(vmm.link.send(&tcp(100)), None);
    vmm.turn();
    assert_eq!(vmm.used(RX).len(), 1);
}

#[test]
fn what_waits_is_cut_when_the_driver_turns_offloads_off() {
    let mut vmm = ready(ALL);
    assert_eq!(vmm.link.send(&tcp(14_600)), None);
    let without = ALL & !(feature::GUEST_TSO4 | feature::GUEST_TSO6);
    vmm.ask(request::SET_FEATURES, &without.to_ne_bytes(), &[]);
    for nth in 0..12 {
        vmm.make_available(
            RX,
            nth,
            &[(BUFFERS + 0x1000 * u64::from(nth), 0x1000, true)],
        );
    }
    vmm.kick(RX);
    let used = vmm.used(RX);
    assert_eq!(used.len(), 10);
    assert!(used.iter().all(|(_, len)| *len < 1_600), "{used:?}");
}

#[test]
fn a_broken_ring_is_told_once() {
    let mut vmm = ready(ALL);
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let broken = EventFd::from_flags(flags).unwrap();
    let told = (TX as u64).to_ne_bytes();
    vmm.ask(request::SET_VRING_ERR, &told, &[broken.as_fd().as_raw_fd()]);
    assert!(broken.read().is_err());
    vmm.make_available(TX, 0, &[(MEMORY + MEMORY_LEN, 100, false)]);
    vmm.kick(TX);
    let mut into = vec![0; MAX_FRAME];
    assert_eq!(vmm.next(&mut into), Packet::Malformed(0));
    vmm.turn();
    assert_eq!(broken.read(), Ok(1));
    vmm.kick(TX);
    assert_eq!(vmm.next(&mut into), Packet::Nothing);
    vmm.turn();
    assert!(broken.read().is_err());
}

#[test]
fn a_broken_ring_is_not_paused() {
    let mut vmm = ready(ALL);
    vmm.make_available(RX, 0, &[(MEMORY + MEMORY_LEN, 2_000, true)]);
    assert_eq!(vmm.link.send(&tcp(100)), None);
    vmm.turn();
    let lost: Vec<_> = vmm.lost.iter().map(|it| it.reason).collect();
    assert_eq!(lost, [DropReason::StaleVm]);
    assert_eq!(vmm.link.send(&tcp(100)), Some(DropReason::StaleVm));
    vmm.stop(RX);
    assert_eq!(vmm.link.send(&tcp(100)), Some(DropReason::StaleVm));
}

#[test]
fn a_driver_without_an_interrupt_is_not_told() {
    let mut vmm = ready(ALL);
    let [file, ..] = vmm.fds();
    let at = MEMORY_LEN - 4_096;
    vmm.ask(request::SET_TALLY, &at.to_ne_bytes(), &[file]);
    let none = RX as u64 | 1 << 8;
    vmm.ask(request::SET_VRING_CALL, &none.to_ne_bytes(), &[]);
    let word = |vmm: &FakeVmm, nth: u64| {
        let at = GuestAddress(MEMORY + at + 8 * nth);
        vmm.memory.read_obj::<u64>(at).unwrap()
    };
    let before = word(&vmm, 5);
    give_buffers(&mut vmm, 1);
    assert_eq!(vmm.link.send(&tcp(100)), None);
    vmm.turn();
    assert_eq!((word(&vmm, 4), word(&vmm, 5)), (0, before + 1));
}

#[test]
fn files_that_can_be_shortened_are_refused() {
    let file = memfd_create(c"any", MFdFlags::MFD_CLOEXEC).unwrap();
    let file = std::fs::File::from(file);
    file.set_len(MEMORY_LEN).unwrap();
    let count = 1_u64.to_ne_bytes();
    let table = [
        &count[..],
        &[MEMORY, MEMORY_LEN, MEMORY, 0]
            .map(u64::to_ne_bytes)
            .concat(),
    ];
    for (number, body) in [
        (request::SET_TALLY, 0_u64.to_ne_bytes().to_vec()),
        (request::SET_MEM_TABLE, table.concat()),
    ] {
        let mut vmm = FakeVmm::own();
        vmm.ask(number, &body, &[file.as_raw_fd()]);
        assert_eq!(vmm.wrong, Some(Wrong::Memory));
    }
}

#[test]
fn it_reads_what_the_rings_have_carried() {
    let mut vmm = ready(ALL);
    let [file, ..] = vmm.fds();
    let at = MEMORY_LEN - 4_096;
    vmm.ask(request::SET_TALLY, &at.to_ne_bytes(), &[file]);
    assert_eq!(vmm.wrong, None);
    give_buffers(&mut vmm, 1);
    let frame = tcp(1_000);
    let (header, l2) = frame.split_at(VNET_LEN);
    assert_eq!(vmm.link.send(&frame), None);
    vmm.poke(BUFFERS + 0x8_0000, &[header, &[0; 2], l2].concat());
    vmm.make_available(
        TX,
        0,
        &[(BUFFERS + 0x8_0000, frame.len() as u32 + 2, false)],
    );
    vmm.kick(TX);
    let mut into = vec![0; MAX_FRAME];
    assert_eq!(vmm.next(&mut into), Packet::Frame(frame.len()));
    vmm.turn();
    let word = |nth: u64| {
        let at = GuestAddress(MEMORY + at + 8 * nth);
        vmm.memory.read_obj::<u64>(at).unwrap()
    };
    let len = l2.len() as u64;
    assert!(word(0) >= 1, "kicks");
    assert_eq!([word(1), word(2), word(3)], [1, len, 1], "to the guest");
    assert_eq!([word(6), word(7), word(8)], [1, len, 1], "from it");
    assert_eq!(word(4) + word(5), 1, "called or not");
}

#[test]
fn counts_are_for_slipgates_own_vmm_and_within_its_file() {
    let mut other = FakeVmm::new();
    let [file, ..] = other.fds();
    other.ask(request::SET_TALLY, &0_u64.to_ne_bytes(), &[file]);
    assert_eq!(other.wrong, Some(Wrong::Request(request::SET_TALLY)));
    for at in [MEMORY_LEN, u64::MAX, 8] {
        let mut vmm = FakeVmm::own();
        let [file, ..] = vmm.fds();
        vmm.ask(request::SET_TALLY, &at.to_ne_bytes(), &[file]);
        assert_eq!(vmm.wrong, Some(Wrong::Memory), "{at}");
        assert!(vmm.is_closed());
        assert_eq!(vmm.link.send(&tcp(1)), Some(DropReason::StaleVm));
    }
}

#[test]
fn it_has_one_pair() {
    let mut vmm = ready(ALL);
    let third = [2_u32, 64].map(u32::to_ne_bytes).concat();
    vmm.ask(request::SET_VRING_NUM, &third, &[]);
    assert_eq!(vmm.wrong, Some(Wrong::Body(request::SET_VRING_NUM)));
}

#[test]
fn one_that_has_gone_is_the_last() {
    let mut vmm = ready(ALL);
    vmm.say(&[0xff; 12], &[]);
    assert_eq!(vmm.wrong, Some(Wrong::Header));
    assert!(vmm.link.is_over);
    assert_eq!(vmm.link.send(&tcp(1)), Some(DropReason::StaleVm));
}
