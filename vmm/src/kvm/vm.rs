//! A VM with a PC's hardware: local APICs, IOAPIC, PICs and PIT in the kernel, guest memory in
//! slots.
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use kvm_bindings::{
    KVM_API_VERSION, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VmFd};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

use super::{KvmError, msr_filter};
use crate::{GuestMemory, layout};

/// Capabilities that a machine needs, with their names in the KVM API.
const NEEDED: [(Cap, &str); 9] = [
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Pit2, "KVM_CAP_PIT2"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::IrqRouting, "KVM_CAP_IRQ_ROUTING"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
];

/// Checks that a descriptor is a `/dev/kvm`, opened for reading and writing, with all capabilities
/// that a machine needs.
///
/// # Errors
/// It is another file, or a capability is missing.
pub fn check(descriptor: OwnedFd) -> Result<Checked, KvmError> {
    let kvm = open(descriptor)?;
    Ok(Checked {
        filters_registers: msr_filter::is_supported(&kvm),
    })
}

/// Optional abilities of a KVM that has all that a machine needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Checked {
    /// Whether it can keep registers from the guest that belong to no feature of the machine. Without
    /// that a guest has those that KVM emulates.
    pub filters_registers: bool,
}

/// Takes ownership of `/dev/kvm`, and checks that it has the capabilities a machine needs.
pub(crate) fn open(descriptor: OwnedFd) -> Result<Kvm, KvmError> {
    // SAFETY: the descriptor is owned, and ownership passes to the Kvm.
    let kvm = unsafe { Kvm::from_raw_fd(descriptor.into_raw_fd()) };
    let found = kvm.get_api_version();
    if found != KVM_API_VERSION as i32 {
        return Err(KvmError::Version { found });
    }
    for (capability, what) in NEEDED {
        if !kvm.check_extension(capability) {
            return Err(KvmError::Missing { what });
        }
    }
    // KVM_CAP_IOEVENTFD_ANY_LENGTH, which kvm-ioctls does not name.
    if kvm.check_extension_raw(u64::from(kvm_bindings::KVM_CAP_IOEVENTFD_ANY_LENGTH)) <= 0 {
        return Err(KvmError::Missing {
            what: "KVM_CAP_IOEVENTFD_ANY_LENGTH",
        });
    }
    Ok(kvm)
}

/// Creates a VM with its interrupt controllers, and gives it `memory`.
///
/// The order spares waits. KVM ends some requests with a grace period of the VM's SRCU: that is over in
/// microseconds while nothing else has asked for one. The interrupt controllers have, since Linux 6.18:
/// they register devices on the VM's buses, and KVM frees the buses' former tables after a grace period
/// that nobody hurries. What waits behind that one takes several ticks of the kernel's clock, so the
/// controllers come last.
///
/// The memory must stay mapped for as long as a vCPU of the VM may run.
pub(crate) fn create(kvm: &Kvm, memory: &GuestMemory) -> Result<VmFd, KvmError> {
    let vm = kvm.create_vm().map_err(KvmError::call("creating a VM"))?;
    if msr_filter::is_supported(kvm) {
        msr_filter::deny(&vm)?;
    }
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(KvmError::call("placing the identity map"))?;
    vm.set_tss_address(layout::KVM_TSS as usize)
        .map_err(KvmError::call("placing the TSS"))?;
    for (slot, region) in memory.iter().enumerate() {
        let slot = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the region is mapped, and the caller keeps it mapped for the life of the VM.
        unsafe { vm.set_user_memory_region(slot) }
            .map_err(KvmError::call("giving the VM its memory"))?;
    }
    vm.create_irq_chip()
        .map_err(KvmError::call("creating the interrupt controllers"))?;
    let pit = kvm_pit_config {
        // Emulates port 0x61 too: guests calibrate their TSC with it.
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    };
    vm.create_pit2(pit)
        .map_err(KvmError::call("creating the PIT"))?;
    Ok(vm)
}
