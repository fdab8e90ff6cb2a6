//! A user and a network namespace of a user's own, in which a private network is made without root.

use std::{ffi::OsStr, fs, path::Path, process::Command};

use anyhow::{Context, Result, bail};

use crate::workspace::{capture, on_path};

/// The program that makes them, of util-linux.
const UNSHARE: &str = "unshare";

/// Who runs a program so is the same user as before, and has each capability over these namespaces.
const FLAGS: [&str; 5] = ["--user", "--map-current-user", "--keep-caps", "--net", "--"];

/// Settings, each with the value that refuses users such namespaces, and what permits them.
const SETTINGS: [(&str, &str, &str); 3] = [
    (
        "user/max_user_namespaces",
        "0",
        "sysctl user.max_user_namespaces=10000",
    ),
    (
        "kernel/unprivileged_userns_clone",
        "0",
        "sysctl kernel.unprivileged_userns_clone=1",
    ),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
];

/// Returns a command that runs a program in namespaces of its own, with this environment.
///
/// # Errors
/// This user can have none; the error says what permits them.
pub(crate) fn around(program: impl AsRef<OsStr>) -> Result<Command> {
    if on_path(UNSHARE).is_none() {
        bail!("there is no {UNSHARE}, of util-linux");
    }
    if on_path("ip").is_none() {
        bail!("there is no ip, of iproute2");
    }
    // Not only made: AppArmor lets a namespace be made, and takes the capabilities over it away.
    let mut used = Command::new(UNSHARE);
    used.args(FLAGS).args(["ip", "link", "set", "lo", "up"]);
    if let Err(why) = capture(&mut used) {
        let mut flags_alone = Command::new(UNSHARE);
        if capture(flags_alone.args(["--map-current-user", "--keep-caps", "--help"])).is_err() {
            let old = format!(
                "{UNSHARE} has no --map-current-user or --keep-caps: its util-linux is too old"
            );
            return Err(why).context(old);
        }
        return Err(why).context(refused_by(Path::new("/proc/sys")));
    }
    let mut command = Command::new(UNSHARE);
    command.args(FLAGS).arg(program);
    Ok(command)
}

/// Returns what the refusal of user namespaces comes from, as far as the settings tell.
fn refused_by(settings: &Path) -> String {
    let refuses = |setting: &str, value: &str| {
        fs::read_to_string(settings.join(setting)).is_ok_and(|found| found.trim() == value)
    };
    let mut all = SETTINGS.iter();
    match all.find(|(setting, value, _)| refuses(setting, value)) {
        Some((setting, value, remedy)) => format!(
            "this machine lets users make no namespaces: {} is {value} (to permit them: {remedy})",
            setting.replace('/', ".")
        ),
        None => "this user can't use a user namespace of its own here".to_owned(),
    }
}

#[cfg(test)]
#[path = "own_namespaces_test.rs"]
mod tests;
