use std::fs;

use nix::{sys::stat::Mode, unistd::mkfifo};

use super::*;

#[test]
fn what_never_ends_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    mkfifo(&fifo, Mode::S_IRWXU).unwrap();
    // Nobody ever opens it for writing.
    for path in [&fifo, Path::new("/dev/zero"), dir.path()] {
        let error = from_disk(path).unwrap_err().to_string();
        assert_eq!(error, "it is no regular file", "{}", path.display());
    }
    // A regular file that says nothing of its length.
    let endless = read_at_most(Path::new("/proc/self/status"), 10).unwrap_err();
    assert_eq!(endless.to_string(), "it is longer than 10 bytes");
}

#[test]
fn a_file_of_the_greatest_length_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("list");
    fs::write(&path, "0123456789").unwrap();
    assert_eq!(read_at_most(&path, 10).unwrap(), "0123456789");
    assert!(read_at_most(&path, 9).is_err());
}
