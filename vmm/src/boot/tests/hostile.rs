//! Invalid images, initrds and command lines: clear errors, never a panic.
use proptest::prelude::*;

use super::*;

/// Returns the error for an image in 64 MiB of memory.
fn refusal(image: &[u8]) -> String {
    let memory = memory::create(64 * MIB).unwrap();
    load_bytes(&memory, image, None, "")
        .unwrap_err()
        .to_string()
}

/// Returns an image with bytes replaced at an offset.
fn with(mut image: Vec<u8>, offset: usize, bytes: &[u8]) -> Vec<u8> {
    image[offset..offset + bytes.len()].copy_from_slice(bytes);
    image
}

#[test]
fn what_is_no_kernel_is_refused() {
    for image in [
        &b""[..],
        b"\x7fEL",
        b"#!/bin/sh\n",
        &[0; 4096],
        &[0x1f; 2000],
    ] {
        assert!(refusal(image).contains("neither an ELF file nor a bzImage"));
    }
}

#[test]
fn elf_kernels_of_other_kinds_are_refused() {
    for (offset, bytes, says) in [
        (4, &[1][..], "class"),
        (5, &[2], "big-endian"),
        (18, &[183, 0], "another machine"),
        (16, &[1, 0], "object file"),
        (54, &[32, 0], "program headers"),
        (56, &[1, 1], "more program headers"),
        (56, &[0, 0], "no segment"),
        // The only PT_LOAD becomes PT_NULL.
        (64, &[0], "no segment"),
        (24, &[0xFF; 8], "entry 0xffffffffffffffff"),
        // p_offset, p_paddr, p_filesz, p_memsz of the segment.
        (64 + 8, &[0xFF; 8], "cut off"),
        (64 + 24, &[0; 8], "is no kernel but a program"),
        // PT_INTERP instead of PT_NOTE.
        (64 + 56, &[3], "is no kernel but a program"),
        (64 + 24, &[0xFF; 8], "needs memory at 0xffff"),
        (64 + 32, &[0xFF; 8], "larger in file"),
        (64 + 40, &[0xFF; 8], "give more memory"),
        (64 + 40, &[0, 0, 0, 4], "needs memory"),
        (32, &[0xFF; 8], "cut off: the program headers"),
    ] {
        let says_it = refusal(&with(elf(ELF_AT, &[]), offset, bytes));
        assert!(says_it.contains(says), "{offset}: {says_it}");
    }
}

#[test]
fn a_kernel_with_a_note_may_lie_too_low() {
    let low = with(pvh_elf(), 64 + 24, &[0; 8]);
    assert!(refusal(&low).contains("needs memory at 0x0"));
}

#[test]
fn an_error_knows_what_it_is_about() {
    let memory = memory::create(64 * MIB).unwrap();
    let about = |kernel: &[u8], initrd: Option<&File>, line: &str| {
        let error = load_bytes(&memory, kernel, initrd, line).unwrap_err();
        error.about().unwrap()
    };
    let folder = File::open("/").unwrap();
    assert_eq!(about(b"#!", None, ""), BootInput::Kernel);
    assert_eq!(about(&pvh_elf(), None, "\0"), BootInput::CommandLine);
    assert_eq!(about(&pvh_elf(), Some(&folder), ""), BootInput::Initrd);
    assert_eq!(
        about(&pvh_elf(), Some(&file_of(b"")), ""),
        BootInput::Initrd
    );
}

