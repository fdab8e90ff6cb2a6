//! The bare machine (x86-64 PC, virtual or not). It is part of the bootable image only.
//!
//! # Theory of operation
//! `boot.s` takes each CPU from its reset or PVH state to long mode and drops to ring 3 for good.
//! All pages belong to ring 3, so descriptor tables, page tables and device registers are ordinary
//! memory to Rust. Operations that need ring 0 (MSRs, ports, halting) go through the #GP stub, and
//! interrupt stubs only count and return (`traps.s`). Hosts that emulate ring 0 still run
//! everything else at full speed.
pub(crate) mod apic;
pub(crate) mod bus;
pub(crate) mod clock;
pub(crate) mod console;
pub(crate) mod cpu;
pub(crate) mod cpuid;
pub(crate) mod memory;
pub(crate) mod platform;
pub(crate) mod smp;
