//! Saves and restores the state of a vCPU.
//!
//! The order of restoring is that of the parts' dependencies: CPUID decides which registers exist;
//! the segments hold the local APIC's base and mode; the APIC's timer mode decides whether the
//! deadline's MSR may be set, and its deadline is relative to the time-stamp counter, so that MSR
//! comes last.
use std::ops::RangeInclusive;

use kvm_bindings::{CpuId, Msrs, kvm_msr_entry, kvm_sregs, kvm_xcrs};
use kvm_ioctls::{Cap, Kvm, VcpuFd};

use crate::{
    cpuid::{self, Template},
    snapshot::{SnapshotError, VcpuState},
};

/// IA32_TSC_DEADLINE (Intel SDM vol. 4).
const TSC_DEADLINE: u32 = 0x6e0;
/// MSR_KVM_WALL_CLOCK and its successor (Linux, Documentation/virt/kvm/x86/msr.rst): a write of an
/// address has KVM write the time there, once. The guest may have other data there since.
const WALL_CLOCKS: [u32; 2] = [0x11, 0x4b56_4d00];
/// The memory type range registers: variable, fixed, default.
const MTRRS: [RangeInclusive<u32>; 5] = [
    0x200..=0x20f,
    0x250..=0x250,
    0x258..=0x259,
    0x268..=0x26f,
    0x2ff..=0x2ff,
];
/// CR4.VMXE and EFER.SVME (Intel SDM vol. 3, 25.7; AMD APM vol. 2, 15.4): VMX or SVM is on.
const CR4_VMXE: u64 = 1 << 13;
const EFER_SVME: u64 = 1 << 12;
/// Most MSRs that are read by one call.
const AT_ONCE: usize = 64;
/// Most MSRs of a state. KVM lists some 200.
const MAX_MSRS: usize = 4096;

/// Parts of a vCPU's state that this host's KVM can save, found out before the threads are
/// confined.
#[derive(Debug)]
pub(crate) struct Abilities {
    /// MSRs that are part of a vCPU's state.
    msrs: Vec<u32>,
    /// Whether another host may list other ones.
    has_template: bool,
    xsave: bool,
    xcrs: bool,
    debug: bool,
    events: bool,
    tsc_khz: bool,
}

impl Abilities {
    /// Asks KVM.
    ///
    /// # Errors
    /// KVM does not list its MSRs.
    pub(crate) fn of(kvm: &Kvm, template: Template) -> Result<Self, SnapshotError> {
        let list = kvm
            .get_msr_index_list()
            .map_err(SnapshotError::kvm("listing the MSRs to save"))?;
        let mut msrs = list.as_slice().to_vec();
        // KVM lets them be read and does not list them.
        msrs.extend(MTRRS.into_iter().flatten());
        let has_template = !template.is_host();
        let stays = |index: u32| has_template && cpuid::is_of_host(index);
        msrs.retain(|index| !WALL_CLOCKS.contains(index) && !stays(*index));
        Ok(Self {
            msrs,
            has_template,
            xsave: kvm.check_extension(Cap::Xsave),
            xcrs: kvm.check_extension(Cap::Xcrs),
            debug: kvm.check_extension(Cap::Debugregs),
            events: kvm.check_extension(Cap::VcpuEvents),
            tsc_khz: kvm.check_extension(Cap::GetTscKhz),
        })
    }
}

/// Reads the state of a vCPU that is not in the guest. The last exit was completed.
///
/// # Errors
/// KVM refuses, or the guest uses virtualization.
pub(super) fn save(
    fd: &VcpuFd,
    cpuid: &CpuId,
    can: &Abilities,
) -> Result<VcpuState, SnapshotError> {
    use SnapshotError as E;
    let optional = |is_there: bool| is_there.then_some(());
    // What the others depend on may change while it is read (the APIC's timer), so it comes first.
    let mp_state = fd.get_mp_state().map_err(E::kvm("reading a vCPU's mode"))?;
    let sregs = fd
        .get_sregs()
        .map_err(E::kvm("reading a vCPU's segments"))?;
    if virtualizes(&sregs) {
        return Err(E::Nested);
    }
    Ok(VcpuState {
        mp_state,
        cpuid: cpuid.as_slice().to_vec(),
        tsc_khz: match can.tsc_khz {
            true => fd.get_tsc_khz().unwrap_or(0),
            false => 0,
        },
        regs: fd
            .get_regs()
            .map_err(E::kvm("reading a vCPU's registers"))?,
        sregs,
        xsave: optional(can.xsave)
            .map(|()| fd.get_xsave().map(Box::new))
            .transpose()
            .map_err(E::kvm("reading a vCPU's extended state"))?,
        xcrs: optional(can.xcrs)
            .map(|()| fd.get_xcrs().map(Box::new))
            .transpose()
            .map_err(E::kvm("reading a vCPU's extended control registers"))?,
        debug: optional(can.debug)
            .map(|()| fd.get_debug_regs())
            .transpose()
            .map_err(E::kvm("reading a vCPU's debug registers"))?,
        lapic: fd
            .get_lapic()
            .map_err(E::kvm("reading a vCPU's local APIC"))?,
        msrs: msrs(fd, &can.msrs)?,
        events: optional(can.events)
            .map(|()| fd.get_vcpu_events())
            .transpose()
            .map_err(E::kvm("reading a vCPU's events"))?,
    })
}

/// Whether the extended control registers have the values of a CPU that was reset: XCR0 the x87's part of
/// the state alone.
fn are_as_at_reset(xcrs: &kvm_xcrs) -> bool {
    let mut those = xcrs.xcrs.iter().take(xcrs.nr_xcrs as usize);
    those.all(|it| (it.xcr, it.value) == (0, 1))
}

