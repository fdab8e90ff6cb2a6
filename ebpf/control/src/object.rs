//! The embedded BPF objects: the binary is the only file to install.

use crate::{Error, Result};

/// The default build of the programs.
static PLAIN: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/slipgate.o"));
/// The logging build of the same programs, which logs their decisions.
static LOGGING: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/slipgate-log.o"));

/// Returns the ELF object of the logging or the default build.
///
/// # Errors
/// [`Error::StubObject`] if there was none to embed when this binary was built.
pub fn bytes(logging: bool) -> Result<&'static [u8]> {
    let (name, bytes) = match logging {
        true => ("slipgate-log.o", LOGGING),
        false => ("slipgate.o", PLAIN),
    };
    unless_stub(name, bytes)
}

/// The build script embeds an empty file where there is no object.
fn unless_stub<'b>(name: &'static str, bytes: &'b [u8]) -> Result<&'b [u8]> {
    match bytes.is_empty() {
        true => Err(Error::StubObject { name }),
        false => Ok(bytes),
    }
}

#[cfg(test)]
#[path = "object_test.rs"]
mod tests;
