//! State that KVM has of a VM, apart from its vCPUs: interrupt controllers, PIT, clock.
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use kvm_ioctls::VmFd;

use crate::snapshot::{KvmState, SnapshotError};

const CHIPS: [u32; 3] = [
    KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE,
    KVM_IRQCHIP_IOAPIC,
];

/// Reads the state of a VM whose vCPUs are paused.
///
/// # Errors
/// KVM refuses.
pub(crate) fn save(vm: &VmFd) -> Result<KvmState, SnapshotError> {
    let mut chips = CHIPS.map(|chip_id| kvm_irqchip {
        chip_id,
        ..Default::default()
    });
    for chip in &mut chips {
        vm.get_irqchip(chip)
            .map_err(SnapshotError::kvm("reading an interrupt controller"))?;
    }
    Ok(KvmState {
        chips,
        pit: vm
            .get_pit2()
            .map_err(SnapshotError::kvm("reading the PIT"))?,
        clock: vm
            .get_clock()
            .map_err(SnapshotError::kvm("reading the clock"))?,
    })
}

/// Sets the state of a VM whose vCPUs have not run yet. The guest's clock goes on where it stood.
///
/// # Errors
/// The state is of no such chips, or KVM refuses it.
pub(crate) fn restore(vm: &VmFd, state: &KvmState) -> Result<(), SnapshotError> {
    for (chip, id) in state.chips.iter().zip(CHIPS) {
        if chip.chip_id != id {
            let why = format!("interrupt controller {} in the place of {id}", chip.chip_id);
            return Err(SnapshotError::Mismatch(why));
        }
        vm.set_irqchip(chip)
            .map_err(SnapshotError::kvm("setting an interrupt controller"))?;
    }
    vm.set_pit2(&state.pit)
        .map_err(SnapshotError::kvm("setting the PIT"))?;
    // Without flags: no time passes between saving and restoring.
    let clock = kvm_clock_data {
        clock: state.clock.clock,
        ..Default::default()
    };
    vm.set_clock(&clock)
        .map_err(SnapshotError::kvm("setting the clock"))
}
