//! The local APIC: interrupts to other CPUs, their start, and the timer. It is accessed by its
//! registers in memory, not by x2APIC's MSRs: ring 3 reaches MSRs only through a trap, and the
//! interrupt stubs would have to save registers. On a host that emulates ring 0, a wake-up took 53
//! µs instead of 64.
use core::{
    ptr,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use super::{
    clock,
    cpu::{self, Cpu, SPURIOUS_VECTOR, Slot},
};

const BASE: u64 = 0xFEE0_0000;
const BASE_MSR: u32 = 0x1B;
const BASE_ENABLED: u64 = 1 << 11;
const BASE_X2APIC: u64 = 1 << 10;
const TSC_DEADLINE_MSR: u32 = 0x6E0;

const ID: u32 = 0x20;
const SPURIOUS: u32 = 0xF0;
const SPURIOUS_ENABLE: u64 = 1 << 8;
const COMMAND: u32 = 0x300;
const TIMER: u32 = 0x320;
const TIMER_TSC_DEADLINE: u64 = 2 << 17;
const TIMER_INITIAL: u32 = 0x380;
const TIMER_CURRENT: u32 = 0x390;
const TIMER_DIVIDE: u32 = 0x3E0;
const DIVIDE_BY_1: u64 = 0b1011;

const INIT: u64 = 5 << 8;
const STARTUP: u64 = 6 << 8;
const ASSERT: u64 = 1 << 14;

/// Timer ticks per 2^20 ns; 0 if the timer counts in TSC deadlines.
static TICKS_PER_2_20_NS: AtomicU64 = AtomicU64::new(0);

/// Masks the two 8259s, which firmware left with the timer on an exception's vector. Called once.
pub(crate) fn mask_legacy_interrupts() {
    for mask in [0x21, 0xA1] {
        // SAFETY: a PC's interrupt controllers, which nothing here uses.
        unsafe { cpu::port::write8(mask, 0xFF) };
    }
}

/// Turns on the calling CPU's local APIC.
pub(crate) fn start() {
    // SAFETY: every x86-64 CPU has this register.
    let base = unsafe { cpu::read_msr(BASE_MSR) };
    assert!(
        base & BASE_X2APIC == 0,
        "the firmware has turned x2APIC on: {base:#x}"
    );
    // SAFETY: as above.
    unsafe { cpu::write_msr(BASE_MSR, base | BASE_ENABLED) };
    write(SPURIOUS, SPURIOUS_ENABLE | u64::from(SPURIOUS_VECTOR));
    write(TIMER_DIVIDE, DIVIDE_BY_1);
    let mode = if clock::has_tsc_deadline() {
        TIMER_TSC_DEADLINE
    } else {
        0
    };
    write(TIMER, mode | u64::from(Slot::Timer.vector()));
}

/// Measures the timer against the clock, unless it counts in TSC deadlines. Called once, on CPU 0.
pub(crate) fn calibrate_timer() {
    if clock::has_tsc_deadline() {
        return;
    }
    write(TIMER_INITIAL, 0xFFFF_FFFF);
    let start = clock::now_ns();
    let first = read(TIMER_CURRENT);
    while clock::now_ns() - start < 2_000_000 {}
    let ticks = first - read(TIMER_CURRENT);
    let elapsed = clock::now_ns() - start;
    write(TIMER_INITIAL, 0);
    TICKS_PER_2_20_NS.store(((ticks << 20) / elapsed).max(1), Ordering::Relaxed);
}

/// Sets the calling CPU's timer to interrupt at `at_ns`, or before that if that is too far ahead.
pub(crate) fn set_timer(at_ns: u64) {
    match TICKS_PER_2_20_NS.load(Ordering::Relaxed) {
        // SAFETY: the CPU has the register: `calibrate_timer` has checked.
        0 => unsafe { cpu::write_msr(TSC_DEADLINE_MSR, clock::tsc_at(at_ns)) },
        rate => {
            let ns = at_ns.saturating_sub(clock::now_ns()).min(1 << 32);
            write(TIMER_INITIAL, ((ns * rate) >> 20).clamp(1, 0xFFFF_FFFF));
        }
    }
}

/// Returns the calling CPU's local APIC id.
pub(crate) fn id() -> u32 {
    read(ID) as u32 >> 24
}

/// Interrupts another CPU by its local APIC id.
pub(crate) fn interrupt(apic_id: u32, slot: Slot) {
    // Data for the other CPU must be visible before the interrupt.
    fence(Ordering::SeqCst);
    command(apic_id, ASSERT | u64::from(slot.vector()));
}

/// Resets another CPU and starts it at `page`, below 1 MiB.
pub(crate) fn start_cpu(apic_id: u32, page: u64) {
    command(apic_id, INIT | ASSERT);
    clock::spin_ns(200_000);
    for _ in 0..2 {
        command(apic_id, STARTUP | ASSERT | page >> 12);
        clock::spin_ns(200_000);
    }
}

/// Sends a command to a CPU. The destination register is written only if the CPU differs from the
/// last one, which saves an exit in most cases.
fn command(apic_id: u32, command: u64) {
    let last = &Cpu::current().last_destination;
    if last.swap(apic_id, Ordering::Relaxed) != apic_id {
        write(COMMAND + 0x10, u64::from(apic_id) << 24);
    }
    write(COMMAND, command);
}

fn read(register: u32) -> u64 {
    // SAFETY: a register of the local APIC, mapped uncached.
    u64::from(unsafe { ptr::read_volatile((BASE + u64::from(register)) as *const u32) })
}

fn write(register: u32, value: u64) {
    // SAFETY: a register of the local APIC, mapped uncached.
    unsafe { ptr::write_volatile((BASE + u64::from(register)) as *mut u32, value as u32) };
}
