use std::net::Ipv4Addr;

use super::*;

#[test]
fn vms_behind_forwards_are_looked_at_some_in_a_turn() {
    let forward = |vm: u32| Forward {
        protocol: Protocol::Tcp,
        host: Ipv4Addr::UNSPECIFIED.into(),
        host_port: 1_000 + vm as u16,
        vm: VmId::new(vm),
        vm_row: VmRow::new(vm as u16),
        guest_port: 80,
        rule: RuleIndex::new(0),
        is_own: false,
    };
    let mut forwards = Forwards::default();
    forwards.begin_to_find_guests(SECOND_NS);
    assert!(!forwards.is_finding_guests(), "there are none");
    forwards.set((1..=600).map(forward).collect());
    let kernel = crate::fake::Kernel::new(slipgate_abi::maps::SLOTS_PER_CHUNK);
    let tables = crate::fake::FakeDatapath::new(&kernel, 0, 1);
    let (vms, mut out) = (VmTable::new(10), Outbox::new(1 << 20));
    forwards.begin_to_find_guests(SECOND_NS);
    for last in [Some(256), Some(512), None] {
        assert!(forwards.is_finding_guests());
        forwards.find_guests(&vms, &tables, &mut out);
        assert_eq!(forwards.looked_at, last.map(VmId::new));
    }
    forwards.begin_to_find_guests(SECOND_NS + ARP_INTERVAL_NS - 1);
    assert!(!forwards.is_finding_guests(), "once a second");
    forwards.begin_to_find_guests(SECOND_NS + ARP_INTERVAL_NS);
    assert!(forwards.is_finding_guests());
}
