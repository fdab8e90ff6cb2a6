//! The machine's implementation of the workloads' platform.
use core::{
    arch::{asm, x86_64::_rdtsc},
    sync::atomic::{AtomicU64, Ordering},
};

use slipgate_guest::platform::Platform;

use super::{
    apic, clock, console,
    cpu::{Cpu, Slot},
    cpuid,
};

/// Address of the VM's generation id; 0: there is none.
static GENERATION_AT: AtomicU64 = AtomicU64::new(0);

/// Has [`Platform::generation`] read the VM's generation id from here.
pub(crate) fn generation_is_at(address: u64) {
    // The identity mapping ends there.
    if address.is_multiple_of(8) && address < 1 << 32 {
        GENERATION_AT.store(address, Ordering::Relaxed);
    }
}

/// Platform on the bare machine.
pub(crate) struct Machine {
    cpus: usize,
    has_rdrand: bool,
    seed: AtomicU64,
}

impl Machine {
    /// Returns a machine whose first `cpus` CPUs run workloads.
    pub(crate) fn new(cpus: usize) -> Self {
        Machine {
            cpus,
            has_rdrand: cpuid::leaf(1).ecx & 1 << 30 != 0,
            seed: AtomicU64::new(clock::tsc()),
        }
    }

    /// Returns 64 random bits: the CPU's, if it has RDRAND, mixed with SplitMix64 (Steele et al.,
    /// 2014).
    fn random_word(&self) -> u64 {
        // SAFETY: every x86-64 CPU has it.
        let mut stir = unsafe { _rdtsc() };
        if self.has_rdrand {
            // SAFETY: the CPU has the instruction; if it fails, the time stamp is used instead.
            unsafe {
                asm!("rdrand {0}", "cmovnc {0}, {1}", out(reg) stir, in(reg) stir, options(nomem, nostack))
            };
        }
        let seed = self
            .seed
            .fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let mut word = seed ^ stir;
        word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ word >> 31
    }
}

impl Platform for Machine {
    fn cpus(&self) -> usize {
        self.cpus
    }

    fn now_ns(&self) -> u64 {
        clock::now_ns()
    }

    fn booted_unix_ms(&self) -> u64 {
        clock::booted_unix_ms()
    }

    /// The timer stays set when it fires before `until_ns`: setting it again is an exit, and one
    /// early wake-up costs less.
    fn idle(&self, until_ns: Option<u64>) {
        let cpu = Cpu::current();
        if let Some(until) = until_ns {
            let now = clock::now_ns();
            if until <= now {
                return;
            }
            let set = cpu.timer_ns.load(Ordering::Relaxed);
            // It may fire before its time by this clock; then it is not set any more.
            let fired = cpu.interrupts()[Slot::Timer as usize];
            if set <= now || set > until || fired != cpu.timer_fired.load(Ordering::Relaxed) {
                cpu.timer_ns.store(until, Ordering::Relaxed);
                cpu.timer_fired.store(fired, Ordering::Relaxed);
                apic::set_timer(until);
            }
        }
        cpu.halt();
    }

    fn wake(&self, cpu: usize) {
        apic::interrupt(Cpu::number(cpu).apic_id, Slot::Wake);
    }

    fn random(&self, out: &mut [u8]) {
        for bytes in out.chunks_mut(8) {
            bytes.copy_from_slice(&self.random_word().to_le_bytes()[..bytes.len()]);
        }
    }

    fn print_line(&self, line: &str) {
        console::print_line(line);
    }

    fn generation(&self) -> u64 {
        match GENERATION_AT.load(Ordering::Relaxed) {
            0 => 0,
            // SAFETY: mapped and aligned; the firmware has reserved it, and the host writes to it.
            at => unsafe { (at as *const u64).read_volatile() },
        }
    }

    fn reset(&self) {
        console::reset()
    }
}
