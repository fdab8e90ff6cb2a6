//! Errors of the host's KVM.

/// Reason why a VM could not be created.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The descriptor is not `/dev/kvm`, or has another version of the KVM API.
    #[error(
        "the descriptor given as /dev/kvm speaks KVM API version {found}, not 12: is it /dev/kvm?"
    )]
    Version {
        /// Answer to `KVM_GET_API_VERSION`; -1 if the descriptor is no KVM.
        found: i32,
    },
    /// The host's KVM is too old or was built without a needed part.
    #[error("this host's KVM has no {what}, which slipgate needs: it is in every kernel from 6.1")]
    Missing {
        /// Missing capability, by its name in the KVM API.
        what: &'static str,
    },
    /// A call to KVM failed.
    #[error("KVM: {what}")]
    Call {
        /// Operation that was tried.
        what: &'static str,
        /// Error from the kernel.
        source: std::io::Error,
    },
}

impl KvmError {
    /// Returns a function for `map_err` that makes an error of operation `what` and the kernel's
    /// error.
    pub(crate) fn call(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
        move |error| KvmError::Call {
            what,
            source: error.into(),
        }
    }
}
