//! CPUID: features of the CPU and the hypervisor.
use core::arch::x86_64::{__cpuid, CpuidResult};

/// Returns a leaf; zeroes if it does not exist.
pub(crate) fn leaf(number: u32) -> CpuidResult {
    let last = __cpuid(number & 0xFFFF_0000).eax;
    if number > last {
        CpuidResult {
            eax: 0,
            ebx: 0,
            ecx: 0,
            edx: 0,
        }
    } else {
        __cpuid(number)
    }
}

/// Returns whether the guest runs under a hypervisor, so that the leaves from 0x4000_0000 exist.
pub(crate) fn virtual_machine() -> bool {
    leaf(1).ecx & 1 << 31 != 0
}

/// Returns KVM's features, leaf 0x4000_0001; 0 if the hypervisor is not KVM.
pub(crate) fn kvm_features() -> u32 {
    if !virtual_machine() {
        return 0;
    }
    let name = leaf(0x4000_0000);
    let is_kvm =
        [name.ebx, name.ecx, name.edx] == [*b"KVMK", *b"VMKV", *b"M\0\0\0"].map(u32::from_le_bytes);
    if is_kvm { leaf(0x4000_0001).eax } else { 0 }
}
