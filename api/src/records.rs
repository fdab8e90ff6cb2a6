//! Records of flows and DNS questions, which the engine sends over a socket of its own.
//!
//! The engine makes only records of the kinds that it was asked for, waits for nobody, and counts
//! what finds no room. Its lines are checked before they are passed on: it reads what hostile
//! guests send.
use std::{io, os::fd::OwnedFd, rc::Rc};

use slipgate_ipc::engine::FlowLogEvents;
use tokio::{sync::watch, task::yield_now};

use crate::{events::Events, stream::Stream};

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
    let from = Stream::new(from)?;
    let mut bytes = vec![0; READ_AT_ONCE];
    let mut torn = Vec::new();
    wanted.mark_changed();
    loop {
        let n = tokio::select! {
            changed = wanted.changed() => {
                changed.map_err(io::Error::other)?;
                let bits = wanted.borrow_and_update().bits();
                from.send(&[bits]).await?;
                continue;
            }
            n = from.recv(&mut bytes) => n?,
        };
        if n == 0 {
            return Ok(());
        }
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
