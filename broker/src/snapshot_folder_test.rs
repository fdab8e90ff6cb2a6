use std::os::unix::fs::PermissionsExt as _;

use super::*;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_snapshot_is_made_new_for_its_user_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("warm");
    let folder = SnapshotFolder::make(&path).unwrap();
    let mut state = folder.file("state").unwrap();
    let read = io::Read::read(&mut state, &mut [0]);
    assert_eq!(read.unwrap_err().raw_os_error(), Some(libc::EBADF));
    folder.finish(&serde_json::json!({ "version": 1 })).unwrap();
    assert_eq!((mode(&path), mode(&path.join("state"))), (0o700, 0o600));
    assert_eq!(mode(&path.join("machine.json")), 0o600);
    let text = fs::read_to_string(path.join("machine.json")).unwrap();
    assert_eq!(text, "{\n  \"version\": 1\n}\n");
    let again = SnapshotFolder::make(&path).err().unwrap().to_string();
    assert!(again.contains("give a directory that does not"), "{again}");
}

#[test]
fn what_is_not_finished_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("warm");
    let folder = SnapshotFolder::make(&path).unwrap();
    let files = ["state", "memory"].map(|name| folder.file(name).unwrap());
    // A command that is killed now leaves nothing that could be taken for a snapshot.
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    drop(folder);
    assert!(!path.exists());
    drop(files);
}

#[test]
fn what_a_killed_command_left_is_taken_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("warm");
    DirBuilder::new().mode(0o700).create(&path).unwrap();
    let folder = SnapshotFolder::make(&path).unwrap();
    drop(folder.file("state").unwrap());
    drop(folder);
    assert!(path.exists(), "it was there before");
    let set = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    set(0o750);
    assert!(
        SnapshotFolder::make(&path).is_err(),
        "others can look into it"
    );
    set(0o700);
    fs::write(path.join("notes"), "").unwrap();
    assert!(SnapshotFolder::make(&path).is_err(), "something is in it");
}

#[test]
fn two_commands_do_not_write_to_one_directory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("warm");
    let first = SnapshotFolder::make(&path).unwrap();
    let files = ["state", "memory"].map(|name| first.file(name).unwrap());
    let refused = SnapshotFolder::make(&path).err().unwrap().to_string();
    assert!(refused.contains("by another command"), "{refused}");
    first.finish(&serde_json::json!({ "version": 1 })).unwrap();
    drop(files);
    let mut names: Vec<_> = fs::read_dir(&path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["machine.json", "memory", "state"]);
}

#[test]
fn what_others_put_into_it_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("warm");
    let folder = SnapshotFolder::make(&path).unwrap();
    drop(folder.file("state").unwrap());
    fs::write(path.join("state"), "of somebody else").unwrap();
    drop(folder);
    assert!(path.join("state").exists());
    let link = dir.path().join("link");
    fs::create_dir(dir.path().join("empty")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("empty"), &link).unwrap();
    assert!(
        SnapshotFolder::make(&link).is_err(),
        "a link is not followed"
    );
}
