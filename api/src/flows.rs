//! The list of live flows, as the body of a response.
//!
//! It is written in parts: a part is made when the client has taken the one before, and between two of
//! them other clients are served. What only the engines have comes in pages, each asked for when the one
//! before is written. So neither a million flows nor a client that reads slowly takes memory. A client that
//! takes no part for [`TAKEN_WITHIN`] loses its list, since there is place for some lists only.
use std::time::Duration;

use hyper::StatusCode;
use slipgate_ipc::engine::EngineInventory;
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc},
    task::yield_now,
    time::timeout,
};

use crate::{
    broker::Broker,
    problem::Problem,
    response::{Content, JSON, Part, Response, with},
};

/// Text that is sent at once, bytes; a part is longer by one flow at most.
pub const PART_BYTES: usize = 64 << 10;
/// Largest number of pages that are read for a list: those of more flows than there can be.
const MOST_PAGES: usize = 1 << 16;
/// Time within which a client takes a part.
const TAKEN_WITHIN: Duration = Duration::from_secs(60);

/// The live flows as the text of a JSON array, written part by part.
pub trait FlowList {
    /// Writes on, until the text has [`PART_BYTES`]; and for a bounded time, so that the text may be as
    /// long as it was.
    fn write(&mut self, text: &mut Vec<u8>) -> Written;

    /// Takes the page that was wanted; `None`: there is no further one.
    fn add(&mut self, page: Option<EngineInventory>);
}

/// How far a list is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Written {
    /// There is more to write.
    InPart,
    /// As far as it can be without the next page of what only the engines have.
    ToPage,
    /// To its end.
    Whole,
}

/// Begins a list. `place`: is free again when the list ends. One that fits into a part comes whole, with
/// its length.
///
/// # Errors
/// The broker can't be asked for what the engines know of the first part.
pub(crate) async fn begin(
    broker: &Broker,
    list: Box<dyn FlowList>,
    place: OwnedSemaphorePermit,
) -> Result<Response, Problem> {
    let mut writing = Writing::of(broker.clone(), list);
    let content = match writing.part().await? {
        Part::Last(text) => Content::Whole(Some(text)),
        first @ Part::More(_) => {
            let (to, parts) = mpsc::channel(1);
            tokio::task::spawn_local(async move {
                let gone = to.clone();
                tokio::select! {
                    sent = writing.send(first, to) => if let Err(e) = sent {
                        tracing::warn!("a list of flows for a client of the API: {}", e.detail);
                    },
                    () = gone.closed() => {}
                }
                drop(place);
            });
            Content::Document(parts)
        }
    };
    Ok(with(StatusCode::OK, JSON, content))
}

/// A list that is being written.
struct Writing {
    pages: Pages,
    list: Box<dyn FlowList>,
    text: Vec<u8>,
}

impl Writing {
    fn of(broker: Broker, list: Box<dyn FlowList>) -> Self {
        Self {
            pages: Pages::of(broker),
            list,
            text: Vec::new(),
        }
    }

    /// Makes the next part.
    ///
    /// # Errors
    /// The broker can't be asked for a page.
    async fn part(&mut self) -> Result<Part, Problem> {
        loop {
            let written = self.list.write(&mut self.text);
            if written == Written::ToPage {
                self.list.add(self.pages.next().await?);
            }
            let is_full = self.text.len() >= PART_BYTES;
            if written != Written::Whole && !is_full {
                // For the other clients.
                yield_now().await;
                continue;
            }
            let text = std::mem::take(&mut self.text).into();
            return Ok(match written {
                Written::Whole => Part::Last(text),
                Written::InPart | Written::ToPage => Part::More(text),
            });
        }
    }

    /// Sends this part, and makes and sends the others. An error, or a client that takes nothing more, ends
    /// the list before its last part: the connection is cut.
    async fn send(mut self, first: Part, to: mpsc::Sender<Part>) -> Result<(), Problem> {
        let mut part = first;
        loop {
            let is_last = matches!(part, Part::Last(_));
            let taken = timeout(TAKEN_WITHIN, to.send(part)).await;
            if !matches!(taken, Ok(Ok(()))) || is_last {
                return Ok(());
            }
            part = self.part().await?;
        }
    }
}

/// The pages of what only the engines have, one after another.
struct Pages {
    broker: Broker,
    /// Where the next one begins; `None` after the last.
    from: Option<u64>,
    left: usize,
}

impl Pages {
    fn of(broker: Broker) -> Self {
        Self {
            broker,
            from: Some(0),
            left: MOST_PAGES,
        }
    }

    /// Reads the next page; `None` after the last, and where an engine does not answer.
    ///
    /// # Errors
    /// The broker can't be asked.
    async fn next(&mut self) -> Result<Option<EngineInventory>, Problem> {
        let Some(from) = self.from.take().filter(|_| self.left > 0) else {
            return Ok(None);
        };
        self.left -= 1;
        let page = self.broker.page(from).await?;
        let next = page.as_ref().and_then(|page| page.next);
        self.from = next.filter(|next| *next > from);
        Ok(page)
    }
}

#[cfg(test)]
#[path = "flows_test.rs"]
mod tests;
