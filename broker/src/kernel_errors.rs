//! Classification of kernel errors for the broker.
use slipgate_control::Error;

/// Whether the operation may succeed a little later: another process holds the lock, or a resource
/// is short.
pub(crate) fn is_passing(error: &anyhow::Error) -> bool {
    of(error).is_some_and(|error| error.is_locked() || error.is_shortage())
}

/// Whether the failure is a shortage that may pass.
pub(crate) fn is_shortage(error: &anyhow::Error) -> bool {
    of(error).is_some_and(Error::is_shortage)
}

/// Whether privileges or kernel support are missing, so that the user's request is not at fault.
pub(crate) fn lacks_support(error: &anyhow::Error) -> bool {
    of(error).is_some_and(Error::is_unsupported)
}

/// Returns the kernel error in the chain of causes, if there is one.
fn of(error: &anyhow::Error) -> Option<&Error> {
    error.downcast_ref()
}
