//! Captures: packets of a flow or a VM, as the body of a response.
//!
//! The engine writes them to a socket that comes with the broker's answer. When the client goes the
//! socket is closed, which ends the capture; a client that reads slowly loses packets of it, and
//! their number comes at its end.
use std::{io, os::fd::OwnedFd};

use hyper::{StatusCode, body::Bytes};
use slipgate_ipc::{api::ApiRequest, client::ClientAnswer};
use tokio::sync::mpsc;

use crate::{
    broker::Broker,
    problem::{Problem, answer, other_answer},
    response::{Content, PCAPNG, Response, with},
    stream::Stream,
};

/// Bytes that are read at once.
const READ_AT_ONCE: usize = 64 << 10;

/// Begins a capture. `name`: the VM or flow in question.
///
/// # Errors
/// There is no such VM or flow, or there are too many captures.
pub(crate) async fn begin(
    broker: &Broker,
    request: ApiRequest,
    name: &str,
) -> Result<Response, Problem> {
    let (answered, stream) = broker.ask_for_stream(request).await?;
    match (answer(answered, name)?, stream) {
        (ClientAnswer::Done, Some(stream)) => {
            let (sender, receiver) = mpsc::channel(1);
            tokio::task::spawn_local(async move {
                if let Err(e) = pass_on(stream, sender).await {
                    tracing::debug!("a capture for a client of the API: {e}");
                }
            });
            Ok(with(StatusCode::OK, PCAPNG, Content::Parts(receiver)))
        }
        _ => Err(other_answer()),
    }
}

async fn pass_on(from: OwnedFd, to: mpsc::Sender<Bytes>) -> io::Result<()> {
    let from = Stream::new(from)?;
    let mut bytes = vec![0; READ_AT_ONCE];
    loop {
        let n = tokio::select! {
            n = from.recv(&mut bytes) => n?,
            () = to.closed() => return Ok(()),
        };
        if n == 0 || to.send(Bytes::copy_from_slice(&bytes[..n])).await.is_err() {
            return Ok(());
        }
    }
}
