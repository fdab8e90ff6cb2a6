use std::os::unix::fs::PermissionsExt as _;

use super::*;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_snapshot_is_made_new_for_its_user_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("warm");
    let folder = NewFolder::make(&path).unwrap();
    let mut state = folder.file("state").unwrap();
    assert_eq!((mode(&path), mode(&path.join("state"))), (0o700, 0o600));
    let read = io::Read::read(&mut state, &mut [0]);
    assert_eq!(read.unwrap_err().raw_os_error(), Some(libc::EBADF));
    assert!(folder.file("state").is_err(), "a file that is there");
    folder.finish(&serde_json::json!({ "version": 1 })).unwrap();
    let text = fs::read_to_string(path.join("machine.json")).unwrap();
    assert_eq!(text, "{\n  \"version\": 1\n}\n");
    let again = NewFolder::make(&path).err().unwrap().to_string();
    assert!(again.contains("give a directory that does not"), "{again}");
}

#[test]
fn what_is_not_finished_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("warm");
    let folder = NewFolder::make(&path).unwrap();
    let files = ["state", "memory"].map(|name| folder.file(name).unwrap());
    drop(folder);
    assert!(!path.exists());
    drop(files);
}
