//! Snapshots: the state file, and PCI's part of a state that somebody else wrote.
//!
//! Input: `kind (1) | …`, see [`kind`]. What is restored serves a driver of a few steps afterwards,
//! and the VMM's [`hostile`](slipgate_vmm::fake::hostile) checks each.
pub(crate) mod devices;

use slipgate_vmm::{
    fake::hostile::{Machine, Step},
    snapshot::{FunctionState, decode, encode, sealed},
};

use crate::tape::Tape;

/// Kinds of input, by the first byte.
pub(crate) mod kind {
    /// The state file of a snapshot.
    pub(crate) const FILE: u8 = 0;
    /// The state, to which a header with the right digest is added.
    pub(crate) const STATE: u8 = 1;
    /// Seed (1), then the address register and the functions (postcard).
    pub(crate) const FUNCTIONS: u8 = 2;
    /// Number (2) of patches of the memory, these, then the address register and the functions (postcard)
    /// of [`super::devices`]. A patch: place in eights (2), length (2), bytes.
    pub(crate) const DEVICES: u8 = 3;
    pub(super) const ALL: u8 = 4;
}

/// Reads, or restores, what the input says.
pub fn snapshot(input: &[u8]) {
    let mut tape = Tape::new(input);
    match tape.u8() % kind::ALL {
        kind::FILE => read(tape.rest()),
        kind::STATE => read(&sealed(tape.rest())),
        kind::DEVICES => devices::go_on(&mut tape),
        _ => {
            let seed = tape.u8();
            if let Ok((address, functions)) = postcard::from_bytes(tape.rest()) {
                restore(seed, address, functions);
            }
        }
    }
}

fn read(file: &[u8]) {
    match decode(file) {
        Ok(state) => {
            if let Some(base) = &state.base
                && base.runs.check(state.memory_bytes).is_ok()
            {
                let mut end = 0;
                for (from, bytes) in base.runs.bytes() {
                    assert!(from >= end && bytes > 0);
                    end = from + bytes;
                }
                assert!(end <= state.memory_bytes);
            }
            let written = encode(&state).expect("no longer than it was");
            let again = decode(&written).expect("what was just written");
            assert_eq!(again.functions, state.functions);
            assert_eq!(encode(&again).expect("as before"), written);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn restore(seed: u8, address: u32, functions: Vec<FunctionState>) {
    let mut machine = Machine::new();
    match machine.restore(address, &functions) {
        Ok(()) => {
            // What was taken is what a snapshot says then.
            let (_, saved) = machine.saved();
            let mut other = Machine::new();
            other
                .restore(address, &saved)
                .expect("a machine's own state");
            for number in 0..8 {
                let function = seed.wrapping_add(number);
                let queue = u16::from(number) % 4;
                machine.step(&Step::Serve(function, queue));
                machine.step(&Step::Signal(function, queue));
                machine.step(&Step::Bar(function, 2, 0x3000, vec![0, 0]));
            }
            for function in 0..2 {
                machine.step(&Step::BringUp(function, 1 << 32, 7, 16));
                machine.step(&Step::Serve(function, 0));
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
