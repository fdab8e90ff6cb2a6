//! Captures a vCPU's state for a report. State that can't be read is left out: a report is made
//! when something has failed already.
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use super::{Access, Cause, Registers, Report};
use crate::GuestMemory;

/// Length of the longest x86 instruction, bytes.
const INSTRUCTION_BYTES: usize = 15;

/// Returns a report of the present state of `vcpu`.
pub(crate) fn report(
    index: u8,
    vcpu: &VcpuFd,
    memory: &GuestMemory,
    cause: Cause,
    last_access: Option<Access>,
) -> Report {
    let registers = registers(vcpu);
    let code = registers
        .as_ref()
        .map(|registers| code(vcpu, memory, registers))
        .unwrap_or_default();
    Report {
        vcpu: index,
        cause,
        registers,
        code,
        last_access,
    }
}

fn registers(vcpu: &VcpuFd) -> Option<Registers> {
    Some(Registers {
        general: vcpu.get_regs().ok()?,
        special: vcpu.get_sregs().ok()?,
    })
}

/// Returns the bytes at CS:RIP through the guest's own page tables, up to the first that can't be
/// read.
fn code(vcpu: &VcpuFd, memory: &GuestMemory, registers: &Registers) -> Vec<u8> {
    let start = registers
        .special
        .cs
        .base
        .wrapping_add(registers.general.rip);
    let byte_at = |offset: usize| {
        let translation = vcpu.translate_gva(start.wrapping_add(offset as u64)).ok()?;
        (translation.valid != 0)
            .then(|| {
                memory
                    .read_obj::<u8>(GuestAddress(translation.physical_address))
                    .ok()
            })
            .flatten()
    };
    (0..INSTRUCTION_BYTES).map_while(byte_at).collect()
}
