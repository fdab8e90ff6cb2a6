use std::{future::poll_fn, pin::Pin, rc::Rc, sync::Arc};

use hyper::body::{Body as _, Bytes};
use slipgate_ipc::channel::Channel;
use tokio::{sync::Semaphore, task::LocalSet};

use super::*;
use crate::{events::Events, response::BrokeOff};

/// A list that wants pages, and has a flow for each.
struct Paged;

impl FlowList for Paged {
    fn write(&mut self, text: &mut Vec<u8>) -> Written {
        text.extend_from_slice(b"a flow ");
        Written::ToPage
    }

    fn add(&mut self, _: Option<EngineInventory>) {}
}

/// A broker that is gone.
fn gone() -> Broker {
    let (ours, _theirs) = Channel::pair().unwrap();
    Broker::new(ours, Rc::new(Events::default())).0
}

async fn next(content: &mut Content) -> Option<Result<Bytes, BrokeOff>> {
    let frame = poll_fn(|cx| Pin::new(&mut *content).poll_frame(cx)).await;
    frame.map(|frame| frame.map(|frame| frame.into_data().unwrap()))
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    LocalSet::new().block_on(&runtime.unwrap(), test);
}

#[test]
fn a_list_without_its_first_page_is_a_problem() {
    run(async {
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let begun = begin(&gone(), Box::new(Paged), place).await;
        assert_eq!(begun.unwrap_err().status, 503);
    });
}

#[test]
fn a_list_that_can_not_go_on_breaks_off() {
    run(async {
        let (to, parts) = mpsc::channel(1);
        let mut content = Content::Document(parts);
        let writing = Writing::of(gone(), Box::new(Paged));
        let sent = writing.send(Part::More("a part".into()), to).await;
        assert_eq!(sent.unwrap_err().status, 503);
        assert_eq!(next(&mut content).await, Some(Ok("a part".into())));
        assert_eq!(next(&mut content).await, Some(Err(BrokeOff)));
    });
}

#[test]
fn a_document_is_whole_with_its_last_part_alone() {
    run(async {
        for (last, end) in [(true, None), (false, Some(Err(BrokeOff)))] {
            let (to, parts) = mpsc::channel(2);
            let mut content = Content::Document(parts);
            to.send(Part::More("[1,".into())).await.unwrap();
            let part = if last { Part::Last } else { Part::More };
            to.send(part("2]".into())).await.unwrap();
            drop(to);
            for text in ["[1,", "2]"] {
                assert_eq!(next(&mut content).await, Some(Ok(text.into())));
            }
            assert_eq!(content.is_end_stream(), last);
            assert_eq!(next(&mut content).await, end);
        }
    });
}
