//! Minimal ELF reader for section names and the program interpreter.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};

/// Checks that the object has BTF.
///
/// # Errors
/// It has none, so the kernel would refuse it.
pub(crate) fn require_btf(object: &Path) -> Result<()> {
    let bytes = fs::read(object).with_context(|| format!("could not read {}", object.display()))?;
    let sections = section_names(&bytes).with_context(|| {
        format!(
            "{} is not a 64-bit little-endian ELF object",
            object.display()
        )
    })?;
    for wanted in [".BTF", ".BTF.ext"] {
        if !sections.iter().any(|name| name == wanted) {
            bail!(
                "{} has no {wanted} section, only: {}",
                object.display(),
                sections.join(" ")
            );
        }
    }
    Ok(())
}

/// Returns the names of all sections; `None` if the file is malformed (ELF-64 object file format,
/// 1998).
pub(crate) fn section_names(bytes: &[u8]) -> Option<Vec<String>> {
    require_elf(bytes)?;
    let table = usize::try_from(u64_at(bytes, 0x28)?).ok()?;
    let entry_bytes = usize::from(u16_at(bytes, 0x3a)?);
    let count = usize::from(u16_at(bytes, 0x3c)?);
    let names_index = usize::from(u16_at(bytes, 0x3e)?);
    let header = |index: usize| table.checked_add(index.checked_mul(entry_bytes)?);
    let names = usize::try_from(u64_at(bytes, header(names_index)?.checked_add(0x18)?)?).ok()?;
    (0..count)
        .map(|index| {
            let name = usize::try_from(u32_at(bytes, header(index)?)?).ok()?;
            text_at(bytes, names.checked_add(name)?)
        })
        .collect()
}

/// Returns the program interpreter (dynamic loader) of a program: `Some(None)` if it is static;
/// `None` if the bytes are no ELF file.
pub(crate) fn interpreter(bytes: &[u8]) -> Option<Option<String>> {
    const PT_INTERP: u32 = 3;
    require_elf(bytes)?;
    let table = usize::try_from(u64_at(bytes, 0x20)?).ok()?;
    let entry_bytes = usize::from(u16_at(bytes, 0x36)?);
    for index in 0..usize::from(u16_at(bytes, 0x38)?) {
        let header = table.checked_add(index.checked_mul(entry_bytes)?)?;
        if u32_at(bytes, header)? == PT_INTERP {
            let offset = usize::try_from(u64_at(bytes, header.checked_add(0x08)?)?).ok()?;
            return Some(Some(text_at(bytes, offset)?));
        }
    }
    Some(None)
}

/// Returns `None` unless the bytes are a little-endian ELF-64 file.
fn require_elf(bytes: &[u8]) -> Option<()> {
    (bytes.get(..6)? == b"\x7fELF\x02\x01").then_some(())
}

/// Returns the NUL-terminated text at an offset.
fn text_at(bytes: &[u8], at: usize) -> Option<String> {
    let text = bytes.get(at..)?;
    let end = text.iter().position(|&byte| byte == 0)?;
    String::from_utf8(text[..end].to_vec()).ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(
        bytes.get(at..at.checked_add(2)?)?.try_into().ok()?,
    ))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(
        bytes.get(at..at.checked_add(4)?)?.try_into().ok()?,
    ))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(
        bytes.get(at..at.checked_add(8)?)?.try_into().ok()?,
    ))
}

#[cfg(test)]
#[path = "elf_test.rs"]
mod tests;
