use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};

use super::*;

#[test]
fn sockets_of_killed_processes_go_and_others_stay() {
    let dir = tempfile::tempdir().unwrap();
    let own = format!("{}.sock", process::id());
    // No process has an id above the kernel's limit.
    let names = [
        &*own,
        "4194999.sock",
        "4194999.json",
        "notes",
        "4194999.txt",
        "nobodys.sock",
    ];
    for name in names {
        fs::write(dir.path().join(name), "").unwrap();
    }
    remove_left(dir.path());
    let left = |name: &&str| dir.path().join(name).exists();
    let left: Vec<_> = names.into_iter().filter(left).collect();
    assert_eq!(left, [&*own, "notes", "4194999.txt", "nobodys.sock"]);
}

#[test]
fn a_directory_that_is_not_ones_own_alone_has_no_sockets() {
    let place = tempfile::tempdir().unwrap();
    let (above, dir) = (
        place.path().join("user"),
        place.path().join("user/machines"),
    );
    let socket = dir.join("1.sock");
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    let record = MachineRecord {
        name: "web".to_owned(),
    };
    // Made anew, it is for its user alone.
    drop(bind(&dir, &socket, &record).unwrap());
    for path in [&above, &dir] {
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o700);
    }
    let bound = bind(&dir, &socket, &record).unwrap();
    assert_eq!(MachineRecord::of_socket(&socket), Some(record.clone()));
    drop(bound);
    assert_eq!(MachineRecord::of_socket(&socket), None);
    // One of an earlier version says more.
    let earlier = socket.with_extension(RECORD);
    fs::write(&earlier, r#"{"name": "web", "netns": 7}"#).unwrap();
    assert_eq!(MachineRecord::of_socket(&socket), Some(record.clone()));
    fs::remove_file(earlier).unwrap();
    let refused = |part: &str| {
        let error = bind(&dir, &socket, &record)
            .expect_err("refused")
            .to_string();
        assert!(error.contains(part), "{error}");
        assert!(error.contains("XDG_RUNTIME_DIR"), "{error}");
        assert!(!socket.exists());
    };
    set(&dir, 0o755).unwrap();
    refused("(mode 0755)");
    set(&dir, 0o700).unwrap();
    set(&above, 0o1777).unwrap();
    refused("(mode 1777)");
    // Others may look into the one above it.
    set(&above, 0o755).unwrap();
    drop(bind(&dir, &socket, &record).unwrap());
    // Only root can give one away.
    if geteuid().is_root() {
        for path in [&above, &dir] {
            chown(path, Some(65_534), None).unwrap();
            refused("belongs to the user 65534");
            chown(path, Some(0), None).unwrap();
        }
    }
    let elsewhere = place.path().join("elsewhere");
    fs::rename(&dir, &elsewhere).unwrap();
    symlink(&elsewhere, &dir).unwrap();
    refused("is no directory");
}
