//! Time from the TSC. Its rate comes from kvm-clock, from CPUID (0x15, or a hypervisor's
//! 0x4000_0010), or else from a measurement against the PIT.
use core::{
    arch::x86_64::_rdtsc,
    hint, ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{
    cpu::{self, port},
    cpuid,
};

/// Factor from TSC ticks to time: ns = ticks * SCALE >> SCALE_SHIFT.
static SCALE: AtomicU64 = AtomicU64::new(0);
const SCALE_SHIFT: u32 = 40;
static START_TSC: AtomicU64 = AtomicU64::new(0);
static BOOTED_UNIX_MS: AtomicU64 = AtomicU64::new(0);

/// Source of the clock's rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The scale of kvm-clock.
    KvmClock,
    /// A leaf of CPUID.
    Cpuid,
    /// A measurement against the PIT.
    Pit,
}

impl Source {
    /// Returns the source's name, for the boot line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Source::KvmClock => "kvm-clock",
            Source::Cpuid => "cpuid",
            Source::Pit => "pit",
        }
    }
}

/// Determines the rate and starts the clock at 0.
pub(crate) fn start() -> Source {
    let (scale, source) = if let Some(scale) = kvm_clock_scale() {
        (scale, Source::KvmClock)
    } else if let Some(hz) = cpuid_hz() {
        (scale_of_hz(hz), Source::Cpuid)
    } else {
        (scale_of_hz(pit_hz()), Source::Pit)
    };
    SCALE.store(scale, Ordering::Relaxed);
    START_TSC.store(tsc(), Ordering::Relaxed);
    BOOTED_UNIX_MS.store(kvm_wall_clock_ms().unwrap_or(0), Ordering::Relaxed);
    source
}

/// Returns the time of day at the machine's creation, shortly before [`start`], in milliseconds
/// since 1970; 0 without kvm-clock.
pub(crate) fn booted_unix_ms() -> u64 {
    BOOTED_UNIX_MS.load(Ordering::Relaxed)
}

/// Returns nanoseconds since [`start`]. All CPUs agree, because their TSCs do.
pub(crate) fn now_ns() -> u64 {
    let ticks = tsc().saturating_sub(START_TSC.load(Ordering::Relaxed));
    ((u128::from(ticks) * u128::from(SCALE.load(Ordering::Relaxed))) >> SCALE_SHIFT) as u64
}

/// Returns the TSC's value at a time of [`now_ns`].
pub(crate) fn tsc_at(ns: u64) -> u64 {
    let ticks = (u128::from(ns) << SCALE_SHIFT) / u128::from(SCALE.load(Ordering::Relaxed).max(1));
    START_TSC
        .load(Ordering::Relaxed)
        .saturating_add(u64::try_from(ticks).unwrap_or(u64::MAX))
}

/// Waits for `ns` without halting.
pub(crate) fn spin_ns(ns: u64) {
    let end = now_ns() + ns;
    while now_ns() < end {
        hint::spin_loop();
    }
}

/// Returns whether the local APIC's timer can count in TSC deadlines.
pub(crate) fn has_tsc_deadline() -> bool {
    cpuid::leaf(1).ecx & 1 << 24 != 0
}

/// Returns the time stamp counter.
pub(crate) fn tsc() -> u64 {
    // SAFETY: every x86-64 CPU has it, and CR4.TSD is clear.
    unsafe { _rdtsc() }
}

fn scale_of_hz(hz: u64) -> u64 {
    (u128::from(1_000_000_000_u64) << SCALE_SHIFT)
        .checked_div(u128::from(hz))
        .map_or(0, |scale| scale as u64)
}

/// `pvclock_vcpu_time_info` (Linux: Documentation/virt/kvm/x86/msr.rst, MSR_KVM_SYSTEM_TIME_NEW).
#[repr(C, align(64))]
#[derive(Default)]
struct KvmTime {
    version: u32,
    pad: u32,
    tsc: u64,
    ns: u64,
    multiplier: u32,
    shift: i8,
    flags: u8,
    pad2: [u8; 2],
}

