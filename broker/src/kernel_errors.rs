//! What errors of the kernel's side mean to the broker.
use slipgate_control::Error;

/// Whether it may go well a little later: another process holds the lock, or something is short.
pub(crate) fn is_passing(error: &anyhow::Error) -> bool {
    of(error).is_some_and(|error| error.is_locked() || error.is_shortage())
}

/// Whether it failed for want of what the host may have again.
pub(crate) fn is_shortage(error: &anyhow::Error) -> bool {
    of(error).is_some_and(Error::is_shortage)
}

/// Whether it is for want of privileges or of a kernel that can: not for what the user asked.
pub(crate) fn lacks_support(error: &anyhow::Error) -> bool {
    of(error).is_some_and(Error::is_unsupported)
}

/// The error of the kernel's side, where it is one.
fn of(error: &anyhow::Error) -> Option<&Error> {
    error.downcast_ref()
}
