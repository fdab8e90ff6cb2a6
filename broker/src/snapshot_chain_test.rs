use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
};

use serde_json::json;

use super::*;

/// Writes the files of a snapshot `name` whose id is made of `byte`.
fn write(place: &Path, name: &str, byte: u8, base: Option<&str>) -> PathBuf {
    let dir = place.join(name);
    fs::create_dir_all(&dir).unwrap();
    let state = [&[0; ID_AT][..], &[byte; ID_BYTES], b"state"].concat();
    fs::write(dir.join("state"), state).unwrap();
    fs::write(dir.join("memory"), name).unwrap();
    let mut machine = json!({ "version": 1, "machine": {
        "kernel": null, "initrd": null, "cmdline": "", "cpus": 1, "memory_mib": 64, "queues": 1,
        "mac": "02:00:00:00:00:01",
    }});
    if let Some(base) = base {
        machine["base"] = json!({ "id": "beef", "path": place.join(base) });
    }
    fs::write(dir.join("machine.json"), machine.to_string()).unwrap();
    for path in [
        dir.clone(),
        dir.join("state"),
        dir.join("memory"),
        dir.join("machine.json"),
    ] {
        fs::set_permissions(path, Permissions::from_mode(0o700)).unwrap();
    }
    dir
}

fn text(file: &File) -> String {
    io::read_to_string(file).unwrap()
}

#[test]
fn a_snapshot_comes_with_those_below_it() {
    let place = tempfile::tempdir().unwrap();
    write(place.path(), "lowest", 1, None);
    write(place.path(), "middle", 2, Some("lowest"));
    let top = write(place.path(), "top", 3, Some("middle"));
    let link = place.path().join("link");
    std::os::unix::fs::symlink("top", &link).unwrap();
    let chain = SnapshotChain::open(&link).unwrap();
    assert_eq!(chain.bases().unwrap().len(), 3);
    let memories: Vec<_> = chain.files.iter().map(|[_, memory]| text(memory)).collect();
    assert_eq!(memories, ["top", "middle", "lowest"]);
    // The next one names it, and reads its state from the start.
    let mut machine = json!({});
    chain.describe(&mut machine).unwrap();
    assert_eq!(
        machine["base"],
        json!({ "id": "03".repeat(32), "path": top.canonicalize().unwrap() })
    );
    assert!(chain.describe(&mut json!("no object")).is_err());
    assert!(text(&chain.files[0][0]).ends_with("state"));
    assert_eq!(chain.into_files().bases.len(), 2);
}

#[test]
fn a_base_that_is_gone_is_named() {
    let place = tempfile::tempdir().unwrap();
    let lowest = write(place.path(), "lowest", 1, None);
    let top = write(place.path(), "top", 3, Some("lowest"));
    fs::remove_dir_all(&lowest).unwrap();
    let refused = SnapshotChain::open(&top).unwrap_err();
    let (problem, remedy) = refused.parts();
    let path = lowest.display().to_string();
    assert!(
        problem.contains("beef") && problem.contains(&path),
        "{problem}"
    );
    assert!(remedy.contains("put the base there again"), "{remedy}");
    // And one that others can have written.
    write(place.path(), "lowest", 1, None);
    fs::set_permissions(lowest.join("memory"), Permissions::from_mode(0o666)).unwrap();
    let (problem, remedy) = SnapshotChain::open(&top).unwrap_err().parts();
    assert!(problem.contains("can be written by others"), "{problem}");
    assert!(remedy.contains("chmod"), "{remedy}");
}

#[test]
fn a_path_that_no_description_can_have_is_no_base() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};
    let place = tempfile::tempdir().unwrap();
    let place = place.path().join(OsStr::from_bytes(b"\xff"));
    let dir = write(&place, "whole", 1, None);
    let chain = SnapshotChain::open(&dir).unwrap();
    let why = chain.bases().unwrap_err().explained();
    assert!(why.contains("no UTF-8"), "{why}");
    // What is not there is named without a slash at the end.
    let why = SnapshotChain::open(&dir.join("absent")).unwrap_err();
    assert!(why.to_string().contains("absent can't be read"), "{why}");
}

#[test]
fn snapshots_in_a_circle_and_too_many_are_refused() {
    let place = tempfile::tempdir().unwrap();
    write(place.path(), "a", 1, Some("b"));
    let b = write(place.path(), "b", 2, Some("a"));
    let (problem, remedy) = SnapshotChain::open(&b).unwrap_err().parts();
    assert!(problem.contains("/b is below itself"), "{problem}");
    assert!(remedy.contains("machine.json"), "{remedy}");
    let mut last = write(place.path(), "0", 9, None);
    for number in 1..=MAX_BASES {
        let below = (number - 1).to_string();
        last = write(place.path(), &number.to_string(), 9, Some(&below));
    }
    // It can be restored, and is no base.
    let chain = SnapshotChain::open(&last).unwrap();
    assert!(matches!(chain.bases(), Err(ChainError::TooMany)));
}
