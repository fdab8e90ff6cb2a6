//! Tests of VMs that fall idle and are busy again.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{VmId, VmRow};

use super::rig::*;
use crate::{
    clock::{Clock as _, SECOND_NS},
    datapath::Tables as _,
    event_loop::activity::SLOTS_PER_LOOK,
    stats::{Tally, Traffic},
    vm::VmSpec,
};

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

#[test]
fn arp_and_dhcp_are_no_activity() {
    let mut rig = Rig::new();
    watch(&mut rig, 1, 5, true);
    let stats = rig.engine.core.nat.datapath.stats(VmRow::new(1));
    let before = stats.frames_that_count();
    for tally in [Tally::ArpAnswer, Tally::DhcpMessage] {
        stats.traffic(Traffic::RxFromGuest, 1, 300);
        stats.tally(tally, 1);
    }
    assert_eq!(stats.frames_that_count(), before);
    assert_eq!(pass(&mut rig, 3), []);
    stats.traffic(Traffic::RxFromWorld, 1, 300);
    assert_eq!(pass(&mut rig, 2), [(101, false)]);
}

#[test]
fn many_silent_flows_are_read_over_several_looks() {
    // Seconds until the VM is idle.
    let idle_after = |flows: usize| {
        let mut rig = Rig::with(Setup {
            slots: 16_384,
            max_flows: 10_000,
            ..Setup::default()
        });
        let vm = VmSpec {
            idle_after_s: 5,
            max_flows: 10_000,
            ..spec(1, &Setup::default())
        };
        rig.tell(move |engine| engine.set_vm(vm));
        for port in 0..flows as u16 {
            rig.guest(1, &syn((GUEST, 10_000 + port), (PEER, 443 + port % 4), 1));
        }
        assert_eq!(rig.flows(), flows);
        (1..20).find(|_| !pass(&mut rig, 1).is_empty()).unwrap()
    };
    let few = idle_after(10);
    assert_eq!(idle_after(SLOTS_PER_LOOK + 500), few + 1);
    assert_eq!(idle_after(2 * SLOTS_PER_LOOK + 500), few + 2);
}
