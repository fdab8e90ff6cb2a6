//! Tests of VMs that fall idle and are busy again.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{Ip4, Refusal, SlotIndex, VmId, VmRow, activity::LastPackets, tcp::Flags};
use slipgate_model::Subject;
use slipgate_policy::{Action, Idle, Settings};

use super::{
    forwards::{HTTP, with_forwards},
    reload::policy,
    rig::*,
};
use crate::{
    clock::{Clock as _, SECOND_NS},
    datapath::Tables as _,
    event_loop::activity::SLOTS_PER_LOOK,
    flow::EndReason,
    stats::{Tally, Traffic},
    vm::VmSpec,
};

/// A DNS question.
const QUESTION: [u8; 19] = *b"\0\x07\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01";

/// Has a VM be told idle after so many seconds of silence.
fn watch(rig: &mut Rig, row: u16, seconds: u32, is_idle: bool) {
    let vm = VmSpec {
        idle_after_s: seconds,
        is_idle,
        ..spec(row, &Setup::default())
    };
    rig.tell(move |engine| engine.set_vm(vm));
}

/// Lets time pass, a second at a time. Returns which VMs fell idle (true) or were busy.
fn pass(rig: &mut Rig, seconds: u64) -> Vec<(u32, bool)> {
    for _ in 0..seconds {
        rig.pass(SECOND_NS);
    }
    std::mem::take(&mut rig.broker.idle)
}

#[test]
fn a_vm_is_idle_after_silence_and_busy_with_its_next_packet() {
    let mut rig = Rig::new();
    watch(&mut rig, 1, 5, false);
    rig.connect(40_000, 1);
    assert_eq!(pass(&mut rig, 3), []);
    assert_eq!(pass(&mut rig, 4), [(101, true)]);
    assert_eq!(pass(&mut rig, 4), [], "it is told once");
    // A packet that only the kernel sees.
    let slot = rig.engine.core.nat.flows.slots_of(VmRow::new(1))[0];
    let now_ns = rig.engine.clock.now_ns();
    let live = rig.engine.core.nat.datapath.slot(slot);
    live.rx_last_ns().store(now_ns, Relaxed);
    assert_eq!(pass(&mut rig, 2), [(101, false)]);
    assert_eq!(pass(&mut rig, 6), [(101, true)]);
    // One that the engine sees, and no flow comes of.
    rig.guest(1, &syn((GUEST, 40_001), (GATEWAY, 1), 1));
    assert_eq!(pass(&mut rig, 2), [(101, false)]);
    // Nobody asks any more, and other VMs were never asked about.
    watch(&mut rig, 1, 0, false);
    assert_eq!(pass(&mut rig, 20), []);
    assert_eq!(rig.engine.activity.next_deadline_ns(), None);
}

