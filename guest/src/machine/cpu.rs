//! One CPU: its state that both rings share, the descriptor tables, and the calls from ring 3 into
//! ring 0 (see `traps.s`).
pub(crate) mod port;

use core::{
    arch::{asm, global_asm},
    cell::UnsafeCell,
    mem::{offset_of, size_of},
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Largest number of CPUs that are started.
pub(crate) const CPU_LIMIT: usize = 32;

/// Purpose of an interrupt vector. A vector has the same purpose on every CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Slot {
    /// The local APIC's timer.
    Timer,
    /// A wake-up by another CPU.
    Wake,
    /// A change of the network device's configuration.
    Config,
    /// The CPU's own queue pair.
    Queue,
    /// The interrupt of the self-test.
    Test,
}

/// Number of [`Slot`]s of a CPU.
pub(crate) const SLOTS: usize = 5;
const FIRST_VECTOR: u8 = 0x40;
/// Spurious vector of the local APIC.
pub(crate) const SPURIOUS_VECTOR: u8 = 0xFF;

impl Slot {
    /// Returns the interrupt vector.
    pub(crate) const fn vector(self) -> u8 {
        FIRST_VECTOR + self as u8
    }
}

/// Upper bytes of the counters, so that no register holds their value by chance.
const COUNTERS_MAGIC: u64 = 0x005A_17C3 << 40;
const CALL: u32 = 0x51A9_CA11;
/// Size of a CPU's stack, bytes.
pub(crate) const STACK_BYTES: usize = 256 << 10;
const FAULT_STACK_BYTES: usize = 8 << 10;
const RING0_STACK_BYTES: usize = 1 << 10;
const CPU_SHIFT: usize = 8;

/// State of a CPU. `GS_BASE` points to it in both rings.
#[repr(C, align(256))]
pub(crate) struct Cpu {
    this: u64,
    /// One byte per [`Slot`], which its interrupt stub increments.
    interrupts: AtomicU64,
    ring0_stack: u64,
    stack: u64,
    entry: u64,
    fault_stack: u64,
    index: u64,
    /// Local APIC id of the CPU.
    pub(crate) apic_id: u32,
    tss: Tss,
    /// The counters at the end of the last halt.
    seen: AtomicU64,
    /// Number of interrupts of each slot, up to the last halt.
    totals: [AtomicU64; SLOTS],
    /// Local APIC id of the CPU that was last interrupted; u32::MAX at first.
    pub(crate) last_destination: AtomicU32,
    /// Time at which the timer fires, in ns.
    pub(crate) timer_ns: AtomicU64,
    /// Number of timer interrupts when the timer was set.
    pub(crate) timer_fired: AtomicU64,
}

const _: () = assert!(size_of::<Cpu>() == 1 << CPU_SHIFT);

#[repr(C, packed(4))]
struct Tss {
    reserved: u32,
    ring0_stack: u64,
    rest: [u8; 92],
}

/// Data that Rust shares with the assembly, and CPUs with each other, under rules of their own.
#[repr(C, align(4096))]
struct Shared<T>(UnsafeCell<T>);
// SAFETY: written by CPU 0 before the CPU that reads it starts; after that each by its own CPU.
unsafe impl<T> Sync for Shared<T> {}

#[unsafe(no_mangle)]
static CPUS: Shared<[Cpu; CPU_LIMIT]> =
    Shared(UnsafeCell::new([const { Cpu::unused() }; CPU_LIMIT]));
#[unsafe(no_mangle)]
static IDT: Shared<[[u64; 2]; 256]> = Shared(UnsafeCell::new([[0; 2]; 256]));
#[unsafe(no_mangle)]
static BOOT_STACK: Shared<[u8; STACK_BYTES]> = Shared(UnsafeCell::new([0; STACK_BYTES]));
#[unsafe(no_mangle)]
static FAULT_STACKS: Shared<[[u8; FAULT_STACK_BYTES]; CPU_LIMIT]> =
    Shared(UnsafeCell::new([[0; FAULT_STACK_BYTES]; CPU_LIMIT]));
#[unsafe(no_mangle)]
static RING0_STACKS: Shared<[[u8; RING0_STACK_BYTES]; CPU_LIMIT]> =
    Shared(UnsafeCell::new([[0; RING0_STACK_BYTES]; CPU_LIMIT]));

