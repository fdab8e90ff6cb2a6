//! The whole engine over the in-memory kernel: guests, the world, time, faults, the broker,
//! restarts, in any order.
//!
//! Input: `setup (1) | steps …`, each step `what (1) | its operands`, see [`step`]. Whatever
//! happens, each frame is counted once, a server behind an inspect rule reads no other name
//! ([`inspected`]), tables stay within their bounds, and in the end, when all
//! is silent for long enough, no flow is left anywhere.
pub(crate) mod inspected;
mod rig;
pub(crate) mod step;

use crate::tape::Tape;

/// Most steps of one run.
const MAX_STEPS: usize = 200;

/// Runs the steps and checks the books.
pub fn engine(input: &[u8]) {
    let mut tape = Tape::new(input);
    let mut rig = rig::Rig::new(tape.u8());
    for _ in 0..MAX_STEPS {
        if tape.is_at_end() {
            break;
        }
        step::perform(&mut rig, &mut tape);
        rig.check();
    }
    rig.end();
}
