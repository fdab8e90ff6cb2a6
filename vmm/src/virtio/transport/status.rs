//! The device status field (section 2.1): its bits, and the steps that a driver's write takes.

pub(super) const ACKNOWLEDGE: u8 = 1;
pub(super) const DRIVER: u8 = 2;
pub(super) const DRIVER_OK: u8 = 4;
pub(super) const FEATURES_OK: u8 = 8;
pub(super) const NEEDS_RESET: u8 = 64;
pub(super) const FAILED: u8 = 128;

/// Steps in the order in which a driver takes them (section 3.1.1).
const STEPS: [u8; 4] = [ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK];

/// Returns whether a driver and a device can come to this status: no step is skipped.
pub(super) fn is_possible(status: u8) -> bool {
    let known = STEPS
        .iter()
        .fold(NEEDS_RESET | FAILED, |all, step| all | step);
    status & !known == 0 && !steps(0, status).1
}

/// Returns the steps of `written` that follow on from `status`, in order, and whether others were
/// refused because a step before them is missing. Bits that are already set, cleared bits, and bits
/// that only the device sets are no steps: a driver must not clear a bit except by a reset.
pub(super) fn steps(status: u8, written: u8) -> (Vec<u8>, bool) {
    let reached = STEPS
        .iter()
        .take_while(|step| (status | written) & **step != 0)
        .count();
    let is_new = |step: &u8| written & !status & step != 0;
    let taken = STEPS[..reached].iter().copied().filter(is_new).collect();
    (taken, STEPS[reached..].iter().any(is_new))
}
