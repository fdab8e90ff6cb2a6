//! What the CPU and the hypervisor say of themselves.
use core::arch::x86_64::{__cpuid, CpuidResult};

/// A leaf; zeroes where there is none.
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

/// Whether we run under a hypervisor: the leaves from 0x4000_0000 are there.
pub(crate) fn virtual_machine() -> bool {
    leaf(1).ecx & 1 << 31 != 0
}

/// The hypervisor is KVM: what it offers, leaf 0x4000_0001.
pub(crate) fn kvm_features() -> u32 {
    if !virtual_machine() {
        return 0;
    }
    let name = leaf(0x4000_0000);
    let is_kvm =
        [name.ebx, name.ecx, name.edx] == [*b"KVMK", *b"VMKV", *b"M\0\0\0"].map(u32::from_le_bytes);
    if is_kvm { leaf(0x4000_0001).eax } else { 0 }
}
