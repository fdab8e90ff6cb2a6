//! The user's boot files: a kernel image, an initrd's length, a command line.
//!
//! Input: `initrd: KiB (2) | command line (length 2, bytes) | kernel …`. The memory keeps the data
//! of earlier inputs; the result must not depend on it.
use std::{cell::LazyCell, fs::File};

use nix::sys::memfd::{MFdFlags, memfd_create};
use slipgate_vmm::{
    GuestMemory,
    boot::{self, Loaded, Protocol, registers},
    layout::{self, PAGE_SIZE, Window},
    memory,
};
use vm_memory::{Bytes, GuestAddress};

use crate::tape::Tape;

const MEMORY_BYTES: u64 = 32 << 20;

thread_local! {
    static MEMORY: LazyCell<GuestMemory> =
        LazyCell::new(|| memory::create(MEMORY_BYTES).expect("32 MiB of memory"));
}

/// Loads the kernel, and checks the state at its entry.
pub fn kernel(input: &[u8]) {
    let mut tape = Tape::new(input);
    let initrd_bytes = u64::from(tape.u16()) << 10;
    let command_line = String::from_utf8_lossy(tape.bytes()).into_owned();
    let image = tape.rest();
    let initrd = (initrd_bytes > 0).then(|| zeroes(initrd_bytes));
    MEMORY.with(
        |memory| match boot::load_bytes(memory, image, initrd.as_ref(), &command_line) {
            Ok(loaded) => ready(memory, &loaded, initrd_bytes, &command_line),
            Err(error) => assert!(!error.to_string().is_empty()),
        },
    );
}

/// Returns a file of zeroes that takes no space on disk.
fn zeroes(bytes: u64) -> File {
    let file = File::from(memfd_create("initrd", MFdFlags::empty()).expect("a descriptor"));
    file.set_len(bytes).expect("a length");
    file
}

/// Checks that all structures for the kernel lie in RAM and do not overlap.
fn ready(memory: &GuestMemory, loaded: &Loaded, initrd_bytes: u64, command_line: &str) {
    let usable = Window {
        start: layout::KERNEL_MIN,
        size: MEMORY_BYTES - layout::KERNEL_MIN,
    };
    let within = |piece: &Window| piece.start >= usable.start && piece.end() <= usable.end();
    assert!(within(&loaded.kernel) && loaded.kernel.contains(loaded.entry.0));
    assert_eq!(loaded.initrd.map_or(0, |initrd| initrd.size), initrd_bytes);
    if let Some(initrd) = loaded.initrd {
        assert!(within(&initrd) && !initrd.overlaps(&loaded.kernel));
        assert!(initrd.start.is_multiple_of(PAGE_SIZE));
    }
    let mut bytes = vec![0; command_line.len() + 1];
    let address = GuestAddress(layout::COMMAND_LINE.start);
    memory.read_slice(&mut bytes, address).expect("below 1 MiB");
    assert_eq!(bytes.strip_suffix(&[0]), Some(command_line.as_bytes()));

    let general = registers::general(loaded);
    let special = registers::special(loaded, &Default::default());
    let long = loaded.protocol == Protocol::Linux64;
    assert_eq!(general.rip, loaded.entry.0);
    assert_eq!((special.cs.l == 1, special.efer != 0), (long, long));
    // A 32-bit entry has 32 bits.
    assert!(long || general.rip <= u32::MAX.into());
}
