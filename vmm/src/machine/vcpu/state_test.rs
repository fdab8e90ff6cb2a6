//! The state of a vCPU under KVM.
use std::fs::File;

use slipgate_testbed::require_kvm;

use super::*;
use crate::{
    GuestMemory, kvm,
    machine::vcpu::{Made, setup},
    memory,
};

/// Places in the XSAVE area, in words (Intel SDM vol. 1, 13.4).
const XMM3: usize = (160 + 3 * 16) / 4;
const XSTATE_BV: usize = 512 / 4;

struct Rig {
    host: cpuid::Supported,
    can: Abilities,
    vm: kvm_ioctls::VmFd,
    // The VM's memory must stay mapped.
    memory: GuestMemory,
}

fn rig() -> Rig {
    let file = File::options().read(true).write(true).open("/dev/kvm");
    let kvm = kvm::open(file.unwrap().into()).unwrap();
    let memory = memory::create(16 << 20).unwrap();
    Rig {
        can: Abilities::of(&kvm, Template::Host).unwrap(),
        vm: kvm::create(&kvm, &memory).unwrap(),
        host: cpuid::Supported::of(&kvm, Template::Host).unwrap(),
        memory,
    }
}

/// The state of a vCPU after its power-on, with a register changed.
fn saved() -> VcpuState {
    let rig = rig();
    let fd = rig.vm.create_vcpu(0).unwrap();
    let cpuid = rig.host.filtered(0, 1).unwrap();
    fd.set_cpuid2(&cpuid).unwrap();
    let mut regs = fd.get_regs().unwrap();
    regs.rbx = 0x1234_5678_9abc;
    fd.set_regs(&regs).unwrap();
    // Register XMM3, and that x87 and SSE are in use (XSTATE_BV).
    let mut xsave = fd.get_xsave().unwrap();
    xsave.region[XMM3..][..4].fill(0x0bad_cafe);
    xsave.region[XSTATE_BV] |= 0b11;
    // SAFETY: no larger area is in use.
    unsafe { fd.set_xsave(&xsave) }.unwrap();
    save(&fd, &cpuid, &rig.can).unwrap()
}

fn restored(state: &VcpuState) -> Result<VcpuState, String> {
    let rig = rig();
    let Made { fd, cpuid } =
        setup::restore(&rig.host, &rig.vm, 0, 1, (state, &rig.can)).map_err(|e| e.to_string())?;
    Ok(save(&fd, &cpuid, &rig.can).unwrap())
}

#[test]
fn what_is_saved_is_restored() {
    require_kvm!();
    let before = saved();
    let after = restored(&before).unwrap();
    assert_eq!(after.regs, before.regs);
    assert_eq!(after.sregs, before.sregs);
    assert_eq!(after.lapic.regs, before.lapic.regs);
    let xmm3 = |state: &VcpuState| state.xsave.as_ref().unwrap().region[XMM3..][..4].to_vec();
    assert_eq!(xmm3(&before), [0x0bad_cafe; 4]);
    assert_eq!(xmm3(&after), xmm3(&before));
    assert_eq!(after.msrs.len(), before.msrs.len());
    assert!(before.msrs.len() > 10, "{}", before.msrs.len());
}

/// KVM writes the time to the address that the guest once gave.
#[test]
fn a_restore_writes_nothing_to_the_guests_memory() {
    use vm_memory::{Bytes as _, GuestAddress};
    require_kvm!();
    const ADDRESS: u64 = 0x5_0000;
    let mut state = saved();
    for index in WALL_CLOCKS {
        assert!(state.msrs.iter().all(|entry| entry.index != index));
        state.msrs.push(kvm_msr_entry {
            index,
            data: ADDRESS,
            ..Default::default()
        });
    }
    let rig = rig();
    setup::restore(&rig.host, &rig.vm, 0, 1, (&state, &rig.can)).unwrap();
    let mut there = [0xff_u8; 12];
    rig.memory
        .read_slice(&mut there, GuestAddress(ADDRESS))
        .unwrap();
    assert_eq!(there, [0; 12]);
}

#[test]
fn another_cpu_or_impossible_registers_are_refused() {
    require_kvm!();
    let mut other = saved();
    other.cpuid[1].ecx ^= 1;
    let function = other.cpuid[1].function;
    let refused = restored(&other).err().unwrap();
    let leaf = format!("CPUID differs in leaf {function:#x}");
    assert!(refused.contains(&leaf), "{refused}");

    let mut other = saved();
    other.cpuid.pop();
    assert!(restored(&other).err().unwrap().contains("CPUID differs"));

    let mut other = saved();
    // EFER with reserved bits, CR4 too.
    other.sregs.efer = u64::MAX;
    other.sregs.cr4 = u64::MAX;
    let refused = restored(&other).err().unwrap();
    assert!(refused.contains("segments"), "{refused}");

    let mut other = saved();
    let unknown = kvm_msr_entry {
        index: 0xdead_0000,
        data: 1,
        ..Default::default()
    };
    other.msrs.push(unknown);
    let refused = restored(&other).err().unwrap();
    assert!(refused.contains("MSR 0xdead0000"), "{refused}");
}

#[test]
fn a_guest_that_virtualizes_is_not_saved() {
    let with = |cr4, efer| {
        virtualizes(&kvm_sregs {
            cr4,
            efer,
            ..Default::default()
        })
    };
    // All that an ordinary guest may have on beside it.
    assert!(!with(!CR4_VMXE, !EFER_SVME));
    assert!(with(0x2000, 0) && with(0, 0x1000));
    require_kvm!();
    let rig = rig();
    let fd = rig.vm.create_vcpu(0).unwrap();
    let cpuid = rig.host.filtered(0, 1).unwrap();
    fd.set_cpuid2(&cpuid).unwrap();
    let mut sregs = fd.get_sregs().unwrap();
    sregs.efer |= EFER_SVME;
    if fd.set_sregs(&sregs).is_err() {
        sregs.efer &= !EFER_SVME;
        sregs.cr4 |= CR4_VMXE;
        if fd.set_sregs(&sregs).is_err() {
            // This host's guests have neither.
            return;
        }
    }
    let saved = save(&fd, &cpuid, &rig.can);
    assert!(matches!(saved, Err(SnapshotError::Nested)));
}

/// A host without XSAVE restores the guest that has not used it: `debian_6_1_moves_between_hosts_of_one_template`
/// (`tests/tests/kernels`) has one.
#[test]
fn a_guest_that_has_used_no_xsave_needs_none() {
    let with = |value| {
        let mut xcrs = kvm_xcrs {
            nr_xcrs: 1,
            ..Default::default()
        };
        xcrs.xcrs[0].value = value;
        xcrs
    };
    assert!(are_as_at_reset(&with(0b1)));
    assert!(!are_as_at_reset(&with(0b111)), "AVX");
    let mut another = with(0b1);
    another.nr_xcrs = 2;
    assert!(!are_as_at_reset(&another));
}
