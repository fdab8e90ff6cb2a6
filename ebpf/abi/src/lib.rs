//! Types and rules that cross the kernel/user line.
#![no_std]
