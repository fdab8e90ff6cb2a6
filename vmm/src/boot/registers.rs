//! Registers of the first CPU at the kernel's entry. The other CPUs wait for the first CPU's
//! start-up IPIs in the state that KVM gives them.
//!
//! 64-bit entry (Linux, boot.rst): paging on, `boot_params` in RSI, flat segments from a GDT with
//! code at 0x10 and data at 0x18, interrupts off.
//! PVH (Xen, pvh.pandoc): protected mode, paging off, `hvm_start_info` in EBX, flat 32-bit
//! segments, a 32-bit TSS at 0, only the reserved bit set in EFLAGS.
use kvm_bindings::{kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress};

use super::{BootError, Loaded, Protocol};
use crate::{GuestMemory, layout};

const CR0_PE: u64 = 1 << 0;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const RFLAGS_RESERVED: u64 = 1 << 1;

const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;
const TSS_SELECTOR: u16 = 0x20;
/// Number of GDT entries: null, unused, code, data, and a TSS, which takes two in long mode.
const GDT_ENTRIES: usize = 6;

const MSR_MISC_ENABLE: u32 = 0x1A0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEF_TYPE: u32 = 0x2FF;
const MTRR_ENABLE: u64 = 1 << 11;
const MTRR_WRITE_BACK: u64 = 6;

/// Returns the general registers.
pub fn general(kernel: &Loaded) -> kvm_regs {
    let mut registers = kvm_regs {
        rip: kernel.entry.0,
        rflags: RFLAGS_RESERVED,
        ..Default::default()
    };
    match kernel.protocol {
        Protocol::Linux64 => registers.rsi = kernel.boot_info.0,
        Protocol::Pvh => registers.rbx = kernel.boot_info.0,
    }
    registers
}

/// Returns segments and control registers. `initial` is the state that KVM gave the CPU; its APIC
/// base is kept.
pub fn special(kernel: &Loaded, initial: &kvm_sregs) -> kvm_sregs {
    let mut registers = *initial;
    let long = kernel.protocol == Protocol::Linux64;
    let data = data_segment();
    registers.cs = code_segment(long);
    registers.ds = data;
    registers.es = data;
    registers.fs = data;
    registers.gs = data;
    registers.ss = data;
    registers.tr = task_segment();
    registers.ldt = kvm_segment {
        unusable: 1,
        ..Default::default()
    };
    registers.gdt.base = layout::GDT;
    registers.gdt.limit = (GDT_ENTRIES * 8 - 1) as u16;
    registers.idt.base = 0;
    registers.idt.limit = 0;
    if long {
        registers.cr0 = CR0_PE | CR0_ET | CR0_PG;
        registers.cr3 = layout::PAGE_TABLES.start;
        registers.cr4 = CR4_PAE;
        registers.efer = EFER_LME | EFER_LMA;
    } else {
        registers.cr0 = CR0_PE | CR0_ET;
        registers.cr3 = 0;
        registers.cr4 = 0;
        registers.efer = 0;
    }
    registers
}

/// Returns the MSRs that firmware sets on each CPU: memory is cached (else Linux takes the MTRRs
/// for broken), and string instructions are fast. A KVM that does not know one of them skips it.
pub fn msrs() -> [kvm_msr_entry; 2] {
    let entry = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    [
        entry(MSR_MTRR_DEF_TYPE, MTRR_ENABLE | MTRR_WRITE_BACK),
        entry(MSR_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
    ]
}

/// Writes the GDT that the registers of [`special`] point to.
pub(super) fn write_gdt(memory: &GuestMemory, protocol: Protocol) -> Result<(), BootError> {
    let code = code_segment(protocol == Protocol::Linux64);
    let table: [u64; GDT_ENTRIES] = [
        0,
        0,
        descriptor(&code),
        descriptor(&data_segment()),
        descriptor(&task_segment()),
        0,
    ];
    for (entry, address) in table.into_iter().zip((layout::GDT..).step_by(8)) {
        memory
            .write_obj(entry, GuestAddress(address))
            .map_err(|e| BootError::write("the GDT", e))?;
    }
    Ok(())
}

fn code_segment(long: bool) -> kvm_segment {
    kvm_segment {
        selector: CODE_SELECTOR,
        // Execute and read, accessed.
        type_: 0xB,
        l: u8::from(long),
        db: u8::from(!long),
        ..flat_segment()
    }
}

fn data_segment() -> kvm_segment {
    // Read and write, accessed.
    kvm_segment {
        selector: DATA_SELECTOR,
        type_: 0x3,
        db: 1,
        ..flat_segment()
    }
}

fn flat_segment() -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xFFFF_FFFF,
        present: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

fn task_segment() -> kvm_segment {
    // A busy TSS: 32-bit in protected mode, 64-bit in long mode.
    kvm_segment {
        selector: TSS_SELECTOR,
        limit: 0x67,
        type_: 0xB,
        present: 1,
        ..Default::default()
    }
}

/// Returns a segment's GDT descriptor (Intel SDM 3A, 3.4.5).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = if segment.g == 1 {
        segment.limit >> 12
    } else {
        segment.limit
    };
    let (base, limit) = (segment.base, u64::from(limit));
    let bit = |value: u8, at: u32| u64::from(value) << at;
    (limit & 0xFFFF)
        | ((base & 0xFF_FFFF) << 16)
        | bit(segment.type_, 40)
        | bit(segment.s, 44)
        | bit(segment.dpl, 45)
        | bit(segment.present, 47)
        | ((limit >> 16 & 0xF) << 48)
        | bit(segment.avl, 52)
        | bit(segment.l, 53)
        | bit(segment.db, 54)
        | bit(segment.g, 55)
        | ((base >> 24 & 0xFF) << 56)
}
