//! Offsets of struct fields in the running kernel, from its BTF (Documentation/bpf/btf.rst).
//!
//! The programs read fields of `sk_buff` that no helper returns. Their offsets differ between
//! kernels, and Rust's BPF target does not emit CO-RE relocations. So the loader looks the offsets
//! up and sets them as a constant before the programs are verified.

use std::{fs, path::Path};

use slipgate_abi::skb::SkbLayout;

use crate::{Error, Result};

const VMLINUX: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u16 = 0xeb9f;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
/// Maximum nesting of anonymous structs and unions in `sk_buff`.
const DEEPEST: usize = 8;

/// Returns the offsets of the fields of `sk_buff` that the programs read.
///
/// # Errors
/// The kernel's BTF cannot be read, or does not describe these fields.
pub fn skb_layout() -> Result<SkbLayout> {
    let bytes = fs::read(Path::new(VMLINUX)).map_err(Error::os(format!("read {VMLINUX}")))?;
    layout_of(&bytes).ok_or_else(|| Error::Load {
        what: "the layout of sk_buff".into(),
        reason: format!("{VMLINUX} does not describe it: is this kernel's BTF whole?"),
    })
}

fn layout_of(bytes: &[u8]) -> Option<SkbLayout> {
    let btf = Btf::parse(bytes)?;
    let skb = btf.struct_named(b"sk_buff")?;
    let at = |field: &[u8]| btf.offset_of(skb, field, DEEPEST);
    Some(SkbLayout {
        csum_start: at(b"csum_start")?,
        csum_offset: at(b"csum_offset")?,
        mac_header: at(b"mac_header")?,
    })
}

/// Entries of the type section by number, and the string section. Little-endian, as all supported
/// machines are.
struct Btf<'a> {
    types: Vec<Type<'a>>,
    strings: &'a [u8],
}

#[derive(Clone, Copy)]
struct Type<'a> {
    name: u32,
    info: u32,
    /// Data of the kind, after the common twelve bytes.
    rest: &'a [u8],
}

impl Type<'_> {
    fn kind(&self) -> u32 {
        self.info >> 24 & 0x1f
    }

    fn count(&self) -> usize {
        (self.info & 0xffff) as usize
    }

    /// Returns the length of `rest` for this kind; `None` for an unknown kind.
    fn rest_len(&self) -> Option<usize> {
        Some(match self.kind() {
            // int; array; struct, union; enum; function prototype.
            1 => 4,
            3 => 12,
            STRUCT | UNION => 12 * self.count(),
            6 => 8 * self.count(),
            13 => 8 * self.count(),
            // variable; data section; declaration tag; 64-bit enum.
            14 => 4,
            15 => 12 * self.count(),
            17 => 4,
            19 => 12 * self.count(),
            // pointer, forward, typedef, volatile, const, restrict, function, float, type tag.
            2 | 7..=12 | 16 | 18 => 0,
            _ => return None,
        })
    }
}

impl<'a> Btf<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        if u16::from_le_bytes(*bytes.first_chunk()?) != MAGIC {
            return None;
        }
        // magic, version, flags; header's length; then offset and length of types and of strings.
        let header_len = word(bytes, 4)? as usize;
        let section = |at: usize| {
            let start = header_len.checked_add(word(bytes, at)? as usize)?;
            bytes.get(start..start.checked_add(word(bytes, at + 4)? as usize)?)
        };
        let (mut left, strings) = (section(8)?, section(16)?);
        // Number 0 is void.
        let mut types = vec![Type {
            name: 0,
            info: 0,
            rest: &[],
        }];
        while !left.is_empty() {
            let mut found = Type {
                name: word(left, 0)?,
                info: word(left, 4)?,
                rest: &[],
            };
            let end = found.rest_len()?.checked_add(12)?;
            found.rest = left.get(12..end)?;
            types.push(found);
            left = &left[end..];
        }
        Some(Btf { types, strings })
    }

    fn struct_named(&self, name: &[u8]) -> Option<Type<'a>> {
        self.types
            .iter()
            .copied()
            .find(|found| found.kind() == STRUCT && self.name(found.name) == Some(name))
    }

    /// Returns a field's offset in bytes, also within anonymous structs and unions.
    fn offset_of(&self, outer: Type<'a>, field: &[u8], depth: usize) -> Option<u32> {
        // Each member: name, type, offset in bits (the low 24 where there are bit fields).
        let bit_fields = outer.info >> 31 == 1;
        outer.rest.chunks_exact(12).find_map(|member| {
            let name = word(member, 0)?;
            let bits = word(member, 8)?;
            let bits = if bit_fields { bits & 0xff_ffff } else { bits };
            if name != 0 {
                return (self.name(name)? == field).then_some(bits / 8);
            }
            let inner = *self.types.get(word(member, 4)? as usize)?;
            if depth == 0 || !matches!(inner.kind(), STRUCT | UNION) {
                return None;
            }
            Some(bits / 8 + self.offset_of(inner, field, depth - 1)?)
        })
    }

    fn name(&self, at: u32) -> Option<&'a [u8]> {
        let rest = self.strings.get(at as usize..)?;
        rest.split(|byte| *byte == 0).next()
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*word))
}

#[cfg(test)]
#[path = "btf_test.rs"]
mod tests;
