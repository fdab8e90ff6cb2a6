//! The built-in guest's image: brings the machine up and runs the workloads on every CPU.
#![no_std]
#![no_main]
extern crate alloc;

mod machine;

use core::panic::PanicInfo;

use machine::{apic, clock, console, cpu, memory};
use slipgate_guest::firmware::{acpi, pvh};

/// Ring 3 starts here, on CPU 0, with interrupts off and without a heap.
#[unsafe(no_mangle)]
extern "C" fn start(start_info: u64) -> ! {
    cpu::fill_idt(apic::x2apic_offered());
    let clock_source = clock::start();
    apic::mask_legacy_interrupts();
    apic::start();
    apic::calibrate_timer();
    cpu::allow_interrupts();

    let memory = memory::Identity;
    let info = pvh::read(&memory, start_info, memory::image_end_address())
        .unwrap_or_else(|why| panic!("{why}"));
    let tables = acpi::read(&memory, info.rsdp).unwrap_or_else(|why| panic!("{why}"));
    // SAFETY: free memory, says the loader; the tables have been read.
    unsafe { memory::claim_heap(info.heap.0, info.heap.1) };
    console::print_line(&alloc::format!(
        r#"{{"boot":"slipgate-guest","cpus":{},"memory_mib":{},"clock":"{}","x2apic":{},"tsc_deadline":{},"ecam":{},"ns":{}}}"#,
        tables.apic_ids().len(),
        info.heap.1 >> 20,
        clock_source.name(),
        apic::x2apic_offered(),
        clock::has_tsc_deadline(),
        tables.ecam.is_some(),
        clock::now_ns()
    ));
    console::exit(0)
}

/// An exception: nothing here expects one.
#[unsafe(no_mangle)]
extern "C" fn fault(vector: u64, error_code: u64, instruction: u64, address: u64, stack: u64) -> ! {
    console::die(format_args!(
        "exception {vector} at {instruction:#x}, error code {error_code:#x}, cr2 {address:#x}, rsp {stack:#x}, cpu {}",
        cpu::Cpu::current().index()
    ))
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    console::die(format_args!("{info}"))
}

/// The precompiled core and alloc refer to these two; nothing unwinds.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    console::die(format_args!("unwinding in an image that never unwinds"))
}
