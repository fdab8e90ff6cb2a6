use std::{fs::File, os::unix::fs::FileExt as _};

use super::*;

#[test]
fn a_block_from_another_place_or_with_an_old_end_is_noticed() {
    let mut bytes = vec![0; DISK_BLOCK_BYTES];
    for marked in [false, true] {
        fill_disk_block(&mut bytes, 7, marked);
        assert!(is_disk_block(&bytes, 7));
        assert!(!is_disk_block(&bytes, 6) && !is_disk_block(&bytes, 8));
    }
    *bytes.last_mut().unwrap() ^= 1;
    assert!(!is_disk_block(&bytes, 7));
}

#[test]
fn written_blocks_of_an_image_are_counted_and_a_wrong_byte_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    make_disk_of_blocks(&path, 16).unwrap();
    assert_eq!(count_marked_blocks(&path).unwrap(), 0);
    let file = File::options().write(true).open(&path).unwrap();
    let mut bytes = vec![0; DISK_BLOCK_BYTES];
    for number in [3, 15] {
        fill_disk_block(&mut bytes, number, true);
        let at = number * DISK_BLOCK_BYTES as u64;
        file.write_all_at(&bytes, at).unwrap();
    }
    assert_eq!(count_marked_blocks(&path).unwrap(), 2);
    // In the middle, where a guest does not look.
    file.write_all_at(b"x", 5 * DISK_BLOCK_BYTES as u64 + 2000)
        .unwrap();
    let why = count_marked_blocks(&path).unwrap_err().to_string();
    assert!(why.starts_with("block 5 of "), "{why}");
}
