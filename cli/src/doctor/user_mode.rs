//! Checks the needs of the user-mode engine, which serves `slipgate exec`, `slipgate attach
//! --socket` and `slipgate run --mode userspace`.
use std::{
    fs::{self, File},
    path::Path,
};

use nix::{
    sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket},
    unistd::{AccessFlags, access},
};
use slipgate_broker::user_mode_dir;

use super::{Finding, State};

/// Name of the finding whether it can serve at all.
pub(super) const WHAT: &str = "user mode";
/// Settings, each with the value that forbids user namespaces and the remedy.
const USER_NAMESPACES: [(&str, u64, &str); 3] = [
    (
        "user/max_user_namespaces",
        0,
        "sysctl user.max_user_namespaces=10000",
    ),
    (
        "kernel/unprivileged_userns_clone",
        0,
        "sysctl kernel.unprivileged_userns_clone=1",
    ),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        1,
        "give slipgate an AppArmor profile with `userns,`, or sysctl \
         kernel.apparmor_restrict_unprivileged_userns=0",
    ),
];
pub(super) const SETTINGS: &str = "/proc/sys";
const TUN: &str = "/dev/net/tun";

/// Reports on the user-mode engine. Nothing of it keeps the hybrid NAT from running.
pub(super) fn found() -> Vec<Finding> {
    vec![
        of_tables(&user_mode_dir()),
        of_commands(Path::new(SETTINGS), Path::new(TUN)),
        of_ping(),
        of_rings(Path::new(SETTINGS)),
    ]
}

/// Whether the tables can be made, and so whether a guest can be served at all.
fn of_tables(dir: &Path) -> Finding {
    let what = WHAT;
    let parent = dir.ancestors().find(|dir| dir.exists());
    let use_it = AccessFlags::W_OK | AccessFlags::X_OK;
    match parent.map(|parent| access(parent, use_it)) {
        Some(Ok(())) => {
            let dir = dir.display();
            let found = format!("it can serve VMs; its tables are in {dir}");
            Finding::ok(what, found)
        }
        _ => Finding::ok(what, format!("{} can't be made or used", dir.display())).with(
            State::Note,
            "for `slipgate run --mode userspace`, `slipgate attach --socket` and `slipgate exec`: set \
             XDG_RUNTIME_DIR to a directory of yours",
        ),
    }
}

/// Whether a command can have a network namespace and a TAP.
fn of_commands(settings: &Path, tun: &Path) -> Finding {
    let what = "commands";
    if let Some((setting, remedy)) = forbidden_by(settings, |_| true) {
        return Finding::ok(what, format!("user namespaces are off ({setting})"))
            .with(State::Note, format!("for `slipgate exec`: {remedy}"));
    }
    match File::options().read(true).write(true).open(tun) {
        Ok(_) => Finding::ok(what, "`slipgate exec` finds user namespaces and TAPs"),
        Err(e) => Finding::ok(what, format!("{} can't be opened: {e}", tun.display())).with(
            State::Note,
            format!("for `slipgate exec`: chmod 666 {}", tun.display()),
        ),
    }
}

/// Returns the first setting that forbids user namespaces, and the remedy. `binds`: whether a setting
/// concerns who asks.
pub(super) fn forbidden_by(
    settings: &Path,
    binds: impl Fn(&str) -> bool,
) -> Option<(&'static str, &'static str)> {
    let forbids = |(setting, forbids, _): &(&str, u64, &str)| {
        // A kernel that lacks a setting does not forbid by it.
        let value = fs::read_to_string(settings.join(setting)).unwrap_or_default();
        binds(setting) && value.trim().parse() == Ok(*forbids)
    };
    let (setting, _, remedy) = USER_NAMESPACES.into_iter().find(forbids)?;
    Some((setting, remedy))
}

/// Whether echo requests of guests can be sent on.
fn of_ping() -> Finding {
    let what = "ping";
    let made = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::Icmp,
    );
    match made {
        Ok(_) => Finding::ok(what, "guests in user mode can ping"),
        Err(e) => Finding::ok(what, format!("no ping sockets: {e}")).with(
            State::Note,
            "for pings in user mode: have your group in sysctl net.ipv4.ping_group_range",
        ),
    }
}

/// Whether the kernel lets processes have io_uring. Nothing needs it; `slipgate run` is faster with it.
fn of_rings(settings: &Path) -> Finding {
    const WHAT: &str = "io_uring";
    const INSTEAD: &str = "for `slipgate run` only: its card on a TAP and its disks go by readv, writev, \
                           preadv and pwritev, which takes more CPU; the user-mode engine uses no io_uring \
                           in any case. To have it: sysctl kernel.io_uring_disabled=0";
    // A kernel before 6.6 has no such setting.
    let value = fs::read_to_string(settings.join("kernel/io_uring_disabled")).unwrap_or_default();
    let found = match value.trim() {
        "2" => "off for everybody (kernel.io_uring_disabled=2)",
        // The VMM has no capability, whoever started it.
        "1" => "off but for members of kernel.io_uring_group (kernel.io_uring_disabled=1)",
        _ => return Finding::ok(WHAT, "the host lets processes have it"),
    };
    Finding::ok(WHAT, found).with(State::Note, INSTEAD)
}

#[cfg(test)]
#[path = "user_mode_test.rs"]
mod tests;
