use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt as _, chown, symlink},
};

use super::*;

/// The place of a configuration's first VM, with tables in a folder of its own.
pub(in super::super) fn place_of(nat: &Config) -> (tempfile::TempDir, Place) {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths {
        pin_dir: dir.path().join("maps"),
        run_dir: dir.path().join("maps"),
    };
    let loaded = nat.load_policies().unwrap();
    let policies = loaded.compile().unwrap();
    let policies = (loaded, policies);
    let place = Place::take_in_tables(paths, nat, &nat.vms[0], (1_500, None), policies);
    (dir, place.unwrap())
}

/// As another user could do in /tmp, before this user's first machine.
#[test]
fn tables_are_not_made_where_another_user_can_write() {
    let place = tempfile::tempdir().unwrap();
    let base = place.path().join("slipgate-1000");
    let dir = base.join("4026531840");
    let refused = |part: &str| {
        let error = make_private(&dir).expect_err("refused").to_string();
        assert!(error.contains(part), "{error}");
    };
    let set = |mode| fs::set_permissions(&base, Permissions::from_mode(mode)).unwrap();
    make_private(&dir).unwrap();
    make_private(&dir).unwrap();
    set(0o777);
    refused("(mode 0777)");
    set(0o700);
    // Only root can give one away.
    if geteuid().is_root() {
        chown(&base, Some(65_534), None).unwrap();
        refused("belongs to the user 65534");
        chown(&base, Some(0), None).unwrap();
    }
    let elsewhere = place.path().join("elsewhere");
    fs::rename(&base, &elsewhere).unwrap();
    symlink(&elsewhere, &base).unwrap();
    refused("is no directory");
}

#[test]
fn sockets_of_the_api_are_below_what_no_command_sees() {
    let place = tempfile::tempdir().unwrap();
    let own = place.path().join("slipgate");
    let private = [own.clone()];
    let api = own.join("api");
    assert!(prepare_dir(&api.join("of/one"), &private).unwrap());
    for dir in [&api, &api.join("of/one")] {
        assert_eq!(
            fs::metadata(dir).unwrap().permissions().mode() & 0o777,
            0o700
        );
    }
    // What the other commands take for control sockets.
    let netns = paths::netns_inode().unwrap().to_string();
    for dir in [&own, &own.join(netns)] {
        assert!(prepare_dir(dir, &private).is_err(), "{}", dir.display());
    }
    assert!(!prepare_dir(place.path(), &private).unwrap());
    assert!(!prepare_dir(&own.join("../elsewhere"), &private).unwrap());
    let link = place.path().join("link");
    symlink(&api, &link).unwrap();
    assert!(prepare_dir(&link, &private).unwrap());
    fs::set_permissions(&api, Permissions::from_mode(0o755)).unwrap();
    assert!(prepare_dir(&api, &private).is_err());
}
