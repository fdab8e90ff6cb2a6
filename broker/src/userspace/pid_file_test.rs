use std::os::unix::fs::symlink;

use super::*;

#[test]
fn it_has_the_process_until_its_end_and_no_other_file_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.pid");
    fs::write(&path, "4194304999\n").unwrap();
    let mut file = PidFile::open(path.clone()).unwrap();
    file.write().unwrap();
    let own = format!("{}\n", std::process::id());
    assert_eq!(fs::read_to_string(&path).unwrap(), own);
    drop(file);
    assert!(!path.exists());

    let mut file = PidFile::open(path.clone()).unwrap();
    file.write().unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, "another").unwrap();
    drop(file);
    assert_eq!(fs::read_to_string(&path).unwrap(), "another");

    let link = dir.path().join("link");
    symlink(&path, &link).unwrap();
    let refused = |path| PidFile::open(path).unwrap_err().to_string();
    assert!(refused(link).contains("--pid-file"));
    assert!(refused(dir.path().to_owned()).contains("--pid-file"));
    assert_eq!(fs::read_to_string(&path).unwrap(), "another");
}

#[test]
fn a_file_that_was_not_written_or_is_anothers_by_now_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.pid");
    let content = || fs::read_to_string(&path).unwrap();
    // Of an instance that runs, or not even a PID file.
    fs::write(&path, "notes").unwrap();
    drop(PidFile::open(path.clone()).unwrap());
    assert_eq!(content(), "notes");

    // Two share the file: it is the latter's.
    let mut file = PidFile::open(path.clone()).unwrap();
    file.write().unwrap();
    fs::write(&path, "4194304999\n").unwrap();
    drop(file);
    assert_eq!(content(), "4194304999\n");
}
