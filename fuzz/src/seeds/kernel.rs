//! Kernels without instructions, in each format.
use super::Seeds;
use crate::tape::with_length;

pub(super) fn kernel() -> Seeds {
    let input = |initrd_kib: u16, line: &str, image: Vec<u8>| {
        let line = with_length(line.as_bytes());
        [&initrd_kib.to_be_bytes()[..], &line, &image].concat()
    };
    let pvh = note(b"Xen\0", 18, &0x20_0010u32.to_le_bytes());
    let other = note(b"Linux\0", 6, &[1, 2, 3]);
    let word = note(b"Xen\0", 18, &0x20_0010u64.to_le_bytes());
    let line = "console=ttyS0 reboot=t panic=-1";
    vec![
        ("pvh", input(0, "selftest", elf(&pvh))),
        (
            "pvh-64",
            input(4, "selftest", elf(&[other.clone(), word].concat())),
        ),
        ("vmlinux", input(100, line, elf(&other))),
        ("bzimage", input(0, line, bzimage(0x10_0000))),
        ("bzimage-initrd", input(1024, line, bzimage(0x10_0000))),
        ("bzimage-full", input(0x1000, line, bzimage(0x100_0000))),
    ]
}

/// Returns an ELF with a segment at 2 MiB and a note segment.
fn elf(notes: &[u8]) -> Vec<u8> {
    const HEADERS: u64 = 64 + 2 * 56;
    let code = [0x90; 64];
    let at = 0x20_0000u64;
    // ET_EXEC, EM_X86_64, EV_CURRENT.
    let mut image = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    image.extend([at, 64, 0].iter().flat_map(|word| word.to_le_bytes()));
    // No flags; sizes and numbers of headers.
    image.extend(
        [0u16, 0, 64, 56, 2, 0, 0, 0]
            .iter()
            .flat_map(|half| half.to_le_bytes()),
    );
    let size = notes.len() as u64;
    for (kind, words) in [
        (1u32, [HEADERS, 0, at, 64, 0x4000, 0x1000]),
        (4, [HEADERS + 64, 0, 0, size, size, 4]),
    ] {
        image.extend([kind, 7].iter().flat_map(|word| word.to_le_bytes()));
        image.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }
    [&image[..], &code, notes].concat()
}

fn note(name: &[u8], kind: u32, description: &[u8]) -> Vec<u8> {
    let sizes = [name.len() as u32, description.len() as u32, kind];
    let mut bytes: Vec<u8> = sizes.iter().flat_map(|word| word.to_le_bytes()).collect();
    for part in [name, description] {
        bytes.extend(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

/// Returns a bzImage: boot protocol 2.15, one sector of setup code. `init_size` in bytes.
fn bzimage(init_size: u32) -> Vec<u8> {
    let mut image = vec![0; 1024 + 0x240];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1F1, &[1]);
    put(0x1F4, &(0x240u32 / 16).to_le_bytes());
    put(0x1FE, b"\x55\xaa\xeb\x6aHdrS\x0f\x02");
    // Loaded high; code32_start.
    put(0x211, &[1]);
    put(0x214, &0x10_0000u32.to_le_bytes());
    // initrd_addr_max, kernel_alignment, relocatable, 64-bit entry, cmdline_size.
    put(0x22C, &0x7FFF_FFFFu32.to_le_bytes());
    put(0x230, &0x20_0000u32.to_le_bytes());
    put(0x234, &[1, 21, 1, 0]);
    put(0x238, &255u32.to_le_bytes());
    // pref_address, init_size.
    put(0x258, &0x100_0000u64.to_le_bytes());
    put(0x260, &init_size.to_le_bytes());
    image
}
