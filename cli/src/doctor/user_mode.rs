//! What the user-mode engine needs, which serves `slipgate exec` and `slipgate attach --socket`.
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

const USER_NAMESPACES: &str = "/proc/sys/user/max_user_namespaces";
const TUN: &str = "/dev/net/tun";

/// Reports on the user-mode engine. Nothing of it keeps the hybrid NAT from running.
pub(super) fn found() -> Vec<Finding> {
    vec![
        of_tables(&user_mode_dir()),
        of_commands(Path::new(USER_NAMESPACES), Path::new(TUN)),
        of_ping(),
    ]
}

/// Whether the tables can be made, and so whether a guest can be served at all.
fn of_tables(dir: &Path) -> Finding {
    let what = "user mode";
    let parent = dir.ancestors().find(|dir| dir.exists());
    let use_it = AccessFlags::W_OK | AccessFlags::X_OK;
    match parent.map(|parent| access(parent, use_it)) {
        Some(Ok(())) => {
            let dir = dir.display();
            let found = format!("`slipgate attach --socket` can serve, its tables are in {dir}");
            Finding::ok(what, found)
        }
        _ => Finding::ok(what, format!("{} can't be made or used", dir.display())).with(
            State::Note,
            "for `slipgate attach --socket` and `slipgate exec`: set XDG_RUNTIME_DIR to a directory of \
             yours",
        ),
    }
}

/// Whether a command can have a network namespace and a TAP.
fn of_commands(user_namespaces: &Path, tun: &Path) -> Finding {
    let what = "commands";
    let most = fs::read_to_string(user_namespaces).unwrap_or_default();
    if most.trim().parse() == Ok(0) {
        return Finding::ok(what, "user namespaces are off").with(
            State::Note,
            "for `slipgate exec`: sysctl user.max_user_namespaces=10000",
        );
    }
    match File::options().read(true).write(true).open(tun) {
        Ok(_) => Finding::ok(what, "`slipgate exec` finds user namespaces and TAPs"),
        Err(e) => Finding::ok(what, format!("{} can't be opened: {e}", tun.display())).with(
            State::Note,
            format!("for `slipgate exec`: chmod 666 {}", tun.display()),
        ),
    }
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

#[cfg(test)]
#[path = "user_mode_test.rs"]
mod tests;
