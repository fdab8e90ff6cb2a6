//! Programs of another system than this one, by a user without any privilege.
//!
//! `SLIPGATE_LIBVIRT_ROOT` names the root directory of a system that has newer programs than this, as
//! `debootstrap` makes it. Without it they are this system's.

use std::{env, fs, os::unix::fs::MetadataExt as _, path::PathBuf, process::Command};

use crate::unprivileged::Place;

/// Becomes a user with a name, which libvirt asks for, in that root directory.
const AS_USER: &str = r#"set -e
root=$1 dir=$2 user=$3
shift 3
if [ "$root" != / ]; then
    for part in proc dev sys; do mount --rbind "/$part" "$root/$part"; done
    mount -t tmpfs none "$root/tmp"
    mkdir -p "$root$dir"
    mount --rbind "$dir" "$root$dir"
fi
named() {
    { cat "$root/etc/$1"; echo "$2"; } > "$dir/$1.$$"
    mount --bind "$dir/$1.$$" "$root/etc/$1"
}
named passwd "guests:x:$user:$user::$dir/run:/bin/sh"
named group "guests:x:$user:"
exec chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs \
    --bounding-set=-all -- env -i HOME="$dir/run" XDG_RUNTIME_DIR="$dir/run" \
    PATH="$dir:/usr/sbin:/usr/bin:/sbin:/bin" "$@""#;

/// Returns the root directory of that system.
pub(super) fn root() -> PathBuf {
    env::var_os("SLIPGATE_LIBVIRT_ROOT").map_or_else(|| "/".into(), PathBuf::from)
}

/// Returns a command of that system, by the place's user. The place's files have the same paths there.
pub(super) fn command(place: &Place, words: &[&str]) -> Command {
    let dir = place.file("");
    let user = fs::metadata(place.file("run")).unwrap().uid();
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "bash", "-c", AS_USER, "bash"])
        .arg(root())
        .arg(dir.to_str().unwrap().trim_end_matches('/'))
        .arg(user.to_string())
        .args(words);
    command
}