#[test]
fn wrong_notes_are_refused() {
    let outside = elf(ELF_AT, &pvh_note(ELF_AT as u32 - 1));
    assert!(refusal(&outside).contains("PVH entry 0x1fffff"));
    let behind = elf(ELF_AT, &pvh_note((ELF_AT + ELF_MEMORY) as u32));
    assert!(refusal(&behind).contains("PVH entry"));
    for description in [&[][..], &[1, 2], &[0xFF; 8]] {
        let image = elf(ELF_AT, &note(b"Xen\0", 18, description, 4));
        assert!(refusal(&image).contains("PVH note without a 32-bit entry"));
    }
    let long = elf(ELF_AT, &vec![0; (64 << 10) + 1]);
    assert!(refusal(&long).contains("more notes"));
    // A note that is cut off names no entry: the ELF entry is used.
    let cut = pvh_note(ELF_AT as u32);
    let memory = memory::create(64 * MIB).unwrap();
    let image = elf(ELF_AT, &cut[..cut.len() - 1]);
    assert_eq!(
        load_bytes(&memory, &image, None, "").unwrap().protocol,
        Protocol::Linux64
    );
}

#[test]
fn bzimages_that_do_not_fit_are_refused() {
    for (setup, says) in [
        (
            setup_header {
                version: 0x20B,
                ..setup()
            },
            "older than 2.12",
        ),
        (
            setup_header {
                loadflags: 0,
                ..setup()
            },
            "below 1 MiB",
        ),
        (
            setup_header {
                xloadflags: 0,
                ..setup()
            },
            "32-bit kernel",
        ),
        (
            setup_header {
                pref_address: 0,
                ..setup()
            },
            "needs memory at 0x0",
        ),
        (
            setup_header {
                pref_address: u64::MAX,
                ..setup()
            },
            "needs memory",
        ),
        (
            setup_header {
                pref_address: 0x380_0001,
                init_size: 0x80_0000,
                ..setup()
            },
            "0x4000000",
        ),
        (
            setup_header {
                init_size: u32::MAX,
                ..setup()
            },
            "give more memory",
        ),
        (
            setup_header {
                syssize: u32::MAX,
                ..setup()
            },
            "cut off",
        ),
        (
            setup_header {
                setup_sects: 255,
                ..setup()
            },
            "cut off",
        ),
        (
            setup_header {
                setup_sects: 0,
                ..setup()
            },
            "cut off",
        ),
    ] {
        let says_it = refusal(&bzimage(setup));
        assert!(says_it.contains(says), "{says}: {says_it}");
    }
}

#[test]
fn every_cut_of_an_image_is_refused() {
    for image in [pvh_elf(), bzimage(setup())] {
        for length in 0..image.len() {
            refusal(&image[..length]);
        }
    }
}

#[test]
fn what_is_no_regular_file_is_refused() {
    let memory = memory::create(64 * MIB).unwrap();
    let folder = || File::open("/").unwrap();
    let load = |kernel, initrd| {
        let source = BootSource {
            kernel,
            initrd,
            cmdline: String::new(),
        };
        load(&memory, &source).unwrap_err().to_string()
    };
    assert_eq!(
        load(Kernel::File(folder()), None),
        "the kernel is not a regular file"
    );
    let kernel = Kernel::File(file_of(&pvh_elf()));
    assert_eq!(
        load(kernel, Some(folder())),
        "the initrd is not a regular file"
    );
}

#[test]
fn an_initrd_that_does_not_fit_is_refused() {
    let memory = memory::create(64 * MIB).unwrap();
    let load = |image: &[u8], bytes| load_bytes(&memory, image, Some(&sparse(bytes)), "");
    assert!(matches!(load(&pvh_elf(), 0), Err(BootError::InitrdEmpty)));
    // The kernel takes 4 pages from 2 MiB on.
    let room = 62 * MIB - 4 * PAGE_SIZE;
    assert_eq!(load(&pvh_elf(), room).unwrap().initrd.unwrap().size, room);
    for bytes in [room + 1, 1 << 42] {
        let refused = load(&pvh_elf(), bytes).unwrap_err();
        assert!(
            refused
                .to_string()
                .contains(&format!("only {room} are free")),
            "{refused}"
        );
    }
    let low = bzimage(setup_header {
        initrd_addr_max: 0xF_FFFF,
        ..setup()
    });
    assert!(
        load(&low, 1)
            .unwrap_err()
            .to_string()
            .contains("only 0 are free")
    );
}

