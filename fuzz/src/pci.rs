//! Two PCI functions: configuration by ports and ECAM, BARs wherever the guest moves them, MSI-X.
//!
//! Input: steps, each `what (1) | its operands`, see [`what`]. The invariants are checked after
//! each step by the VMM's [`hostile`](slipgate_vmm::fake::hostile).
use slipgate_vmm::fake::hostile::{Machine, Step};

use crate::tape::Tape;

/// Maximum number of steps. All registers are checked after each step, so many steps are slow and
/// find no more.
pub(crate) const MAX_STEPS: usize = 200;

/// Kinds of steps. Bytes are preceded by their number (1).
pub(crate) mod what {
    /// Device (1), register (2), bytes.
    pub(crate) const CONFIG: u8 = 0;
    /// Device (1), register (2), number (1).
    pub(crate) const CONFIG_READ: u8 = 1;
    /// Port access: port (1), bytes.
    pub(crate) const PORT: u8 = 2;
    /// Port (1), number (1).
    pub(crate) const PORT_READ: u8 = 3;
    /// Function and BAR (1), offset (2), bytes.
    pub(crate) const BAR: u8 = 4;
    /// Function and BAR (1), offset (2), number (1).
    pub(crate) const BAR_READ: u8 = 5;
    /// Memory access: address (8), bytes.
    pub(crate) const MEMORY: u8 = 6;
    /// Address (8), number (1).
    pub(crate) const MEMORY_READ: u8 = 7;
    /// Function (1), queue (1): the device interrupts.
    pub(crate) const SIGNAL: u8 = 8;
    /// Any offset (8) of ECAM, bytes.
    pub(crate) const ECAM: u8 = 9;
    pub(super) const ALL: u8 = 10;
}

/// Performs the steps that the input describes.
pub fn pci(input: &[u8]) {
    let mut tape = Tape::new(input);
    let mut machine = Machine::new();
    for _ in 0..MAX_STEPS {
        if tape.is_at_end() {
            break;
        }
        machine.step(&step(&mut tape));
    }
}

fn step(tape: &mut Tape) -> Step {
    match tape.u8() % what::ALL {
        what::CONFIG => Step::Ecam(register(tape), few(tape)),
        what::CONFIG_READ => Step::EcamRead(register(tape), number(tape)),
        what::PORT => Step::Port(tape.u8().into(), few(tape)),
        what::PORT_READ => Step::PortRead(tape.u8().into(), number(tape)),
        what::BAR => {
            let (function, bar, offset) = place(tape);
            Step::Bar(function, bar, offset, few(tape))
        }
        what::BAR_READ => {
            let (function, bar, offset) = place(tape);
            Step::BarRead(function, bar, offset, number(tape))
        }
        what::MEMORY => Step::Mmio(u64::from_be_bytes(tape.array()), few(tape)),
        what::MEMORY_READ => Step::MmioRead(u64::from_be_bytes(tape.array()), number(tape)),
        what::SIGNAL => Step::Signal(tape.u8(), tape.u8().into()),
        what::ECAM.. => Step::Ecam(u64::from_be_bytes(tape.array()), few(tape)),
    }
}

/// Reads at most eight bytes, preceded by their number.
pub(crate) fn few(tape: &mut Tape) -> Vec<u8> {
    let number = number(tape);
    tape.take(number).to_vec()
}

fn number(tape: &mut Tape) -> usize {
    usize::from(tape.u8() % 9)
}

/// Reads the offset in ECAM of a register of one of four devices.
fn register(tape: &mut Tape) -> u64 {
    let device = u64::from(tape.u8() % 4);
    device << 15 | u64::from(tape.u16() % 4096)
}

/// Reads a function, a BAR and an offset into it.
pub(crate) fn place(tape: &mut Tape) -> (u8, u8, u64) {
    let both = tape.u8();
    (both & 1, both & 2, tape.u16().into())
}
