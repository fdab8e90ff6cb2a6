//! Creates the vCPUs, and sets each to the state in which its guest code begins or goes on.
use kvm_bindings::{CpuId, Msrs, kvm_lapic_state};
use kvm_ioctls::{VcpuFd, VmFd};

use super::state::{self, Abilities};
use crate::{
    boot::{self, registers},
    cpuid,
    kvm::KvmError,
    machine::MachineError,
    snapshot::{SnapshotError, VcpuState},
};

/// A vCPU that has not run yet, and what CPUID tells its guest.
pub(crate) struct Made {
    pub(crate) fd: VcpuFd,
    pub(crate) cpuid: CpuId,
}

/// Local vector table entries of the local APIC's two pins (Intel SDM vol. 3, 11.5.1).
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
const DELIVER_NMI: u32 = 0b100 << 8;
const DELIVER_EXTINT: u32 = 0b111 << 8;

/// Creates vCPU `index` of `cpus`. The first is at the kernel's entry; the others wait for INIT and
/// SIPI.
pub(crate) fn create(
    host: &cpuid::Supported,
    vm: &VmFd,
    index: u8,
    cpus: u8,
    kernel: &boot::Loaded,
) -> Result<Made, MachineError> {
    let made = make(host, vm, index, cpus)?;
    let vcpu = &made.fd;
    set_msrs(vcpu)?;
    wire_local_apic(vcpu)?;
    if index == 0 {
        let initial = vcpu
            .get_sregs()
            .map_err(KvmError::call("reading a vCPU's segments"))?;
        vcpu.set_sregs(&registers::special(kernel, &initial))
            .map_err(KvmError::call("setting a vCPU's segments"))?;
        vcpu.set_regs(&registers::general(kernel))
            .map_err(KvmError::call("setting a vCPU's registers"))?;
    }
    Ok(made)
}

/// Returns the state of a vCPU that has not run.
///
/// # Errors
/// KVM refuses.
pub(crate) fn power_on(made: &Made, can: &Abilities) -> Result<Box<VcpuState>, SnapshotError> {
    state::save(&made.fd, &made.cpuid, can).map(Box::new)
}

/// Creates vCPU `index` of `cpus` as it was saved.
pub(crate) fn restore(
    host: &cpuid::Supported,
    vm: &VmFd,
    index: u8,
    cpus: u8,
    saved: (&VcpuState, &Abilities),
) -> Result<Made, MachineError> {
    let made = make(host, vm, index, cpus)?;
    state::restore(&made.fd, saved.0, &made.cpuid, saved.1)?;
    Ok(made)
}

fn make(host: &cpuid::Supported, vm: &VmFd, index: u8, cpus: u8) -> Result<Made, MachineError> {
    let fd = vm
        .create_vcpu(index.into())
        .map_err(KvmError::call("creating a vCPU"))?;
    let cpuid = host.filtered(index, cpus)?;
    fd.set_cpuid2(&cpuid)
        .map_err(KvmError::call("setting a vCPU's CPUID"))?;
    Ok(Made { fd, cpuid })
}

/// Sets the MSRs that firmware sets, by a call each: KVM stops at the first one that it does not
/// know. Such an MSR stays unset.
fn set_msrs(vcpu: &VcpuFd) -> Result<(), KvmError> {
    for entry in registers::msrs() {
        let one = Msrs::from_entries(&[entry]).expect("one entry is not too many");
        vcpu.set_msrs(&one)
            .map_err(KvmError::call("setting a vCPU's MSRs"))?;
    }
    Ok(())
}

/// Sets virtual wire mode, as a PC's firmware does: the PICs at LINT0, NMI at LINT1.
fn wire_local_apic(vcpu: &VcpuFd) -> Result<(), KvmError> {
    let mut apic = vcpu
        .get_lapic()
        .map_err(KvmError::call("reading a local APIC"))?;
    set_register(&mut apic, LVT_LINT0, DELIVER_EXTINT);
    set_register(&mut apic, LVT_LINT1, DELIVER_NMI);
    vcpu.set_lapic(&apic)
        .map_err(KvmError::call("setting a local APIC"))
}

fn set_register(apic: &mut kvm_lapic_state, offset: usize, value: u32) {
    for (register, byte) in apic.regs[offset..].iter_mut().zip(value.to_le_bytes()) {
        *register = byte as _;
    }
}
