use std::process::Command;

use super::*;
use crate::testing::skipped;

#[test]
fn the_layout_of_the_running_kernel_is_bpftools() {
    let Ok(bytes) = fs::read(VMLINUX) else {
        skipped(
            "the_layout_of_the_running_kernel_is_bpftools",
            &format!("this kernel has no {VMLINUX}"),
        );
        return;
    };
    let layout = layout_of(&bytes).unwrap();
    assert_eq!(layout.csum_offset, layout.csum_start + 2);
    let btf = Btf::parse(&bytes).unwrap();
    let skb = btf.struct_named(b"sk_buff").unwrap();
    // A field of the outer struct, which bpftool shows with its offset.
    let dump = Command::new("bpftool")
        .args(["btf", "dump", "file", VMLINUX, "format", "raw"])
        .output()
        .unwrap();
    let dump = String::from_utf8_lossy(&dump.stdout).into_owned();
    let lines = dump
        .lines()
        .skip_while(|l| !l.contains("STRUCT 'sk_buff' "));
    let truesize = lines.clone().find(|l| l.contains("'truesize' ")).unwrap();
    let bits = truesize.rsplit_once("bits_offset=").unwrap().1;
    let expected = bits.trim().parse::<u32>().unwrap() / 8;
    assert_eq!(btf.offset_of(skb, b"truesize", 0), Some(expected));
    assert_eq!(btf.offset_of(skb, b"csum_start", 0), None, "it is nested");
    assert_eq!(btf.offset_of(skb, b"no_such_field", DEEPEST), None);
}

#[test]
fn damaged_btf_is_refused() {
    let Ok(bytes) = fs::read(VMLINUX) else {
        skipped(
            "damaged_btf_is_refused",
            &format!("this kernel has no {VMLINUX}"),
        );
        return;
    };
    for len in [0, 1, 2, 23, 24, 1000, bytes.len() - 1] {
        assert!(layout_of(&bytes[..len]).is_none(), "{len} bytes");
    }
    let mut other = bytes;
    other[0] ^= 1;
    assert!(layout_of(&other).is_none());
}