/// Whether the guest has VMX or SVM on. What the CPU has of its VMs (KVM's nested state) is not saved.
fn virtualizes(sregs: &kvm_sregs) -> bool {
    sregs.cr4 & CR4_VMXE != 0 || sregs.efer & EFER_SVME != 0
}

/// Reads the MSRs that KVM lets be read: it stops at one that it lists and refuses.
fn msrs(fd: &VcpuFd, wanted: &[u32]) -> Result<Vec<kvm_msr_entry>, SnapshotError> {
    let mut found = Vec::with_capacity(wanted.len());
    let mut left = wanted;
    while !left.is_empty() {
        let now = &left[..left.len().min(AT_ONCE)];
        let entry = |index: &u32| kvm_msr_entry {
            index: *index,
            ..Default::default()
        };
        let entries: Vec<_> = now.iter().map(entry).collect();
        let mut msrs = Msrs::from_entries(&entries).expect("few enough");
        let read = fd
            .get_msrs(&mut msrs)
            .map_err(SnapshotError::kvm("reading a vCPU's MSRs"))?;
        found.extend(msrs.as_slice().iter().take(read));
        let refused = usize::from(read < now.len());
        left = &left[(read + refused).min(left.len())..];
    }
    Ok(found)
}

/// Sets the state of a new vCPU. `host`: what CPUID tells the guests of this host.
///
/// # Errors
/// The host's CPU or KVM is of another kind, or KVM refuses a part.
pub(super) fn restore(
    fd: &VcpuFd,
    state: &VcpuState,
    host: &CpuId,
    can: &Abilities,
) -> Result<(), SnapshotError> {
    use SnapshotError as E;
    if let Some(why) = cpuid::difference(&state.cpuid, host.as_slice()) {
        return Err(E::Host(why));
    }
    if state.msrs.len() > MAX_MSRS {
        let why = format!("{} MSRs of a CPU", state.msrs.len());
        return Err(E::Mismatch(why));
    }
    if can.tsc_khz && state.tsc_khz != 0 && fd.get_tsc_khz().unwrap_or(0) != state.tsc_khz {
        fd.set_tsc_khz(state.tsc_khz).map_err(|_| {
            let khz = state.tsc_khz;
            E::Host(format!(
                "its time-stamp counter counts {khz} kHz, which this one can't"
            ))
        })?;
    }
    fd.set_mp_state(state.mp_state)
        .map_err(E::kvm("setting a vCPU's mode"))?;
    fd.set_sregs(&state.sregs)
        .map_err(E::kvm("setting a vCPU's segments"))?;
    fd.set_regs(&state.regs)
        .map_err(E::kvm("setting a vCPU's registers"))?;
    if let Some(xsave) = &state.xsave {
        // SAFETY: KVM reads more than this only in a process that has asked the kernel for dynamic
        // features (ARCH_REQ_XCOMP_GUEST_PERM), which this one has not.
        unsafe { fd.set_xsave(xsave) }.map_err(E::kvm("setting a vCPU's extended state"))?;
    }
    // A CPU without XSAVE has none, and needs none for a guest that did not use XSAVE.
    let xcrs = state.xcrs.as_deref();
    if let Some(xcrs) = xcrs.filter(|xcrs| can.xcrs || !are_as_at_reset(xcrs)) {
        fd.set_xcrs(xcrs)
            .map_err(E::kvm("setting a vCPU's extended control registers"))?;
    }
    if let Some(debug) = &state.debug {
        fd.set_debug_regs(debug)
            .map_err(E::kvm("setting a vCPU's debug registers"))?;
    }
    fd.set_lapic(&state.lapic)
        .map_err(E::kvm("setting a vCPU's local APIC"))?;
    let (last, first): (Vec<_>, Vec<_>) = state
        .msrs
        .iter()
        .filter(|entry| !WALL_CLOCKS.contains(&entry.index))
        .partition(|entry| entry.index == TSC_DEADLINE);
    for entries in [first, last] {
        set_msrs(fd, &entries, can.has_template)?;
    }
    if let Some(events) = &state.events {
        fd.set_vcpu_events(events)
            .map_err(E::kvm("setting a vCPU's events"))?;
    }
    Ok(())
}

/// Sets MSRs. One that KVM refuses to set must have the value already: some are read-only. `has_template`:
/// one without a value may be a register that this host's KVM does not know.
fn set_msrs(
    fd: &VcpuFd,
    entries: &[kvm_msr_entry],
    has_template: bool,
) -> Result<(), SnapshotError> {
    let mut left = entries;
    while !left.is_empty() {
        let now = &left[..left.len().min(AT_ONCE)];
        let msrs = Msrs::from_entries(now).expect("few enough");
        let set = fd
            .set_msrs(&msrs)
            .map_err(SnapshotError::kvm("setting a vCPU's MSRs"))?;
        left = &left[set.min(left.len())..];
        if set >= now.len() {
            continue;
        }
        let Some((refused, rest)) = left.split_first() else {
            break;
        };
        left = rest;
        let here = self::msrs(fd, &[refused.index])?;
        let is_nothing = has_template && here.is_empty() && refused.data == 0;
        if !is_nothing && here.first().map(|entry| entry.data) != Some(refused.data) {
            let index = refused.index;
            let why = format!("KVM refuses {:#x} for MSR {index:#x}", refused.data);
            return Err(SnapshotError::Host(why));
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "state_test.rs"]
mod tests;
