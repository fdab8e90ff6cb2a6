//! Classification of kernel errors for the broker.
use std::io;

use slipgate_control::Error;

/// Errors for want of descriptors or memory.
const SHORTAGES: [nix::Error; 4] = [
    nix::Error::EMFILE,
    nix::Error::ENFILE,
    nix::Error::ENOMEM,
    nix::Error::ENOBUFS,
];

/// Whether the operation may succeed a little later: another process holds the lock, or a resource
/// is short.
pub(crate) fn is_passing(error: &anyhow::Error) -> bool {
    of(error).is_some_and(Error::is_locked) || is_shortage(error)
}

/// Whether the failure is a shortage that may pass.
pub(crate) fn is_shortage(error: &anyhow::Error) -> bool {
    let errno = error.downcast_ref::<nix::Error>().copied();
    let errno = errno.or_else(|| {
        let error = error.downcast_ref::<io::Error>()?;
        error.raw_os_error().map(nix::Error::from_raw)
    });
    of(error).is_some_and(Error::is_shortage)
        || errno.is_some_and(|errno| SHORTAGES.contains(&errno))
}

/// Whether privileges or kernel support are missing, so that the user's request is not at fault.
pub(crate) fn lacks_support(error: &anyhow::Error) -> bool {
    of(error).is_some_and(Error::is_unsupported)
}

/// Returns the kernel error in the chain of causes, if there is one.
fn of(error: &anyhow::Error) -> Option<&Error> {
    error.downcast_ref()
}
