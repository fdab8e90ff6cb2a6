use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt as _, chown, symlink},
};

use super::*;

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
