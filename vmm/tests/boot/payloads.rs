//! Kernels of a few instructions, wrapped as images.
use std::{arch::global_asm, slice};

use linux_loader::{
    bootparam::{LOADED_HIGH, XLF_KERNEL_64, setup_header},
    elf::{Elf64_Ehdr, Elf64_Phdr, PT_LOAD, PT_NOTE},
};
use vm_memory::ByteValued;

/// Load address of the ELF images.
const AT: u64 = 0x10_0000;

// 32-bit code is entered with EBX at hvm_start_info, 64-bit code with RSI at boot_params. The
// sections never run in this process: their bytes are copied.
global_asm!(
    ".pushsection .rodata",
    ".code32",
    // Writes the command line to the serial port, then resets.
    "pvh_echo:",
    "mov esi, [ebx + 24]",
    "mov dx, 0x3f8",
    "2: lodsb",
    "test al, al",
    "jz 3f",
    "out dx, al",
    "jmp 2b",
    "3: mov al, 0xfe",
    "out 0x64, al",
    "4: hlt",
    "jmp 4b",
    "pvh_echo_end:",
    // Exits with the number of CPUs by CPUID as status.
    "pvh_cpuid:",
    "mov eax, 1",
    "cpuid",
    "shr ebx, 16",
    "mov al, bl",
    "out 0xf4, al",
    "2: hlt",
    "jmp 2b",
    "pvh_cpuid_end:",
    // Starts all other CPUs, each of which counts itself. When their number equals the first byte
    // of the command line, it is the exit status.
    "pvh_smp:",
    "mov ebp, [ebx + 24]",
    "mov esp, 0xa000",
    "call 3f",
    // Code of the other CPUs: real mode, copied to 0x8000.
    ".code16",
    "xor ax, ax",
    "mov ds, ax",
    "lock inc byte ptr [0x9000]",
    "2: hlt",
    "jmp 2b",
    ".code32",
    "3: pop esi",
    "mov edi, 0x8000",
    "mov ecx, 16",
    "rep movsb",
    // INIT, then a start-up IPI with vector 8, to all other CPUs.
    "mov dword ptr [0xfee000f0], 0x1ff",
    "mov dword ptr [0xfee00300], 0xc4500",
    "mov dword ptr [0xfee00300], 0xc4608",
    "4: pause",
    "mov al, [0x9000]",
    "cmp al, [ebp]",
    "jne 4b",
    "out 0xf4, al",
    "5: hlt",
    "jmp 5b",
    "pvh_smp_end:",
    ".code64",
    // Writes the command line to the serial port, then powers off.
    "linux_echo:",
    "mov esi, [rsi + 0x228]",
    "mov dx, 0x3f8",
    "2: lodsb",
    "test al, al",
    "jz 3f",
    "out dx, al",
    "jmp 2b",
    "3: mov al, 0x34",
    "mov dx, 0x600",
    "out dx, al",
    "4: hlt",
    "jmp 4b",
    "linux_echo_end:",
    ".popsection",
);

macro_rules! code {
    ($name:ident, $start:ident, $end:ident) => {
        pub(crate) fn $name() -> &'static [u8] {
            unsafe extern "C" {
                static $start: u8;
                static $end: u8;
            }
            // SAFETY: the two symbols enclose bytes of one read-only section.
            unsafe {
                let (start, end) = (&raw const $start, &raw const $end);
                slice::from_raw_parts(start, end.offset_from(start) as usize)
            }
        }
    };
}
code!(echo, pvh_echo, pvh_echo_end);
code!(cpuid, pvh_cpuid, pvh_cpuid_end);
code!(smp, pvh_smp, pvh_smp_end);
code!(linux_echo_code, linux_echo, linux_echo_end);

/// Returns an ELF with a PVH note.
pub(crate) fn pvh(code: &[u8]) -> Vec<u8> {
    elf(code, true)
}

/// Returns an ELF without a note, which is entered in 64-bit mode.
pub(crate) fn vmlinux(code: &[u8]) -> Vec<u8> {
    elf(code, false)
}

fn elf(code: &[u8], pvh: bool) -> Vec<u8> {
    let mut header = Elf64_Ehdr {
        e_type: 2,
        e_machine: 62,
        e_entry: AT,
        e_phoff: size_of::<Elf64_Ehdr>() as u64,
        e_phentsize: size_of::<Elf64_Phdr>() as u16,
        e_phnum: 2,
        ..Default::default()
    };
    header.e_ident[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    let words = [4, 4, 18, u32::from_le_bytes(*b"Xen\0"), AT as u32];
    let note: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    let after_headers = (size_of::<Elf64_Ehdr>() + 2 * size_of::<Elf64_Phdr>()) as u64;
    let segment = |p_type, skipped, size: usize| Elf64_Phdr {
        p_type,
        p_offset: after_headers + skipped,
        p_paddr: AT,
        p_filesz: size as u64,
        p_memsz: size as u64,
        ..Default::default()
    };
    let notes = segment(if pvh { PT_NOTE } else { 0 }, 0, note.len());
    let load = segment(PT_LOAD, note.len() as u64, code.len());
    [
        header.as_slice(),
        notes.as_slice(),
        load.as_slice(),
        &note,
        code,
    ]
    .concat()
}

/// Returns a bzImage, which is entered 512 bytes into its code.
pub(crate) fn bzimage(code: &[u8]) -> Vec<u8> {
    let setup = setup_header {
        setup_sects: 1,
        header: 0x5372_6448,
        jump: 0x6AEB,
        version: 0x20F,
        loadflags: LOADED_HIGH,
        xloadflags: XLF_KERNEL_64,
        initrd_addr_max: 0x7FFF_FFFF,
        cmdline_size: 255,
        pref_address: 0x100_0000,
        init_size: 0x10_0000,
        ..Default::default()
    };
    let mut image = vec![0; 1024 + 512];
    image[0x1F1..0x1F1 + size_of::<setup_header>()].copy_from_slice(setup.as_slice());
    image.extend(code);
    image
}
