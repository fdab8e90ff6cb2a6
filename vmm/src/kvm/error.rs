//! What can be wrong with the host's KVM.

/// A VM could not be made.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The descriptor is something else, or a KVM from another world.
    #[error(
        "the descriptor given as /dev/kvm speaks KVM API version {found}, not 12: is it /dev/kvm?"
    )]
    Version {
        /// What `KVM_GET_API_VERSION` said; -1 for no KVM at all.
        found: i32,
    },
    /// The host's KVM is too old or was built without a part.
    #[error("this host's KVM has no {what}, which slipgate needs: it is in every kernel from 6.1")]
    Missing {
        /// The capability, in the words of the KVM API.
        what: &'static str,
    },
    /// A call failed.
    #[error("KVM: {what}")]
    Call {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: std::io::Error,
    },
}

impl KvmError {
    /// For `map_err`: what was tried, and the kernel's answer to it.
    pub(crate) fn call(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
        move |error| KvmError::Call {
            what,
            source: error.into(),
        }
    }
}