#[test]
fn a_command_line_is_as_long_as_the_kernel_takes() {
    let memory = memory::create(64 * MIB).unwrap();
    let load = |image: &[u8], bytes: usize| load_bytes(&memory, image, None, &"x".repeat(bytes));
    for (image, limit) in [(pvh_elf(), MAX_COMMAND_LINE), (bzimage(setup()), 1000)] {
        load(&image, limit).unwrap();
        let refused = load(&image, limit + 1).unwrap_err().to_string();
        assert!(
            refused.contains(&format!("this kernel takes {limit}")),
            "{refused}"
        );
    }
    // A limit without bound in the header does not lift the machine's own.
    let any = bzimage(setup_header {
        cmdline_size: u32::MAX,
        ..setup()
    });
    load(&any, 0xFFFF).unwrap();
    assert!(matches!(
        load(&any, 0x1_0000),
        Err(BootError::CommandLineLength { .. })
    ));
    let nul = load_bytes(&memory, &any, None, "a\0b");
    assert!(matches!(nul, Err(BootError::CommandLineNul)));
}

/// Replaces bytes of an image at random places, then possibly truncates it.
fn mutated(image: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let interesting = prop_oneof![
        any::<u64>(),
        Just(0),
        Just(u64::MAX),
        Just(0x8000_0000),
        0..64 * MIB,
        0..0x1000u64
    ];
    let patch = (
        0..image.len(),
        prop_oneof![Just(1usize), Just(2), Just(4), Just(8)],
        interesting,
    );
    let cut = prop_oneof![4 => Just(usize::MAX), 1 => 0..image.len()];
    (prop::collection::vec(patch, 1..6), cut).prop_map(move |(patches, cut)| {
        let mut image = image.clone();
        for (at, width, value) in patches {
            let end = (at + width).min(image.len());
            image[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        }
        image.truncate(cut);
        image
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn mutated_images_are_loaded_within_ram_or_refused(
        image in prop_oneof![
            mutated(pvh_elf()),
            mutated(elf(ELF_AT, &note(b"GNU\0", 1, &[1; 9], 4))),
            mutated(bzimage(setup())),
        ],
        initrd_bytes in prop_oneof![Just(0), 1..2 * MIB],
    ) {
        let memory = memory::create(32 * MIB).unwrap();
        let initrd = (initrd_bytes > 0).then(|| sparse(initrd_bytes));
        if let Ok(loaded) = load_bytes(&memory, &image, initrd.as_ref(), "quiet") {
            let (kernel, low_end) = (loaded.kernel, memory::low_end(&memory));
            prop_assert!(kernel.contains(loaded.entry.0), "{loaded:x?}");
            prop_assert!(kernel.start >= layout::KERNEL_MIN && kernel.end() <= low_end);
            if let Some(initrd) = loaded.initrd {
                prop_assert!(!initrd.overlaps(&kernel) && initrd.end() <= low_end);
                prop_assert!(initrd.start.is_multiple_of(PAGE_SIZE));
                prop_assert!(initrd.start >= layout::KERNEL_MIN);
            }
        }
    }

    #[test]
    fn an_initrd_never_lies_on_the_kernel(
        size in 0..4 * GIB,
        start in layout::KERNEL_MIN..GIB,
        kernel in 0..GIB,
        last in 0..=u64::from(u32::MAX),
        low_pages in 1024..=3 * GIB / PAGE_SIZE,
    ) {
        let (kernel, low_end) = (Window { start, size: kernel }, low_pages * PAGE_SIZE);
        if let Ok(place) = initrd::place(size, kernel, last, low_end) {
            prop_assert_eq!(place.size, size);
            prop_assert!(place.start >= kernel.end() && place.end() <= low_end);
            prop_assert!(place.end() - 1 <= last);
            prop_assert!(place.start.is_multiple_of(PAGE_SIZE));
        }
    }
}
