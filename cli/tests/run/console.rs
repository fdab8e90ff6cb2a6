//! The guest's console: a pipe, or the user's terminal.
use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    process::{Child, Command, Stdio},
};

use nix::{
    pty::openpty,
    sys::termios::{LocalFlags, tcgetattr},
};
use slipgate_testbed::{require_kvm, require_root_and_tun, world::UPLINK};

use crate::{Bed, eventually, payload::Payload};

impl Bed {
    fn command(&self, image: &[u8]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slipgate"));
        command
            .args(["run", "--uplink", UPLINK, "--memory", "32", "--pin-dir"])
            .arg(self.pins.path())
            .arg("--kernel")
            .arg(self.kernel("kernel", image));
        command
    }
}

#[test]
fn what_is_piped_in_is_typed_at_the_guest() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut command = bed.command(&Payload::default().echo_until_q());
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = bed.world.host.spawn(command).unwrap();
    // ^A is a byte like any other where no terminal is.
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"to be\x01x or\nq")
        .unwrap();
    let mut said = String::new();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert_eq!(said, "to be\x01x or\nq");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// A command with a terminal of its own, which is handed back too.
fn on_a_terminal(bed: &Bed, mut command: Command) -> (Child, File, OwnedFd) {
    let pty = openpty(None, None).unwrap();
    let (stdin, stdout) = (
        pty.slave.try_clone().unwrap(),
        pty.slave.try_clone().unwrap(),
    );
    command.stdin(stdin).stdout(stdout).stderr(Stdio::null());
    let own = || {
        // SAFETY: two system calls with numbers, between fork and exec.
        match unsafe { (libc::setsid(), libc::ioctl(0, libc::TIOCSCTTY, 0)) } {
            (1.., 0) => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: `own` allocates nothing and takes no lock.
    unsafe { command.pre_exec(own) };
    let child = bed.world.host.spawn(command).unwrap();
    (child, File::from(pty.master), pty.slave)
}

fn is_raw(terminal: &OwnedFd) -> bool {
    let flags = tcgetattr(terminal.as_fd()).unwrap().local_flags;
    !flags.intersects(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG)
}

#[test]
fn a_terminal_is_raw_until_the_escape_and_then_as_it_was() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let command = bed.command(&Payload::default().say("here\n").echo_until_q());
    let (mut child, mut master, terminal) = on_a_terminal(&bed, command);
    assert!(!is_raw(&terminal));
    eventually("raw mode", || is_raw(&terminal));
    // ^C is the guest's.
    master.write_all(b"\x03!\x01\x01").unwrap();
    let mut said = Vec::new();
    eventually("an echo", || {
        let mut bytes = [0; 256];
        let length = master.read(&mut bytes).unwrap();
        said.extend_from_slice(&bytes[..length]);
        said.ends_with(b"\x03!\x01")
    });
    // What the guest prints begins its lines at the left.
    assert_eq!(said, b"here\r\n\x03!\x01");
    master.write_all(b"\x01x").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!is_raw(&terminal));
    bed.assert_nothing_is_left();
}

#[test]
fn a_terminal_is_put_back_after_a_crash_and_a_signal() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let command = bed.command(&Payload::default().say("here\n").crash());
    let (mut child, _master, terminal) = on_a_terminal(&bed, command);
    assert_eq!(child.wait().unwrap().code(), Some(121));
    assert!(!is_raw(&terminal));

    for (signal, status) in [(libc::SIGTERM, 143), (libc::SIGQUIT, 131)] {
        let command = bed.command(&Payload::default().say("here\n").spin());
        let (mut child, _master, terminal) = on_a_terminal(&bed, command);
        eventually("raw mode", || is_raw(&terminal));
        slipgate_testbed::signal(child.id(), signal);
        assert_eq!(child.wait().unwrap().code(), Some(status));
        assert!(!is_raw(&terminal));
    }
}
