use std::fs;

use super::{interpreter, require_btf, section_names};

/// A header, two section headers and their names, as an assembler would lay them out.
fn object(second: &str) -> Vec<u8> {
    let names = format!("\0.strtab\0{second}\0");
    let mut bytes = vec![0; 0x40];
    bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
    bytes[0x28] = 0x40; // e_shoff
    bytes[0x3a] = 0x40; // e_shentsize
    bytes[0x3c] = 2; // e_shnum
    let mut strtab = vec![0; 0x40];
    strtab[0] = 1;
    strtab[0x18] = 0xc0;
    let mut other = vec![0; 0x40];
    other[0] = 9;
    bytes.extend(strtab);
    bytes.extend(other);
    bytes.extend(names.as_bytes());
    bytes
}

#[test]
fn names_sections_in_order() {
    assert_eq!(
        section_names(&object("classifier")).unwrap(),
        [".strtab", "classifier"]
    );
}

#[test]
fn no_prefix_of_an_object_is_read_beyond_its_end() {
    let whole = object("classifier");
    for length in 0..whole.len() {
        assert_eq!(section_names(&whole[..length]), None, "{length} bytes");
    }
}

#[test]
fn an_offset_beyond_the_file_is_no_object() {
    let mut bytes = object("x");
    bytes[0x28..0x30].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(section_names(&bytes), None);
}

#[test]
fn an_object_without_btf_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plain.o");
    fs::write(&path, object("classifier")).unwrap();
    let why = require_btf(&path).unwrap_err().to_string();
    assert!(
        why.contains("no .BTF section") && why.contains("classifier"),
        "{why}"
    );
}

#[test]
fn a_dynamic_program_names_its_loader() {
    let mut bytes = vec![0; 0x40 + 0x38];
    bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
    bytes[0x20] = 0x40; // e_phoff
    bytes[0x36] = 0x38; // e_phentsize
    bytes[0x38] = 1; // e_phnum
    bytes[0x40] = 1; // PT_LOAD
    bytes[0x48] = 0x78; // p_offset
    bytes.extend(b"/lib/ld.so\0");
    assert_eq!(interpreter(&bytes), Some(None));
    bytes[0x40] = 3; // PT_INTERP
    assert_eq!(interpreter(&bytes), Some(Some("/lib/ld.so".to_owned())));
    bytes[0x4f] = 0xff;
    assert_eq!(interpreter(&bytes), None);
    assert_eq!(interpreter(b"#!/bin/sh"), None);
}
