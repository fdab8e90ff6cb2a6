//! A minimal relay without a copy in user space: two threads per connection, each of which splices from
//! one socket to the other by a pipe. It connects in the guest's namespace.

use std::{
    env,
    fs::File,
    io,
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    os::fd::{AsFd, AsRawFd as _},
    process::Command,
    thread,
};

use anyhow::{Context as _, Result};
use nix::{
    fcntl::{SpliceFFlags, splice},
    sched::{CloneFlags, setns},
    unistd::pipe,
};
use slipgate_testbed::NetNs;

use super::forward::{GUEST_PORT, PORT};

/// Argument that starts this program as the loop.
const ROLE: &str = "splice-loop";
/// Capacity of a pipe, bytes.
const PIPE_BYTES: i32 = 1 << 20;

/// Returns the command that relays from the host's port to the guest's.
pub(super) fn command(guest: &NetNs) -> Result<Command> {
    let mut command = Command::new(env::current_exe().context("find this program")?);
    command.arg(ROLE).arg(guest.path());
    Ok(command)
}

/// Relays if this program was started as the loop; `None` otherwise.
pub(crate) fn as_splice_loop() -> Option<Result<()>> {
    let mut args = crate::role_arguments(ROLE)?;
    Some((|| {
        let path = args.next().context("no namespace to connect in")?;
        let guest = File::open(&path).with_context(|| format!("open {path}"))?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)).context("listen")?;
        // The listener stays in the namespace it was made in.
        setns(guest, CloneFlags::CLONE_NEWNET).context("enter the guest's namespace")?;
        loop {
            let (client, _) = listener.accept().context("accept")?;
            thread::spawn(move || relay(&client));
        }
    })())
}

fn relay(client: &TcpStream) -> io::Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, GUEST_PORT))?;
    for socket in [client, &server] {
        socket.set_nodelay(true)?;
    }
    thread::scope(|scope| {
        scope.spawn(|| carry(client, &server));
        carry(&server, client);
    });
    Ok(())
}

/// Splices until one of the two sockets is closed or fails.
fn carry(from: &TcpStream, to: &TcpStream) {
    let _ = carry_all(from.as_fd(), to.as_fd());
    let _ = to.shutdown(Shutdown::Write);
}

fn carry_all(from: impl AsFd, to: impl AsFd) -> nix::Result<()> {
    let (out, into) = pipe()?;
    // SAFETY: numbers only. A smaller pipe serves as well.
    unsafe { nix::libc::fcntl(into.as_raw_fd(), nix::libc::F_SETPIPE_SZ, PIPE_BYTES) };
    let most = PIPE_BYTES as usize;
    let flags = SpliceFFlags::SPLICE_F_MOVE;
    loop {
        let mut left = splice(&from, None, &into, None, most, flags)?;
        if left == 0 {
            return Ok(());
        }
        while left > 0 {
            left -= splice(&out, None, &to, None, left, flags)?;
        }
    }
}
