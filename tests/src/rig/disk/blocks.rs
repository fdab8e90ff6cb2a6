//! Blocks of a disk that say which they are: a read from another place, or of old memory, is noticed
//! by its first and last word, without the time that a check of all bytes takes.

use std::{
    io::{BufWriter, Write as _},
    path::Path,
};

use crate::error::{Result, Tried};

/// Length of a block, and of each request, bytes.
pub const DISK_BLOCK_BYTES: usize = 4096;
/// Bytes of a word.
const WORD_BYTES: usize = 8;
const WORDS: usize = DISK_BLOCK_BYTES / WORD_BYTES;
/// The word that a write changes, and how.
const MARKED: usize = 1;
const MARK: u64 = 1 << 63;

/// Fills a block's bytes: each word is its own number on the disk. With `marked`, one word says that the
/// block was written by the guest.
pub fn fill_disk_block(bytes: &mut [u8], number: u64, marked: bool) {
    let first = number * WORDS as u64;
    for (word, bytes) in (first..).zip(bytes.chunks_exact_mut(WORD_BYTES)) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    if marked {
        put(bytes, MARKED, word(bytes, MARKED) | MARK);
    }
}

/// Whether the bytes are those of this block, by their first and last word.
pub fn is_disk_block(bytes: &[u8], number: u64) -> bool {
    let first = number * WORDS as u64;
    [0, WORDS - 1]
        .iter()
        .all(|at| word(bytes, *at) == first + *at as u64)
}

/// Makes an image of this many blocks.
///
/// # Errors
/// It can't be written.
pub fn make_disk_of_blocks(path: &Path, blocks: u64) -> Result<()> {
    let what = || format!("make the image of a disk at {}", path.display());
    let mut file = BufWriter::new(std::fs::File::create(path).tried(what())?);
    let mut bytes = vec![0; DISK_BLOCK_BYTES];
    for number in 0..blocks {
        fill_disk_block(&mut bytes, number, false);
        file.write_all(&bytes).tried(what())?;
    }
    file.flush().tried(what())
}

/// Returns how many blocks of an image the guest has written.
///
/// # Errors
/// It can't be read, or a block is not the one that it should be; the text has its number.
pub fn count_marked_blocks(path: &Path) -> Result<u64> {
    let what = || format!("read the image of a disk at {}", path.display());
    let image = std::fs::read(path).tried(what())?;
    let mut marked = 0;
    let mut expected = vec![0; DISK_BLOCK_BYTES];
    for (number, bytes) in (0..).zip(image.chunks(DISK_BLOCK_BYTES)) {
        let is_marked = bytes.len() == DISK_BLOCK_BYTES && word(bytes, MARKED) & MARK != 0;
        fill_disk_block(&mut expected, number, is_marked);
        if bytes != expected {
            return Err(crate::Error::unexpected(format!(
                "block {number} of {} is wrong",
                path.display()
            )));
        }
        marked += u64::from(is_marked);
    }
    Ok(marked)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; WORD_BYTES];
    word.copy_from_slice(&bytes[at * WORD_BYTES..][..WORD_BYTES]);
    u64::from_le_bytes(word)
}

fn put(bytes: &mut [u8], at: usize, word: u64) {
    bytes[at * WORD_BYTES..][..WORD_BYTES].copy_from_slice(&word.to_le_bytes());
}

#[cfg(test)]
#[path = "blocks_test.rs"]
mod tests;