#[test]
fn the_next_engine_goes_on_from_what_was_told() {
    let mut rig = Rig::new();
    watch(&mut rig, 1, 5, true);
    watch(&mut rig, 2, 5, false);
    assert_eq!(pass(&mut rig, 3), []);
    rig.connect(40_000, 1);
    assert_eq!(pass(&mut rig, 1), [(101, false)]);
    rig.tell(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
    assert_eq!(pass(&mut rig, 9), [(102, true)]);
}

/// Puts a policy in force for all VMs, and has VM 1 be told idle after five seconds.
fn ignoring(rig: &mut Rig, keepalive: bool, refused: bool) {
    let idle = Idle {
        ignores_keepalive: keepalive,
        ignores_refused: refused,
    };
    let settings = Settings {
        idle,
        ..Settings::default()
    };
    let policy = policy(Action::Allow, &["deny 9.9.9.0/24"]).with(settings);
    rig.reload(vec![policy], 0, [0, 0, 0]);
    watch(rig, 1, 5, false);
}

/// Sends for so many seconds what `each` sends in one. Returns whether the VM fell idle.
fn falls_idle(rig: &mut Rig, seconds: u32, mut each: impl FnMut(&mut Rig)) -> bool {
    rig.broker.idle.clear();
    for _ in 0..seconds {
        each(rig);
        rig.pass(SECOND_NS);
    }
    std::mem::take(&mut rig.broker.idle).contains(&(101, true))
}

#[test]
fn arp_and_dhcp_are_no_activity() {
    let mut rig = Rig::new();
    watch(&mut rig, 1, 5, true);
    let stats = rig.engine.core.nat.datapath.stats(VmRow::new(1));
    for tally in [Tally::ArpAnswer, Tally::DhcpMessage] {
        stats.traffic(Traffic::RxFromGuest, 1, 300);
        stats.tally(tally, 1);
    }
    assert_eq!(pass(&mut rig, 3), []);
    // Frames of no flow of the guest's are none either; a question is.
    rig.guest(1, &udp((GUEST, 5_000), (GATEWAY, 53), &QUESTION));
    assert_eq!(pass(&mut rig, 2), [(101, false)]);
}

/// RFC 9293 section 3.8.4: with no octet, and with the one before.
#[test]
fn keep_alives_keep_a_vm_busy_unless_its_policy_ignores_them() {
    for keepalive in [false, true] {
        let mut rig = Rig::new();
        ignoring(&mut rig, keepalive, false);
        let nat = rig.connect(40_000, 7);
        let guest = (GUEST, 40_000);
        let of_guest = |rig: &mut Rig| {
            assert_eq!(
                rig.guest(1, &ack(guest, SERVER, 0, 7, 9_001)),
                Handling::Fast
            );
            assert_eq!(rig.world(&ack(SERVER, nat, 0, 9_001, 8)), Handling::Fast);
        };
        let of_server = |rig: &mut Rig| {
            rig.world(&tcp(SERVER, nat, Flags::ACK, 9_000, 8, &[], b"x"));
            rig.guest(1, &ack(guest, SERVER, 0, 8, 9_001));
        };
        assert_eq!(falls_idle(&mut rig, 12, of_guest), keepalive);
        assert_eq!(falls_idle(&mut rig, 12, of_server), keepalive);
        if !keepalive {
            continue;
        }
        rig.broker.silences.clear();
        // A byte, of either side, at once.
        for byte in 0..2 {
            assert_eq!(pass(&mut rig, 1), []);
            rig.world(&tcp(SERVER, nat, Flags::ACK, 9_001 + byte, 8, &[], b"x"));
            assert_eq!(pass(&mut rig, 2), [(101, false)]);
            assert_eq!(pass(&mut rig, 6), [(101, true)]);
        }
        let told = rig.broker.silences.clone();
        let flows: Vec<_> = told.iter().map(|it| it.flows).collect();
        assert_eq!(flows, [1; 4]);
        assert!(told[0].last_to_guest_ms.unwrap() < 2_000, "{told:?}");
        assert!(told[1].last_to_guest_ms.unwrap() >= 5_000, "{told:?}");
        rig.guest(1, &tcp(guest, SERVER, Flags::ACK, 8, 9_003, &[], b"y"));
        assert_eq!(pass(&mut rig, 2), [(101, false)]);
    }
}

/// What a flow was asked for is taken back, by the same engine and by its successor.
#[test]
fn keep_alives_count_again_once_the_policy_says_so() {
    for restarts in [false, true] {
        let mut rig = Rig::new();
        ignoring(&mut rig, true, false);
        let nat = rig.connect(40_000, 7);
        let keep_alive = |rig: &mut Rig| {
            rig.guest(1, &ack((GUEST, 40_000), SERVER, 0, 7, 9_001));
            rig.world(&ack(SERVER, nat, 0, 9_001, 8));
        };
        assert!(falls_idle(&mut rig, 12, keep_alive));
        if restarts {
            rig = rig.restart(&Setup::default()).0;
        }
        ignoring(&mut rig, false, false);
        pass(&mut rig, 2);
        keep_alive(&mut rig);
        assert_eq!(ages(&mut rig), [Some(0), Some(0)]);
        rig.broker.idle.clear();
        assert!(!falls_idle(&mut rig, 12, keep_alive));
    }
}

/// The last packets of VM 1 that count, until now; seconds ago.
fn ages(rig: &mut Rig) -> [Option<u64>; 2] {
    let kernel = rig.kernel.borrow();
    let noted = kernel.stats(1).last_packets();
    let slots = rig.engine.core.nat.flows.slots_of(VmRow::new(1));
    let now_ns = rig.engine.clock.now_ns();
    let of_live = |slot: &SlotIndex| LastPackets::of_live(kernel.slot(*slot), now_ns);
    let last = slots.iter().map(of_live).fold(noted, LastPackets::max);
    let age = |ns: u64| (ns > 0).then(|| (now_ns - ns) / SECOND_NS);
    [age(last.from_guest_ns), age(last.to_guest_ns)]
}

#[test]
fn last_packets_of_each_way_outlive_their_flow() {
    let mut rig = Rig::new();
    assert_eq!(ages(&mut rig), [None, None]);
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    assert_eq!(ages(&mut rig), [Some(0), None]);
    pass(&mut rig, 10);
    let sent = rig.at_world().pop().unwrap();
    let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    rig.world(&udp(SERVER, nat, b"y"));
    pass(&mut rig, 3);
    assert_eq!(ages(&mut rig), [Some(13), Some(3)]);
    rig.tell(|engine| engine.cut(Subject::Vm { row: VmRow::new(1) }))
        .unwrap();
    pass(&mut rig, 2);
    assert_eq!((rig.flows(), ages(&mut rig)), (0, [Some(15), Some(5)]));
}

#[test]
fn what_the_world_sends_and_nobody_accepts_keeps_no_vm_busy() {
    let mut rig = with_forwards(Setup::default());
    watch(&mut rig, 1, 5, false);
    let (web, dns) = ((GUEST, 80), (GUEST, 5_300));
    let mut port = 20_000;
    // A closed port, one that does not answer, and half-open ones.
    assert!(falls_idle(&mut rig, 12, |rig| {
        port += 3;
        for more in 0..3 {
            let from = (SERVER.0, port + more);
            rig.world(&syn(from, HTTP, 5_000));
            match more {
                0 => drop(rig.guest(1, &ack(web, from, Flags::RST, 0, 5_001))),
                1 => {}
                _ => {
                    rig.guest(1, &syn_ack(web, from, 700, 5_001));
                    rig.world(&tcp(from, HTTP, Flags::RST, 5_001, 0, &[], &[]));
                }
            }
        }
        // A datagram for which the guest has no socket.
        let datagram = udp((SERVER.0, port), (NAT, 5_353), b"x");
        rig.world(&datagram);
        let delivered = udp((SERVER.0, port), dns, b"x");
        rig.guest(1, &icmp_error(GUEST, SERVER.0, 3, 3, &delivered));
    }));
    // One that it may have taken, and a client that is there.
    assert!(!falls_idle(&mut rig, 8, |rig| {
        rig.world(&udp((SERVER.0, 9), (NAT, 5_353), b"x"));
    }));
    assert_eq!(pass(&mut rig, 7), [(101, true)]);
    let from = (SERVER.0, 9_999);
    rig.world(&syn(from, HTTP, 5_000));
    rig.guest(1, &syn_ack(web, from, 700, 5_001));
    rig.world(&ack(from, HTTP, 0, 5_001, 701));
    assert_eq!(pass(&mut rig, 2), [(101, false)]);
}

#[test]
fn what_a_guest_is_refused_counts_unless_its_policy_ignores_it() {
    let denied = (
        Ip4 {
            octets: [9, 9, 9, 9],
        },
        443,
    );
    for refused in [false, true] {
        let mut rig = Rig::new();
        ignoring(&mut rig, false, refused);
        let asks = |rig: &mut Rig| {
            rig.guest(1, &syn((GUEST, 40_000), denied, 7));
            // To the gateway, which has no such port.
            rig.guest(1, &syn((GUEST, 40_001), (GATEWAY, 1), 7));
        };
        assert_eq!(falls_idle(&mut rig, 8, asks), refused);
        assert!(rig.refused(1, Refusal::Rule) > 0);
        // The admitted one counts.
        rig.guest(1, &syn((GUEST, 40_002), SERVER, 7));
        rig.broker.idle.clear();
        pass(&mut rig, 2);
        assert!(!falls_idle(&mut rig, 2, |_| {}));
    }
}

/// A VM with this many flows, which is idle after so long, or which nobody asks about with 0.
fn with_flows(flows: usize, idle_after_s: u32) -> Rig {
    let mut rig = Rig::with(Setup {
        slots: 16_384,
        max_flows: 10_000,
        ..Setup::default()
    });
    let vm = VmSpec {
        idle_after_s,
        max_flows: 10_000,
        ..spec(1, &Setup::default())
    };
    rig.tell(move |engine| engine.set_vm(vm));
    for port in 0..flows as u16 {
        rig.guest(1, &syn((GUEST, 10_000 + port), (PEER, 443 + port % 4), 1));
    }
    assert_eq!(rig.flows(), flows);
    rig
}

/// Seconds until the VM is idle.
fn idle_after(flows: usize) -> usize {
    let mut rig = with_flows(flows, 5);
    (1..20).find(|_| !pass(&mut rig, 1).is_empty()).unwrap()
}

#[test]
fn many_silent_flows_are_read_over_several_looks() {
    let few = idle_after(10);
    assert_eq!(idle_after(SLOTS_PER_LOOK + 500), few + 1);
    assert_eq!(idle_after(2 * SLOTS_PER_LOOK + 500), few + 2);
}

/// The flow that alone is busy may be moved, or begin, while the others are read.
#[test]
fn a_busy_flow_among_many_silent_ones_is_not_missed() {
    let few = idle_after(10);
    for is_new in [false, true] {
        let mut rig = with_flows(SLOTS_PER_LOOK + 500, 5);
        let row = VmRow::new(1);
        let slots = |rig: &Rig| rig.engine.core.nat.flows.slots_of(row).to_vec();
        for _ in 0..few {
            assert!(pass(&mut rig, 1).is_empty());
        }
        // The first look has read all but the first ones.
        let now_ns = rig.engine.clock.now_ns();
        if is_new {
            rig.guest(1, &syn((GUEST, 9_000), (PEER, 443), 1));
        } else {
            let (first, last) = (slots(&rig)[3], *slots(&rig).last().unwrap());
            let nat = &mut rig.engine.core.nat;
            nat.datapath.slot(first).rx_last_ns().store(now_ns, Relaxed);
            nat.flows
                .unlink(&mut nat.datapath, last, EndReason::Policy, now_ns);
        }
        for _ in 0..3 {
            assert!(pass(&mut rig, 1).is_empty(), "{is_new}");
        }
    }
}

#[test]
fn a_vms_activity_is_read_from_its_own_flows_a_page_at_a_time() {
    let mut rig = Rig::new();
    let (row, other) = (VmRow::new(1), VmRow::new(2));
    let before_ns = rig.engine.clock.now_ns();
    rig.connect(40_000, 1);
    rig.pass(3 * SECOND_NS);
    let page = rig.engine.activity_of(row, 0).unwrap();
    let age_ms = (rig.engine.clock.now_ns() - before_ns) / 1_000_000;
    assert_eq!((page.silence.flows, page.next), (1, None));
    let silent_ms = page.silence.last_from_guest_ms.unwrap();
    assert!((3_000..=age_ms).contains(&silent_ms), "{page:?}");
    // A packet that only the kernel sees.
    let slot = rig.engine.core.nat.flows.slots_of(row)[0];
    let now_ns = rig.engine.clock.now_ns();
    rig.engine
        .core
        .nat
        .datapath
        .slot(slot)
        .rx_last_ns()
        .store(now_ns, Relaxed);
    let page = rig.engine.activity_of(row, 0).unwrap();
    assert_eq!(page.silence.last_to_guest_ms, Some(0));
    // Nothing of this is the neighbour's, and a page beyond the end begins at the end.
    let silent = rig.engine.activity_of(other, 0).unwrap();
    assert_eq!((silent.silence, silent.next), Default::default());
    assert_eq!((page.vm, silent.vm), (VmId::new(101), VmId::new(102)));
    let beyond = rig.engine.activity_of(row, u64::MAX).unwrap();
    assert_eq!((beyond.silence.flows, beyond.next), (1, None));
    assert_eq!(rig.engine.activity_of(VmRow::new(60), 0), None);
}

#[test]
fn the_activity_of_many_flows_is_read_in_pages() {
    const FLOWS: usize = SLOTS_PER_LOOK + 5;
    let mut rig = with_flows(FLOWS, 0);
    rig.pass(9 * SECOND_NS);
    let row = VmRow::new(1);
    // The first of its slots has moved, which the second page tells.
    let slot = rig.engine.core.nat.flows.slots_of(row)[0];
    let now_ns = rig.engine.clock.now_ns();
    let live = rig.engine.core.nat.datapath.slot(slot);
    live.rx_last_ns().store(now_ns, Relaxed);
    let first = rig.engine.activity_of(row, 0).unwrap();
    assert_eq!(first.silence.flows, FLOWS as u64);
    assert_ne!(first.silence.last_to_guest_ms, Some(0));
    assert_eq!(first.next, Some(5));
    let second = rig.engine.activity_of(row, 5).unwrap();
    assert_eq!(
        (second.silence.last_to_guest_ms, second.next),
        (Some(0), None)
    );
    let all = first.silence.with(second.silence);
    assert_eq!((all.last_to_guest_ms, all.flows), (Some(0), FLOWS as u64));
    // A flow of the first page ends before the second is read, and then one of the second: neither hides
    // the live ones, wherever they are.
    for (ends, live) in [
        (FLOWS - 1, 0),
        (FLOWS - 2, 4),
        (7, FLOWS - 3),
        (2, FLOWS - 4),
    ] {
        rig.pass(SECOND_NS);
        let slots = rig.engine.core.nat.flows.slots_of(row);
        let (ended, live) = (slots[ends], slots[live]);
        let now_ns = rig.engine.clock.now_ns();
        let slot = rig.engine.core.nat.datapath.slot(live);
        slot.rx_last_ns().store(now_ns, Relaxed);
        let first = rig.engine.activity_of(row, 0).unwrap();
        let nat = &mut rig.engine.core.nat;
        let before = nat.flows.slots_of(row).len();
        nat.flows
            .unlink(&mut nat.datapath, ended, EndReason::Policy, now_ns);
        while rig.engine.core.nat.flows.slots_of(row).len() == before {
            rig.pass(SECOND_NS / 100);
            assert!(rig.engine.clock.now_ns() < now_ns + SECOND_NS);
        }
        let second = rig.engine.activity_of(row, first.next.unwrap()).unwrap();
        assert_eq!(second.next, None);
        let all = first.silence.with(second.silence);
        // Those of the rounds before are a second older.
        let silent_ms = all.last_to_guest_ms.unwrap();
        assert!(silent_ms < 1_000, "{ends} {live:?} {silent_ms}");
    }
}
