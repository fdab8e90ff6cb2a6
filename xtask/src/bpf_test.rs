use std::fs;

use super::{LOGGING, Objects, PLAIN};

#[test]
fn a_logging_object_that_is_there_never_gets_out_of_date() {
    let out = tempfile::tempdir().unwrap();
    assert_eq!(Objects::PlainUnlessBuilt.list(out.path()), &[PLAIN]);
    assert_eq!(Objects::Both.list(out.path()), &[PLAIN, LOGGING]);
    fs::write(out.path().join(LOGGING.0), "").unwrap();
    assert_eq!(
        Objects::PlainUnlessBuilt.list(out.path()),
        &[PLAIN, LOGGING]
    );
}
