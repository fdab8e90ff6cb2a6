//! A process that stays in the command's network namespace and makes sockets there for the engine.
//!
//! # Theory of operation
//! A socket belongs to the namespace of the process that makes it, and the engine may not change its own
//! namespace. So the command's process, before it becomes the command, leaves this one behind. It is asked by a
//! byte, 4 or 6, the family, and answers with [`NAMESPACE_SOCKETS`] messages of the same byte, each with a
//! TCP socket that is not connected (`userspace-nat/src/relay/namespace.rs`); a socket that it can't make is
//! missing from its message. It reads nothing else, has no other descriptor and no capability, and ends
//! when the engine does.
//!
//! The engine's sockets have ports of the command's network. So that a server of the command's may have
//! the same port, they are marked for it (`SO_REUSEADDR`); the server must be, too.
//!
//! It is no child of the command's, which may wait for all it has, nor of its session. It can't be traced by the
//! command, whose user it is: it is not dumpable, and was executed outside the command's user namespace.
//! The command may kill it, as any process of that user: then its forwards go by the TAP.
use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::{AsRawFd, OwnedFd, RawFd},
};

use anyhow::{Context as _, bail};
use nix::{
    errno::Errno,
    sys::{
        signal::SigSet,
        socket::{
            AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recvmsg, sendmsg,
            setsockopt, socket, socketpair, sockopt,
        },
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, chdir, fork, setsid},
};
use slipgate_model::NAMESPACE_SOCKETS;

use crate::privileges::{keep_capabilities, prctl};

/// Leaves the process behind in this process's namespaces. Returns the engine's end of the connection to
/// it. This process has one thread.
///
/// # Errors
/// The host refuses a process or a socket.
pub(super) fn leave_behind() -> anyhow::Result<OwnedFd> {
    let (ours, theirs) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )
    .context("connecting to the process that makes sockets")?;
    let failed = "starting the process that makes sockets in the command's namespace";
    // SAFETY: this process has one thread, so that the copy may do what it likes.
    match unsafe { fork() }.context(failed)? {
        ForkResult::Parent { child } => match waitpid(child, None).context(failed)? {
            WaitStatus::Exited(_, 0) => Ok(ours),
            ended => bail!("{failed}: {ended:?}"),
        },
        ForkResult::Child => {
            let code = match begin(&theirs) {
                Ok(()) => 0,
                Err(_) => 1,
            };
            // Nothing of the process that this is a copy of is to be undone here.
            // SAFETY: a number.
            unsafe { libc::_exit(code) }
        }
    }
}

/// In the copy: the process that makes sockets is a copy of this one in turn, so that its parent is none of
/// the command's.
fn begin(channel: &OwnedFd) -> anyhow::Result<()> {
    setsid()?;
    // SAFETY: as above.
    if let ForkResult::Child = unsafe { fork() }? {
        // An error is told nobody: the engine does without it.
        let _ = confine(channel).map(|()| serve(0));
        // SAFETY: as above.
        unsafe { libc::_exit(0) }
    }
    Ok(())
}

/// Gives up all but the connection, which is descriptor 0 from now on.
fn confine(channel: &OwnedFd) -> anyhow::Result<()> {
    chdir("/")?;
    // SAFETY: numbers only; nothing in this process uses what is closed.
    let is_done = unsafe {
        libc::dup2(channel.as_raw_fd(), 0) == 0
            && libc::syscall(libc::SYS_close_range, 1u32, u32::MAX, 0u32) == 0
    };
    if !is_done {
        return Err(Errno::last().into());
    }
    // No signal that ends a process is to wait, whatever the command's process has blocked.
    SigSet::empty().thread_set_mask()?;
    prctl("dumpable", libc::PR_SET_DUMPABLE, 0)?;
    prctl("no new privileges", libc::PR_SET_NO_NEW_PRIVS, 1)?;
    Ok(keep_capabilities(0)?)
}

/// Answers until the engine has ended.
fn serve(channel: RawFd) {
    let mut word = [0];
    loop {
        let mut parts = [IoSliceMut::new(&mut word)];
        match recvmsg::<()>(channel, &mut parts, None, MsgFlags::empty()) {
            Ok(received) if received.bytes > 0 => {}
            Err(Errno::EINTR) => continue,
            _ => return,
        }
        let family = match word {
            [4] => AddressFamily::Inet,
            [6] => AddressFamily::Inet6,
            _ => continue,
        };
        for _ in 0..NAMESPACE_SOCKETS {
            if answer(channel, &word, family).is_err() {
                return;
            }
        }
    }
}

/// Sends one socket. A message of its own is received with its socket, or without: of more the receiver
/// might get some that it is not told of.
fn answer(channel: RawFd, word: &[u8; 1], family: AddressFamily) -> nix::Result<()> {
    let made = unconnected(family).ok();
    let fds: Vec<_> = made.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let parts = [IoSlice::new(word)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    let send = |rights: &[ControlMessage<'_>]| {
        while let Err(error) = sendmsg::<()>(channel, &parts, rights, flags, None) {
            if error != Errno::EINTR {
                return Err(error);
            }
        }
        Ok(())
    };
    let sent = send(&rights[..fds.len()]);
    match sent {
        // The user's processes pass too many descriptors just now.
        Err(Errno::ETOOMANYREFS) => send(&[]),
        sent => sent,
    }
}

fn unconnected(family: AddressFamily) -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let made = socket(family, SockType::Stream, flags, None)?;
    setsockopt(&made, sockopt::TcpNoDelay, &true)?;
    setsockopt(&made, sockopt::ReuseAddr, &true)?;
    Ok(made)
}
