//! The device status field (section 2.1): its bits, and which of them a driver's write takes.

pub(super) const ACKNOWLEDGE: u8 = 1;
pub(super) const DRIVER: u8 = 2;
pub(super) const DRIVER_OK: u8 = 4;
pub(super) const FEATURES_OK: u8 = 8;
pub(super) const NEEDS_RESET: u8 = 64;
pub(super) const FAILED: u8 = 128;

/// In the order that a driver takes them (section 3.1.1).
const STEPS: [u8; 4] = [ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK];

/// The steps of `written` that follow on from `status`, in order, and whether some were skipped to
/// and so refused. Bits that are already set, cleared ones, and those that are the device's to set
/// make no step: a driver must not clear a bit but by a reset.
pub(super) fn steps(status: u8, written: u8) -> (Vec<u8>, bool) {
    let reached = STEPS
        .iter()
        .take_while(|step| (status | written) & **step != 0)
        .count();
    let is_new = |step: &u8| written & !status & step != 0;
    let taken = STEPS[..reached].iter().copied().filter(is_new).collect();
    (taken, STEPS[reached..].iter().any(is_new))
}
