//! The built-in guest of `slipgate run`: a boot payload without an operating system.
#![cfg_attr(not(test), no_std)]
extern crate alloc;
