//! Virtio over PCI, between an arbitrary driver and two devices that serve queues in guest memory.
//!
//! Input: steps, each `what (1) | its operands`, see [`what`]. The invariants are checked after
//! each step by the VMM's [`hostile`](slipgate_vmm::fake::hostile).
use slipgate_vmm::fake::hostile::{FEATURES, Machine, Step};

use crate::{
    pci::{MAX_STEPS, few, place},
    tape::Tape,
};

/// Kinds of steps. Bytes are preceded by their number (1).
pub(crate) mod what {
    /// Function (1), features that are flipped (8), queues (1), size (2): up to DRIVER_OK.
    pub(crate) const BRING_UP: u8 = 0;
    /// Function (1), register (1), bytes: the common configuration.
    pub(crate) const COMMON: u8 = 1;
    /// Function (1), status (1).
    pub(crate) const STATUS: u8 = 2;
    /// Function (1), vector (1), data (1).
    pub(crate) const MESSAGE: u8 = 3;
    /// Function (1), vector (1), mask (1).
    pub(crate) const MASK: u8 = 4;
    /// Function (1), queue (1): the device interrupts.
    pub(crate) const SIGNAL: u8 = 5;
    /// Function (1): the device requests a reset.
    pub(crate) const NEEDS_RESET: u8 = 6;
    /// Function (1), queue (1): the device processes the queue.
    pub(crate) const SERVE: u8 = 7;
    /// Function (1), queue (1): the driver notifies.
    pub(crate) const NOTIFY: u8 = 8;
    /// Address (3), bytes: guest memory.
    pub(crate) const MEMORY: u8 = 9;
    /// Function (1): the device refuses the next request.
    pub(crate) const REFUSE: u8 = 10;
    /// Function (1), window and place in it (1): BAR 2 moves.
    pub(crate) const MOVE: u8 = 11;
    /// Function (1), command register (1).
    pub(crate) const COMMAND: u8 = 12;
    /// Function (1), register (1), bytes: configuration space.
    pub(crate) const CONFIG: u8 = 13;
    /// Function and BAR (1), offset (2): eight bytes are read.
    pub(crate) const READ: u8 = 14;
    /// Queue (1) is selected and reset, on function (1).
    pub(crate) const RESET_QUEUE: u8 = 15;
    pub(super) const ALL: u8 = 16;
}

/// Offset of the first notification address.
const NOTIFY: u64 = 0x3000;

/// Performs the steps that the input describes.
pub fn transport(input: &[u8]) {
    let mut tape = Tape::new(input);
    let mut machine = Machine::new();
    for _ in 0..MAX_STEPS {
        if tape.is_at_end() {
            break;
        }
        for step in steps(&mut tape) {
            machine.step(&step);
        }
    }
}

fn steps(tape: &mut Tape) -> Vec<Step> {
    let config =
        |function: u8, register: u8| (u64::from(function & 1) + 1) << 15 | u64::from(register);
    let one = match tape.u8() % what::ALL {
        what::BRING_UP => {
            let function = tape.u8();
            let features = (FEATURES | 1 << 32) ^ u64::from_be_bytes(tape.array());
            Step::BringUp(function, features, tape.u8(), tape.u16())
        }
        what::COMMON => Step::Bar(tape.u8(), 2, (tape.u8() % 64).into(), few(tape)),
        what::STATUS => Step::Bar(tape.u8(), 2, 20, vec![tape.u8()]),
        what::MESSAGE => Step::Message(tape.u8(), tape.u8(), tape.u8()),
        what::MASK => {
            let (function, vector) = (tape.u8(), u64::from(tape.u8() % 4));
            Step::Bar(function, 0, 16 * vector + 12, vec![tape.u8(), 0, 0, 0])
        }
        what::SIGNAL => Step::Signal(tape.u8(), tape.u8().into()),
        what::NEEDS_RESET => Step::NeedsReset(tape.u8()),
        what::SERVE => Step::Serve(tape.u8(), tape.u8().into()),
        what::NOTIFY => Step::Bar(tape.u8(), 2, NOTIFY + 4 * u64::from(tape.u8()), vec![0, 0]),
        what::MEMORY => {
            let [high, middle, low] = tape.array();
            Step::Memory(u32::from_be_bytes([0, high, middle, low]), few(tape))
        }
        what::REFUSE => Step::Refuse(tape.u8()),
        what::MOVE => {
            let (function, to) = (tape.u8(), tape.u8());
            let windows = [1_u64 << 36, 0xc000_0000, 0, 0xfee0_0000];
            let to = windows[usize::from(to >> 6)] + u64::from(to & 63) * 0x4000;
            Step::Ecam(config(function, 0x18), to.to_le_bytes().to_vec())
        }
        what::COMMAND => Step::Ecam(config(tape.u8(), 4), vec![tape.u8()]),
        what::CONFIG => Step::Ecam(config(tape.u8(), tape.u8()), few(tape)),
        what::READ => {
            let (function, bar, offset) = place(tape);
            Step::BarRead(function, bar, offset, 8)
        }
        _ => {
            let (queue, function) = (tape.u8(), tape.u8());
            return vec![
                Step::Bar(function, 2, 22, vec![queue, 0]),
                Step::Bar(function, 2, 58, vec![1, 0]),
            ];
        }
    };
    vec![one]
}
