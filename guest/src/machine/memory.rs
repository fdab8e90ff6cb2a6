//! Memory: identity mapping, the heap, and device registers above 4 GiB.
use core::{ptr, slice};

use slipgate_guest::firmware::PhysicalMemory;
use talc::{TalcLock, source::Manual};

use super::cpu;

#[global_allocator]
static HEAP: TalcLock<spin::Mutex<()>, Manual> = TalcLock::new(Manual);

unsafe extern "C" {
    static image_end: u8;
    static mut pml4: [u64; 512];
}

/// The identity mapping at boot: 0 to 4 GiB.
pub(crate) struct Identity;

impl PhysicalMemory for Identity {
    fn bytes(&self, address: u64, length: usize) -> Option<&[u8]> {
        let end = address.checked_add(length as u64)?;
        if address == 0 || end > 1 << 32 {
            return None;
        }
        // SAFETY: mapped; the firmware's data does not change while it is read.
        Some(unsafe { slice::from_raw_parts(address as *const u8, length) })
    }
}

/// Returns the end of the image. Memory above it is free.
pub(crate) fn image_end_address() -> u64 {
    (&raw const image_end).addr() as u64
}

/// Gives memory to the heap.
///
/// # Safety
/// The memory must not be in use.
pub(crate) unsafe fn claim_heap(start: u64, bytes: u64) {
    // SAFETY: the caller's promise.
    let claimed = unsafe { HEAP.lock().claim(start as *mut u8, bytes as usize) };
    assert!(claimed.is_some(), "no heap in {bytes} bytes at {start:#x}");
}

/// Maps device registers, uncached. Below 4 GiB the boot tables have mapped the address already.
/// May be called only before the other CPUs start.
pub(crate) fn map_registers(address: u64, bytes: u64) -> *mut u8 {
    const LARGE: u64 = 1 << 21;
    let end = address + bytes;
    let mut page = address & !(LARGE - 1);
    while page < end {
        // SAFETY: page tables are identity-mapped and writable in ring 3; absent entries are
        // filled.
        unsafe {
            let pdpt = next_table(&raw mut pml4, page >> 39 & 511);
            let directory = next_table(pdpt, page >> 30 & 511);
            // Present, writable, user, write-through, uncached, large.
            directory
                .cast::<u64>()
                .add((page >> 21 & 511) as usize)
                .write_volatile(page | 0x9F);
        }
        cpu::flush_page(page);
        page += LARGE;
    }
    address as *mut u8
}

unsafe fn next_table(table: *mut [u64; 512], index: u64) -> *mut [u64; 512] {
    #[repr(align(4096))]
    struct Table([u64; 512]);
    // SAFETY: `table` is one of the page tables, and `index` < 512.
    unsafe {
        let entry = table.cast::<u64>().add(index as usize);
        if entry.read() & 1 == 0 {
            let fresh = alloc::boxed::Box::leak(alloc::boxed::Box::new(Table([0; 512])));
            entry.write_volatile(ptr::from_mut(&mut fresh.0).addr() as u64 | 7);
        }
        (entry.read() & !0xFFF) as *mut [u64; 512]
    }
}

/// Functions that the compiler calls. The string instructions are as fast as any alternative on
/// current CPUs, and the compiler can't turn them back into calls of themselves. They move eight
/// bytes at a time, because some emulators execute them one by one.
mod compiler {
    use core::arch::asm;

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
        let words = bytes / 8;
        // SAFETY: as memcpy's.
        unsafe {
            // `rep` costs some 30 cycles to start.
            if words >= 8 {
                asm!("rep movsq", inout("rcx") words => _, inout("rdi") to => _, inout("rsi") from => _,
                    options(nostack, preserves_flags));
            } else {
                for at in (0..words * 8).step_by(8) {
                    let word = from.add(at).cast::<u64>().read_unaligned();
                    asm!("mov [{}], {}", in(reg) to.add(at), in(reg) word, options(nostack, preserves_flags));
                }
            }
            for at in words * 8..bytes {
                // Volatile, or it would become a call of memcpy.
                to.add(at).write_volatile(from.add(at).read_volatile());
            }
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
        // SAFETY: as memmove's; the direction flag is restored.
        unsafe {
            if to.addr().wrapping_sub(from.addr()) >= bytes {
                return memcpy(to, from, bytes);
            }
            asm!("std", "rep movsb", "cld", inout("rcx") bytes => _,
                inout("rdi") to.wrapping_add(bytes).wrapping_sub(1) => _,
                inout("rsi") from.wrapping_add(bytes).wrapping_sub(1) => _, options(nostack));
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memset(to: *mut u8, value: i32, bytes: usize) -> *mut u8 {
        let word = u64::from(value as u8) * 0x0101_0101_0101_0101;
        // SAFETY: as memset's.
        unsafe {
            asm!("rep stosq", "mov ecx, {rest:e}", "rep stosb", rest = in(reg) bytes & 7,
                inout("rcx") bytes / 8 => _, inout("rdi") to => _, in("rax") word, options(nostack, preserves_flags));
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, bytes: usize) -> i32 {
        for at in 0..bytes {
            // SAFETY: as memcmp's. Volatile, or it would become a call of memcmp.
            let (left, right) =
                unsafe { (left.add(at).read_volatile(), right.add(at).read_volatile()) };
            if left != right {
                return i32::from(left) - i32::from(right);
            }
        }
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, bytes: usize) -> i32 {
        // SAFETY: as memcmp's.
        unsafe { memcmp(left, right, bytes) }
    }
}
