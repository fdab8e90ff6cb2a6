//! Access to `/dev/kvm`, with advice when it is missing.
use std::{
    fs::{File, OpenOptions},
    io,
};

const PATH: &str = "/dev/kvm";

/// Error: `/dev/kvm` can't be opened.
#[derive(Debug, thiserror::Error)]
#[error("a VM needs {PATH}, which can't be opened ({why}): {remedy}")]
pub struct KvmUnavailable {
    /// Error that the kernel returned.
    pub why: io::Error,
    /// Action that makes KVM available.
    pub remedy: &'static str,
}

/// Opens `/dev/kvm` for a VMM.
///
/// # Errors
/// It does not exist, or this user has no access; the error has advice.
pub fn open() -> Result<File, KvmUnavailable> {
    let opened = OpenOptions::new().read(true).write(true).open(PATH);
    opened.map_err(|why| KvmUnavailable {
        remedy: remedy(why.kind()),
        why,
    })
}

fn remedy(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::NotFound => {
            "load the module (`modprobe kvm_intel` or `modprobe kvm_amd`); if that fails turn \
             virtualisation on in the firmware, or, when this is itself a virtual machine, nested \
             virtualisation on its host"
        }
        io::ErrorKind::PermissionDenied => {
            "have your user in the group of the device, mostly `sudo usermod -aG kvm $USER` and a new \
             login, or run as root"
        }
        _ => "see the host's log (dmesg)",
    }
}
