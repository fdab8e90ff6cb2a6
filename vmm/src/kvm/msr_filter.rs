//! Model-specific registers that the guest does not get, whatever KVM would emulate.
//!
//! They belong to features that CPUID does not offer ([`crate::cpuid`]), or tell of the host: its
//! energy, its interrupts by firmware. A guest's access is a general protection fault (#GP), as on a
//! CPU that lacks the register; Linux asks for all of them in a way that survives this. What this
//! process reads and sets for a snapshot is not filtered.
//! Source: Linux, Documentation/virt/kvm/api.rst, KVM_X86_SET_MSR_FILTER; Intel SDM 4; AMD APM 2,
//! appendix A.
use kvm_ioctls::{Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd};

use super::KvmError;

/// First register and number of registers.
const DENIED: [(u32, u32); 16] = [
    (0x34, 1),         // SMI count
    (0x3A, 1),         // control of VMX and SGX
    (0xC1, 8),         // performance counters
    (0x186, 8),        // their events
    (0x309, 4),        // fixed performance counters
    (0x345, 1),        // performance capabilities
    (0x38D, 4),        // control of the counters
    (0x3F1, 1),        // precise event sampling
    (0x480, 18),       // VMX
    (0x560, 48),       // processor trace
    (0x600, 1),        // debug store
    (0x606, 74),       // energy and residency
    (0xC000_0300, 4),  // performance counters, AMD version 2
    (0xC001_0000, 8),  // performance counters (AMD)
    (0xC001_0114, 4),  // SVM
    (0xC001_0200, 12), // extended performance counters (AMD)
];

/// A bit for each register of a range; zero: denied.
const NONE: [u8; 16] = [0; 16];

/// Returns whether KVM can deny registers: since Linux 5.10.
pub(crate) fn is_supported(kvm: &Kvm) -> bool {
    kvm.check_extension_raw(u64::from(kvm_bindings::KVM_CAP_X86_MSR_FILTER)) > 0
}

/// Denies the guest's access to them.
///
/// # Errors
/// KVM refuses.
pub(crate) fn deny(vm: &VmFd) -> Result<(), KvmError> {
    let ranges = DENIED.map(|(base, msr_count)| MsrFilterRange {
        flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
        base,
        msr_count,
        bitmap: &NONE,
    });
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &ranges)
        .map_err(KvmError::call("filtering the guest's registers"))
}