/// KVM_FEATURE_CLOCKSOURCE2: both registers of kvm-clock exist.
const CLOCKSOURCE2: u32 = 1 << 3;

/// `pvclock_wall_clock` (same document, MSR_KVM_WALL_CLOCK_NEW).
#[repr(C, align(16))]
struct KvmWallClock {
    version: u32,
    s: u32,
    ns: u32,
}

fn kvm_wall_clock_ms() -> Option<u64> {
    const WALL_CLOCK: u32 = 0x4B56_4D00;
    if cpuid::kvm_features() & CLOCKSOURCE2 == 0 {
        return None;
    }
    let mut time = KvmWallClock {
        version: 0,
        s: 0,
        ns: 0,
    };
    let at = &raw mut time;
    // SAFETY: KVM offers the register; it fills `time` during the write, and never again.
    let (s, ns) = unsafe {
        cpu::write_msr(WALL_CLOCK, at as u64);
        (
            ptr::read_volatile(&raw const (*at).s),
            ptr::read_volatile(&raw const (*at).ns),
        )
    };
    Some(u64::from(s) * 1000 + u64::from(ns) / 1_000_000)
}

fn kvm_clock_scale() -> Option<u64> {
    const SYSTEM_TIME: u32 = 0x4B56_4D01;
    if cpuid::kvm_features() & CLOCKSOURCE2 == 0 {
        return None;
    }
    let mut time = KvmTime::default();
    let at = &raw mut time;
    // SAFETY: KVM offers the register; it is turned off again before `time` is dropped.
    let (multiplier, shift) = unsafe {
        cpu::write_msr(SYSTEM_TIME, at as u64 | 1);
        // KVM fills it in on the next entry into the guest; the write itself has caused an exit.
        let read = (
            ptr::read_volatile(&raw const (*at).multiplier),
            ptr::read_volatile(&raw const (*at).shift),
        );
        cpu::write_msr(SYSTEM_TIME, 0);
        read
    };
    // ns = (ticks << shift) * multiplier >> 32
    let scale = u64::from(multiplier) << (SCALE_SHIFT - 32);
    let scale = if shift >= 0 {
        scale.checked_shl(shift as u32)?
    } else {
        scale >> -i32::from(shift)
    };
    (scale != 0).then_some(scale)
}

fn cpuid_hz() -> Option<u64> {
    let ratio = cpuid::leaf(0x15);
    if ratio.eax != 0 && ratio.ebx != 0 && ratio.ecx != 0 {
        return Some(u64::from(ratio.ecx) * u64::from(ratio.ebx) / u64::from(ratio.eax));
    }
    let khz = if cpuid::virtual_machine() {
        cpuid::leaf(0x4000_0010).eax
    } else {
        0
    };
    (khz != 0).then_some(u64::from(khz) * 1000)
}

/// Returns the TSC's rate, counted over 20 ms of the PIT's channel 2, whose output is in port 0x61.
fn pit_hz() -> u64 {
    const HZ: u64 = 1_193_182;
    const COUNT: u16 = 23_864;
    // SAFETY: a PC's timer and its gate; the speaker stays off.
    unsafe {
        let gate = port::read8(0x61) & !0b10;
        port::write8(0x61, gate & !1);
        port::write8(0x43, 0b1011_0000); // channel 2, both bytes, mode 0
        port::write8(0x42, COUNT as u8);
        port::write8(0x42, (COUNT >> 8) as u8);
        port::write8(0x61, gate | 1);
        let start = tsc();
        while port::read8(0x61) & 1 << 5 == 0 {
            // Without a PIT the port reads as all ones, or the bit is never set: give up after 2^33
            // ticks.
            if tsc() - start > 1 << 33 {
                break;
            }
        }
        (tsc() - start) * HZ / u64::from(COUNT)
    }
}
