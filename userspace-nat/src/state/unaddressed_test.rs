use super::*;
use crate::{
    fake::{FakeDatapath, Kernel},
    port::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, command},
};
use slipgate_abi::{Ip4, VmRef};

const ROW: VmRow = VmRow::new(1);
const GUEST: [u8; 4] = [10, 0, 2, 15];

fn frame(code: Command, id: u32, ethertype: u16, l3: &[u8]) -> Vec<u8> {
    let mut bytes = VirtioNetHdr::default().encode().to_vec();
    bytes.extend(command(code, ROW, id).encode());
    bytes.extend(ethertype.to_be_bytes());
    bytes.extend(l3);
    bytes
}

fn ipv4(to: [u8; 4]) -> Vec<u8> {
    let mut packet = vec![0; 40];
    packet[0] = 0x45;
    packet[16..20].copy_from_slice(&to);
    packet
}

fn ipv6(first: u8) -> Vec<u8> {
    let mut packet = vec![0; 60];
    packet[0] = 0x60;
    packet[24] = first;
    packet
}

/// Tables with a VM whose MAC is not known.
fn tables() -> FakeDatapath {
    let kernel = Kernel::new(slipgate_abi::maps::SLOTS_PER_CHUNK);
    let ip = |octets| Ip4 { octets };
    kernel
        .borrow_mut()
        .add_vm(1, 101, ip(GUEST), ip([10, 0, 2, 2]), 1_500);
    let tables = FakeDatapath::new(&kernel, 0, 1);
    set_mac(&tables, VmRef::UNKNOWN_MAC);
    tables
}

fn set_mac(tables: &FakeDatapath, mac: [u8; 6]) {
    let vm = tables.vm(ROW).unwrap();
    // SAFETY: a live row; one thread.
    unsafe { (*vm.as_ptr()).guest_mac = mac };
}

#[test]
fn what_is_for_one_guest_waits_and_nothing_else() {
    let tables = tables();
    let mut waiting = Unaddressed::default();
    let mut keeps =
        |code, ethertype, l3: &[u8]| waiting.keeps(&tables, &frame(code, 101, ethertype, l3), 0);
    assert!(keeps(Command::Deliver, ETHERTYPE_IPV4, &ipv4(GUEST)));
    assert!(keeps(Command::ToGuest, ETHERTYPE_IPV4, &ipv4(GUEST)));
    assert!(keeps(Command::ToGuest, ETHERTYPE_IPV6, &ipv6(0xfd)));
    assert!(!keeps(Command::ToGuest, ETHERTYPE_IPV6, &ipv6(0xff)));
    assert!(!keeps(Command::ToGuest, ETHERTYPE_IPV4, &ipv4([0xff; 4])));
    assert!(!keeps(Command::ToGuest, ETHERTYPE_IPV4, &[0x45]));
    assert!(!keeps(Command::ToGuest, ETHERTYPE_ARP, &[0; 28]));
    assert!(!keeps(Command::Forward, ETHERTYPE_IPV4, &ipv4(GUEST)));
    assert_eq!(waiting.take_all().len(), 3);
    set_mac(&tables, [2, 0, 0, 0, 0, 1]);
    let known = frame(Command::Deliver, 101, ETHERTYPE_IPV4, &ipv4(GUEST));
    assert!(!waiting.keeps(&tables, &known, 0));
    assert!(waiting.is_empty());
}

#[test]
fn what_finds_no_room_is_sent_as_it_is() {
    let tables = tables();
    let mut waiting = Unaddressed::default();
    let of = |id| frame(Command::Deliver, id, ETHERTYPE_IPV4, &ipv4(GUEST));
    for _ in 0..MOST_FRAMES {
        assert!(waiting.keeps(&tables, &of(101), 0));
    }
    assert!(!waiting.keeps(&tables, &of(101), 0));
    assert_eq!(waiting.take_all().len(), MOST_FRAMES);
    let long = vec![0x45; 40_000];
    let long = frame(Command::Deliver, 101, ETHERTYPE_IPV4, &long);
    assert!(waiting.keeps(&tables, &long, 0));
    assert!(!waiting.keeps(&tables, &long, 0), "bytes are bounded too");
    assert!(
        !waiting.keeps(&tables, &of(102), 0),
        "another VM of the row"
    );
}

#[test]
fn a_frame_waits_until_the_mac_is_known_or_for_two_seconds() {
    let tables = tables();
    let mut waiting = Unaddressed::default();
    let first = frame(Command::Deliver, 101, ETHERTYPE_IPV4, &ipv4(GUEST));
    assert!(waiting.keeps(&tables, &first, SECOND_NS));
    assert_eq!(waiting.next_deadline_ns(), Some(SECOND_NS), "asked at once");
    assert_eq!(waiting.take_due_to_ask(SECOND_NS), [ROW]);
    assert!(
        waiting
            .take_due_to_ask(SECOND_NS + ASK_INTERVAL_NS - 1)
            .is_empty()
    );
    assert_eq!(waiting.take_due_to_ask(SECOND_NS + ASK_INTERVAL_NS), [ROW]);
    let end_ns = SECOND_NS + PATIENCE_NS;
    assert!(waiting.take_due(&tables, end_ns - 1).is_empty());
    let due = waiting.take_due(&tables, end_ns);
    assert_eq!(due, std::slice::from_ref(&first));
    assert!(waiting.keeps(&tables, &first, end_ns));
    set_mac(&tables, [2, 0, 0, 0, 0, 1]);
    // What comes now is behind what waits.
    let second = frame(Command::ToGuest, 101, ETHERTYPE_IPV4, &ipv4(GUEST));
    assert!(waiting.keeps(&tables, &second, end_ns));
    assert_eq!(waiting.take_due(&tables, end_ns), [first, second]);
    assert!(waiting.is_empty() && waiting.next_deadline_ns().is_none());
}