global_asm!(
    concat!(
        ".set CPU_LIMIT, {limit}\n.set CPU_SHIFT, {shift}\n.set CPU_INTERRUPTS, {interrupts}\n",
        ".set CPU_RING0_STACK, {ring0_stack}\n.set CPU_STACK, {stack}\n.set CPU_ENTRY, {entry}\n",
        ".set CPU_FAULT_STACK, {fault_stack}\n.set CPU_TSS, {tss}\n.set CALL, {call}\n",
        ".set STACK_BYTES, {stack_bytes}\n.set FAULT_STACK_BYTES, {fault_stack_bytes}\n",
        ".set RING0_STACK_BYTES, {ring0_stack_bytes}\n",
        include_str!("boot.s"),
        include_str!("traps.s"),
    ),
    limit = const CPU_LIMIT,
    shift = const CPU_SHIFT,
    interrupts = const offset_of!(Cpu, interrupts),
    ring0_stack = const offset_of!(Cpu, ring0_stack),
    stack = const offset_of!(Cpu, stack),
    entry = const offset_of!(Cpu, entry),
    fault_stack = const offset_of!(Cpu, fault_stack),
    tss = const offset_of!(Cpu, tss),
    call = const CALL,
    stack_bytes = const STACK_BYTES,
    fault_stack_bytes = const FAULT_STACK_BYTES,
    ring0_stack_bytes = const RING0_STACK_BYTES,
);

unsafe extern "C" {
    static exception_stubs: [u64; 22];
    static interrupt_stubs: [u64; SLOTS];
    static mut gdt_tss: [[u16; 8]; CPU_LIMIT];
    fn interrupt_spurious();
    fn call_nothing();
    fn call_write_msr();
    fn call_read_msr();
    fn call_allow_interrupts();
    fn call_flush_page();
    fn call_in_8();
    fn call_in_32();
    fn call_out_8();
    fn call_out_16();
    fn call_out_32();
    fn call_out_string();
}

impl Cpu {
    const fn unused() -> Self {
        Cpu {
            this: 0,
            interrupts: AtomicU64::new(COUNTERS_MAGIC),
            ring0_stack: 0,
            stack: 0,
            entry: 0,
            fault_stack: 0,
            index: 0,
            apic_id: 0,
            tss: Tss {
                reserved: 0,
                ring0_stack: 0,
                rest: [0; 92],
            },
            seen: AtomicU64::new(COUNTERS_MAGIC),
            totals: [const { AtomicU64::new(0) }; SLOTS],
            last_destination: AtomicU32::new(u32::MAX),
            timer_ns: AtomicU64::new(0),
            timer_fired: AtomicU64::new(0),
        }
    }

    /// Returns the calling CPU's state.
    pub(crate) fn current() -> &'static Cpu {
        let this: *const Cpu;
        // SAFETY: GS_BASE points to this CPU's state since before ring 3; its first word is `this`.
        unsafe {
            asm!("mov {}, gs:[0]", out(reg) this, options(nostack, preserves_flags, readonly, pure));
            &*this
        }
    }

    /// Returns the state of CPU `index`, started or not.
    pub(crate) fn number(index: usize) -> &'static Cpu {
        assert!(index < CPU_LIMIT);
        // SAFETY: within the array; the fields that change after start are atomic.
        unsafe { &*CPUS.0.get().cast::<Cpu>().add(index) }
    }

    /// Returns the CPU's number.
    pub(crate) fn index(&self) -> usize {
        self.index as usize
    }

    /// Returns the number of interrupts of each slot so far. Only the CPU itself may call this.
    pub(crate) fn interrupts(&self) -> [u64; SLOTS] {
        self.count(self.interrupts.load(Ordering::Relaxed))
    }

    fn count(&self, now: u64) -> [u64; SLOTS] {
        let before = self.seen.load(Ordering::Relaxed).to_le_bytes();
        let mut totals = [0; SLOTS];
        for (slot, (&after, before)) in now.to_le_bytes().iter().zip(before).take(SLOTS).enumerate()
        {
            let new = u64::from(after.wrapping_sub(before));
            totals[slot] = self.totals[slot].load(Ordering::Relaxed) + new;
        }
        totals
    }

    /// Halts until an interrupt. Returns at once if one has come since the last halt ended.
    pub(crate) fn halt(&self) {
        let seen = self.seen.load(Ordering::Relaxed);
        // SAFETY: the #GP stub halts, or jumps to `call_nothing`; both come back behind the hlt
        // with all registers as they were.
        unsafe {
            asm!("hlt", in("r9") call_nothing as *const () as u64, in("r10") u64::from(CALL), in("r11") seen, options(nostack));
        }
        let now = self.interrupts.load(Ordering::Relaxed);
        for (total, new) in self.totals.iter().zip(self.count(now)) {
            total.store(new, Ordering::Relaxed);
        }
        self.seen.store(now, Ordering::Relaxed);
    }
}

/// Sets CPU 0's local APIC id. Returns all ids with CPU 0's first. Must be called before the others
/// start.
pub(crate) fn name_boot_cpu(apic_ids: &[u32]) -> alloc::vec::Vec<u32> {
    let own = super::apic::id();
    // SAFETY: no other CPU reads CPU 0's state yet.
    unsafe { (*CPUS.0.get().cast::<Cpu>()).apic_id = own };
    let others = apic_ids.iter().copied().filter(|id| *id != own);
    core::iter::once(own)
        .chain(others)
        .take(CPU_LIMIT)
        .collect()
}

