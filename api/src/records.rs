//! Records of flows and DNS questions, which the engine sends over a socket of its own.
//!
//! The engine makes only records of the kinds that it was asked for, waits for nobody, and counts
//! what finds no room. Its lines are checked before they are passed on: it reads what hostile
//! guests send.
use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    rc::Rc,
};

use nix::sys::socket::{MsgFlags, recv, send};
use tokio::{io::unix::AsyncFd, sync::watch, task::yield_now};

use slipgate_ipc::engine::FlowLogEvents;

use crate::events::Events;

/// Bytes that are read at once; other clients have their turn after each.
const READ_AT_ONCE: usize = 64 << 10;
/// Longest line, bytes. The engine's longest are DNS answers with their names.
const LONGEST_LINE: usize = 64 << 10;

/// Passes records on to the readers of events until the engine's end of the socket is closed.
pub(crate) async fn pass_on(from: OwnedFd, events: Rc<Events>) {
    let wanted = events.wanted();
    if let Err(e) = try_pass_on(from, &events, wanted).await {
        tracing::debug!("records of the engine: {e}");
    }
}

async fn try_pass_on(
    from: OwnedFd,
    events: &Events,
    mut wanted: watch::Receiver<FlowLogEvents>,
) -> io::Result<()> {
    #[expect(
        deprecated,
        reason = "the descriptor is owned by what is registered, as long as that lives"
    )]
    let from = AsyncFd::new(from)?;
    let mut bytes = vec![0; READ_AT_ONCE];
    let mut torn = Vec::new();
    wanted.mark_changed();
    loop {
        let mut ready = tokio::select! {
            changed = wanted.changed() => {
                changed.map_err(io::Error::other)?;
                let bits = wanted.borrow_and_update().bits();
                ask(&from, bits).await?;
                continue;
            }
            ready = from.readable() => ready?,
        };
        let flags = MsgFlags::MSG_DONTWAIT;
        let n = match recv(from.get_ref().as_raw_fd(), &mut bytes, flags) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(nix::Error::EAGAIN) => {
                ready.clear_ready();
                continue;
            }
            Err(nix::Error::EINTR) => continue,
            Err(e) => return Err(e.into()),
        };
        let mut rest = &bytes[..n];
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            torn.extend_from_slice(&rest[..end]);
            rest = &rest[end + 1..];
            let line = str::from_utf8(&torn).map_err(io::Error::other)?;
            events.add_record(line).map_err(io::Error::other)?;
            torn.clear();
        }
        torn.extend_from_slice(rest);
        if torn.len() > LONGEST_LINE {
            return Err(io::Error::other("a line without an end"));
        }
        yield_now().await;
    }
}

/// Tells the engine which records are wanted from now on.
async fn ask(to: &AsyncFd<OwnedFd>, bits: u8) -> io::Result<()> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    loop {
        let mut ready = to.writable().await?;
        match send(to.get_ref().as_raw_fd(), &[bits], flags) {
            Err(nix::Error::EAGAIN) => ready.clear_ready(),
            Err(nix::Error::EINTR) => {}
            done => return Ok(done.map(drop)?),
        }
    }
}
