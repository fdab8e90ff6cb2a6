use std::{fs::OpenOptions, os::unix::fs::OpenOptionsExt as _};

use slipgate_testbed::skipped;

use super::*;

fn piece(address: usize, bytes: usize) -> iovec {
    iovec {
        iov_base: address as *mut _,
        iov_len: bytes,
    }
}

#[test]
fn pieces_are_aligned_in_address_and_length() {
    let fine = Alignment::new(4, 512).unwrap();
    assert!(fine.holds(&[piece(0x1004, 512), piece(0x2000, 1024)]));
    assert!(!fine.holds(&[piece(0x1000, 512), piece(0x2002, 512)]));
    assert!(!fine.holds(&[piece(0x1000, 500), piece(0x2000, 12)]));
    // The rest of a piece is as aligned as the piece.
    let pages = Alignment::new(4096, 512).unwrap();
    assert!(!pages.holds(&[piece(0x1000, 512)]));
    assert!(pages.holds(&[piece(0x1000, 8192)]));
    let blocks = Alignment::new(512, 4096).unwrap();
    assert!(blocks.holds(&[piece(0x1200, 4096)]));
    assert!(!blocks.holds(&[piece(0x1000, 2048), piece(0x1800, 2048)]));
    assert_eq!((blocks.block(), fine.block()), (4096, 512));
}

#[test]
fn an_alignment_that_guests_do_not_know_is_refused() {
    for (memory, block) in [(8192, 512), (512, 8192), (0, 512), (3, 512), (512, 1536)] {
        let error = Alignment::new(memory, block).unwrap_err();
        assert!(matches!(error, DiskError::Alignment { .. }), "{error}");
    }
    // A sector is the least.
    assert_eq!(Alignment::new(1, 1).unwrap().block(), SECTOR_BYTES);
}

#[test]
fn a_file_that_was_opened_otherwise_is_refused() {
    let file = tempfile::tempfile().unwrap();
    assert!(matches!(Alignment::of(&file), Err(DiskError::Cached)));
}

/// What is said or found of a file is what the kernel takes, also where it is tried out.
#[test]
fn the_kernel_transfers_what_is_aligned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [7; 16 << 10]).unwrap();
    let opened = (OpenOptions::new().read(true).write(true))
        .custom_flags(libc::O_DIRECT)
        .open(&path);
    let Ok(file) = opened else {
        return skipped!("the file system of temporary files has no direct transfers");
    };
    let alignment = Alignment::of(&file).unwrap();
    let found = found_block(&file).unwrap();
    assert!(u64::from(found) <= alignment.block());
    let mut buffers = Buffers::new().unwrap();
    let mut buffer = buffers.take().unwrap();
    // SAFETY: no operation uses it.
    let bytes = unsafe { buffer.bytes(alignment.block() as usize) };
    file.read_exact_at(bytes, alignment.block()).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
    bytes.fill(8);
    file.write_all_at(bytes, alignment.block()).unwrap();
    // One that ends within what is tried.
    file.set_len(512).unwrap();
    assert!(found_block(&file).is_ok());
}

#[test]
fn buffers_are_few_aligned_and_apart() {
    let mut buffers = Buffers::new().unwrap();
    let mut all = Vec::new();
    while let Some(mut buffer) = buffers.take() {
        let number = all.len() as u8;
        // SAFETY: no operation uses it.
        unsafe { buffer.bytes(usize::MAX) }.fill(number);
        assert!((buffer.piece(1).iov_base as usize).is_multiple_of(MAX_ALIGNMENT as usize));
        all.push(buffer);
    }
    assert_eq!((all.len(), buffers.has_room()), (BUFFERS, false));
    for (number, buffer) in (0..).zip(&mut all) {
        assert_eq!(buffer.piece(usize::MAX).iov_len, BUFFER_BYTES);
        // SAFETY: no operation uses it.
        let bytes = unsafe { buffer.bytes(usize::MAX) };
        assert!(bytes.iter().all(|byte| *byte == number));
    }
    buffers.give_back(all.remove(3));
    assert!(buffers.has_room());
}
