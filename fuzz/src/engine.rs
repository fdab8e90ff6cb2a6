//! The whole engine over the in-memory kernel, with guests, the world, time, faults, the broker and
//! restarts in any order.
//!
//! Input: `setup (1) | steps …`, each step `what (1) | its operands`, see [`step`]. Checked for any
//! input: each frame is counted once, a server behind an inspect rule reads no other name
//! ([`inspected`]), tables stay within their bounds, and after enough silence no flow is left.
pub(crate) mod inspected;
mod rig;
pub(crate) mod step;

use crate::tape::Tape;

/// Maximum number of steps in a run.
const MAX_STEPS: usize = 200;

/// Performs the steps and checks the counters.
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
