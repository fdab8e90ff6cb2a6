use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
};

use super::*;

#[test]
fn a_snapshot_is_roots_or_ones_own() {
    for (owner, mode, we, is_trusted) in [
        (0, 0o40_755, 0, true),
        (0, 0o100_644, 1_000, true),
        (1_000, 0o100_600, 1_000, true),
        (1_000, 0o100_600, 0, false),
        (1_001, 0o100_600, 1_000, false),
        (0, 0o40_775, 0, false),
        (0, 0o41_777, 0, false),
        (1_000, 0o100_602, 1_000, false),
    ] {
        let why = writers(owner, mode, we);
        assert_eq!(why.is_none(), is_trusted, "{owner} {mode:o} {we}: {why:?}");
    }
}

#[test]
fn what_others_can_write_is_found_wherever_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for name in SNAPSHOT_FILES {
        fs::write(dir.join(name), "{}").unwrap();
        fs::set_permissions(dir.join(name), Permissions::from_mode(0o644)).unwrap();
    }
    SavedMachine::check_writers(dir).unwrap();
    let all = SNAPSHOT_FILES.map(|name| dir.join(name));
    for path in all.iter().map(PathBuf::as_path).chain([dir]) {
        let before = path.metadata().unwrap().permissions();
        let mode = before.mode() | 0o020;
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        let why = SavedMachine::check_writers(dir).unwrap_err();
        assert!(why.starts_with(&*path.to_string_lossy()), "{why}");
        assert!(why.contains("can be written by others"), "{why}");
        fs::set_permissions(path, before).unwrap();
    }
    // The description is looked at again as it was opened.
    let [.., description] = &all;
    fs::set_permissions(description, Permissions::from_mode(0o666)).unwrap();
    let why = SavedMachine::read(dir).unwrap_err().to_string();
    assert!(why.contains("mode 0666"), "{why}");
}

#[test]
fn a_directory_for_snapshots_is_there_ones_own_and_writable() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("snapshots");
    let why = check_snapshot_dir(&dir).unwrap_err();
    assert!(why.contains("can't be used"), "{why}");
    fs::create_dir(&dir).unwrap();
    let set = |mode| fs::set_permissions(&dir, Permissions::from_mode(mode)).unwrap();
    set(0o770);
    let why = check_snapshot_dir(&dir).unwrap_err();
    assert!(why.contains("can be written by others"), "{why}");
    set(0o700);
    check_snapshot_dir(&dir).unwrap();
    set(0o500);
    // Root may write there all the same.
    let found = check_snapshot_dir(&dir);
    assert_eq!(found.is_ok(), geteuid().is_root(), "{found:?}");
    // Where nobody can, root neither.
    if geteuid().is_root() && access("/proc/sys/kernel", AccessFlags::W_OK) == Err(Errno::EROFS) {
        let why = check_snapshot_dir(Path::new("/proc/sys/kernel")).unwrap_err();
        assert!(why.contains("ReadWritePaths="), "{why}");
    }
}
