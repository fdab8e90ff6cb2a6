//! Starts the other CPUs: INIT, SIPI, and their start-up code, below 1 MiB.
use core::{
    hint, ptr,
    sync::atomic::{AtomicU32, Ordering},
};

use alloc::boxed::Box;

use super::{
    apic, clock,
    cpu::{self, CPU_LIMIT, Cpu, STACK_BYTES},
};

/// Page of the start-up code. The firmware's tables lie elsewhere, and have been read by now.
const START_PAGE: u64 = 0x8000;
const PATIENCE_NS: u64 = 1_000_000_000;

/// Number of CPUs that have reached ring 3.
static STARTED: AtomicU32 = AtomicU32::new(1);
static mut ENTRY: fn(usize) -> ! = |_| loop {
    Cpu::current().halt();
};

unsafe extern "C" {
    static ap_start: u8;
    static ap_end: u8;
    static ap_cpu: AtomicU32;
}

/// Starts the CPUs with these local APIC ids, except CPU 0, one after the other. Each runs `entry`
/// with its number, which is its place in the list with CPU 0 first. Returns the number of running
/// CPUs.
pub(crate) fn start(apic_ids: &[u32], entry: fn(usize) -> !) -> usize {
    // SAFETY: the page is free, and the other CPUs read ENTRY after they were started.
    unsafe {
        ENTRY = entry;
        let length = (&raw const ap_end).addr() - (&raw const ap_start).addr();
        ptr::copy_nonoverlapping(&raw const ap_start, START_PAGE as *mut u8, length);
    }
    let others = apic_ids.iter().filter(|id| **id != Cpu::current().apic_id);
    for (index, apic_id) in (1..CPU_LIMIT).zip(others) {
        #[repr(align(16))]
        struct Stack(#[expect(dead_code, reason = "used by address")] [u8; STACK_BYTES]);
        let stack = Box::leak(Box::<Stack>::new_uninit());
        // SAFETY: this CPU has not been started.
        unsafe {
            cpu::prepare(
                index,
                *apic_id,
                begin,
                ptr::from_mut(stack).addr() as u64 + STACK_BYTES as u64,
            );
            ap_cpu.store(index as u32, Ordering::Release);
        }
        apic::start_cpu(*apic_id, START_PAGE);
        let deadline = clock::now_ns() + PATIENCE_NS;
        while STARTED.load(Ordering::Acquire) as usize != index + 1 {
            assert!(
                clock::now_ns() < deadline,
                "CPU {index}, APIC id {apic_id}, did not start"
            );
            hint::spin_loop();
        }
    }
    STARTED.load(Ordering::Acquire) as usize
}

extern "C" fn begin() -> ! {
    apic::start();
    cpu::allow_interrupts();
    STARTED.fetch_add(1, Ordering::Release);
    // SAFETY: written before this CPU was started.
    let entry = unsafe { ENTRY };
    entry(Cpu::current().index())
}
