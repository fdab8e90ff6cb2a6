//! The BPF programs of slipgate.
#![no_std]
#![no_main]

use aya_ebpf::{bindings::TC_ACT_UNSPEC, macros::classifier, programs::TcContext};

/// Lets everything pass.
#[classifier]
pub fn guest_egress(_frame: TcContext) -> i32 {
    TC_ACT_UNSPEC
}

/// Helpers are GPL-only to programs whose license does not say so.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
pub static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
