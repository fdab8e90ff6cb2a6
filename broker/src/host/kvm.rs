//! `/dev/kvm`: opened, or what to do about it.
use std::{
    fs::{File, OpenOptions},
    io,
};

const PATH: &str = "/dev/kvm";

/// It can't be opened.
#[derive(Debug, thiserror::Error)]
#[error("a VM needs {PATH}, which can't be opened ({why}): {remedy}")]
pub struct KvmUnavailable {
    /// What the kernel said.
    pub why: io::Error,
    /// What to do.
    pub remedy: &'static str,
}

/// Opens it for a VMM.
///
/// # Errors
/// It is not there, or not for this user; with what to do about it.
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
        io::ErrorKind::PermissionDenied => "run as root",
        _ => "see the host's log (dmesg)",
    }
}
