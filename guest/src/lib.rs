//! The built-in guest of `slipgate run`: a boot payload without an operating system.
//!
//! ```text
//! workloads ──► platform (traits) ◄── machine + main (feature `image`): boot, traps, CPUs, clock
//!                    ▲
//!                    └── virtio ──► pci      the driver; runs in host tests over fakes
//! ```
#![cfg_attr(not(test), no_std)]
extern crate alloc;

pub mod command;
pub mod firmware;
pub mod histogram;
pub mod json;
pub mod net;
pub mod pattern;
pub mod pci;
pub mod platform;
mod report;
pub mod run;
pub mod selftest;
pub mod virtio;
pub mod workload;
