use slipgate_abi::VmId;
use slipgate_control::vm::OpenVm;

use super::*;
use crate::config::VmConfig;

fn vm(name: &str, tap: &str, row: u16) -> ServedVm {
    ServedVm {
        config: VmConfig::new(name, tap, [10, 0, 2, 15].into()),
        open: OpenVm {
            id: VmId::new(u32::from(row)),
            row: VmRow::new(row),
            adopted: false,
        },
        worker: usize::from(row % 2),
        tap_ifindex: None,
        found: None,
        mtu: 1_500,
        ipv6: None,
        is_up: true,
        is_idle: false,
        generation: 1,
        is_learning: false,
    }
}

fn check(vms: &ServedVms) {
    for (at, vm) in vms.iter().enumerate() {
        assert_eq!(vms.named(&vm.config.name), Some(at));
        assert_eq!(vms.on_tap(&vm.config.tap), Some(at));
        assert_eq!(vms.in_row(vm.open.row), Some(at));
    }
    for worker in [0, 1] {
        let its = vms.iter().filter(|vm| vm.worker == worker).count();
        assert_eq!(vms.of_worker(worker), its);
    }
    assert_eq!(vms.by_name.len(), vms.len());
    assert_eq!(vms.by_tap.len(), vms.len());
    assert_eq!(vms.by_row.len(), vms.len());
}

#[test]
fn a_vm_is_found_wherever_it_moves() {
    let mut vms = ServedVms::default();
    for row in 1..=5 {
        vms.push(vm(&format!("vm{row}"), &format!("tap{row}"), row));
        check(&vms);
    }
    // In the middle, the last, and with another TAP.
    assert_eq!(vms.swap_remove(1).config.name, "vm2");
    check(&vms);
    assert_eq!(vms.swap_remove(3).config.name, "vm4");
    check(&vms);
    vms.replace(0, vm("vm1", "other", 1));
    check(&vms);
    assert_eq!((vms.on_tap("tap1"), vms.named("vm2")), (None, None));
    while !vms.is_empty() {
        vms.swap_remove(0);
        check(&vms);
    }
}