/// Prepares the state of CPU `index`, whose ring 3 starts at `entry` on `stack_top`.
///
/// # Safety
/// The CPU must not have been started.
pub(crate) unsafe fn prepare(
    index: usize,
    apic_id: u32,
    entry: extern "C" fn() -> !,
    stack_top: u64,
) {
    assert!(index < CPU_LIMIT);
    // SAFETY: no CPU uses this element yet; the stacks are that CPU's own.
    unsafe {
        let cpu = CPUS.0.get().cast::<Cpu>().add(index);
        let ring0_stack = RING0_STACKS
            .0
            .get()
            .cast::<u8>()
            .add((index + 1) * RING0_STACK_BYTES) as u64;
        (*cpu).this = cpu as u64;
        (*cpu).ring0_stack = ring0_stack;
        (*cpu).tss.ring0_stack = ring0_stack;
        (*cpu).entry = entry as *const () as u64;
        // As after a call: 8 below a multiple of 16.
        (*cpu).stack = (stack_top & !15) - 8;
        (*cpu).fault_stack = FAULT_STACKS
            .0
            .get()
            .cast::<u8>()
            .add((index + 1) * FAULT_STACK_BYTES) as u64
            - 8;
        (*cpu).index = index as u64;
        (*cpu).apic_id = apic_id;
        let tss = &raw const (*cpu).tss as u64;
        let descriptor = (&raw mut gdt_tss).cast::<u16>().add(index * 8);
        descriptor.add(1).write(tss as u16);
        // Byte 4: base 16..24; byte 5: present TSS, not busy.
        descriptor.add(2).write(0x8900 | (tss >> 16) as u16 & 0xFF);
        descriptor.add(3).write((tss >> 16) as u16 & 0xFF00);
    }
}

/// Fills the interrupt descriptor table. Before that any trap is a triple fault.
pub(crate) fn fill_idt() {
    let idt = IDT.0.get().cast::<[u64; 2]>();
    let set = |vector: usize, stub: u64| {
        // An interrupt gate to ring 0; its privilege level (0) matters to `int n` only.
        let low = stub & 0xFFFF | 0x08 << 16 | 0x8E00 << 32 | (stub >> 16 & 0xFFFF) << 48;
        // SAFETY: vector < 256; only CPU 0 runs, and it fills the table before the others start.
        unsafe { idt.add(vector).write_volatile([low, stub >> 32]) };
    };
    // SAFETY: tables of constants in traps.s.
    let (exceptions, interrupts) = unsafe { (&exception_stubs, &interrupt_stubs) };
    for (vector, &stub) in exceptions
        .iter()
        .enumerate()
        .filter(|(_, stub)| **stub != 0)
    {
        set(vector, stub);
    }
    for (slot, &stub) in interrupts.iter().enumerate() {
        set(usize::from(FIRST_VECTOR) + slot, stub);
    }
    set(
        usize::from(SPURIOUS_VECTOR),
        interrupt_spurious as *const () as u64,
    );
}

/// Calls a routine of `traps.s` in ring 0.
///
/// # Safety
/// The routine's use of the registers must be safe.
unsafe fn ring0(routine: unsafe extern "C" fn(), a: u64, c: u64, d: u64, si: u64) -> (u64, u64) {
    let (low, high);
    // SAFETY: the #GP stub jumps to the routine, which returns behind the hlt; it changes no other
    // registers than these, and not this stack.
    unsafe {
        asm!("hlt",
            in("r9") routine as *const () as u64, in("r10") u64::from(CALL), in("r11") 0u64,
            inout("rax") a => low, inout("rcx") c => _, inout("rdx") d => high, inout("rsi") si => _,
            in("rdi") si, options(nostack));
    }
    (low, high)
}

/// Enables interrupts in ring 3, from now on.
pub(crate) fn allow_interrupts() {
    // SAFETY: the IDT is filled by then, and the stubs preserve every register.
    unsafe { ring0(call_allow_interrupts, 0, 0, 0, 0) };
}

/// Writes a model-specific register.
///
/// # Safety
/// The register must exist, and its effect must be intended.
pub(crate) unsafe fn write_msr(register: u32, value: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        ring0(
            call_write_msr,
            value & 0xFFFF_FFFF,
            register.into(),
            value >> 32,
            0,
        )
    };
}

/// Reads a model-specific register.
///
/// # Safety
/// The register must exist.
pub(crate) unsafe fn read_msr(register: u32) -> u64 {
    // SAFETY: the caller's promise.
    let (low, high) = unsafe { ring0(call_read_msr, 0, register.into(), 0, 0) };
    high << 32 | low & 0xFFFF_FFFF
}

/// Invalidates the CPU's TLB entry for the page at `address`.
pub(crate) fn flush_page(address: u64) {
    // SAFETY: invlpg takes any address.
    unsafe { ring0(call_flush_page, 0, 0, 0, address) };
}
