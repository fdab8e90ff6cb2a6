//! The BPF objects, embedded, so that one file is all there is to install.

use crate::{Error, Result};

/// What runs unless told otherwise.
static PLAIN: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/slipgate.o"));
/// The same programs, which also log what they decide.
static LOGGING: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/slipgate-log.o"));

/// The ELF object of one of the two builds.
///
/// # Errors
/// [`Error::StubObject`] when there was none to embed when this binary was built.
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
