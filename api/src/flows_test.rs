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
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    // No test waits for a minute: the clock moves when nothing else does.
    let runtime = runtime.enable_time().start_paused(true).build();
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

/// A list without an end, and without pages.
struct Endless;

impl FlowList for Endless {
    fn write(&mut self, text: &mut Vec<u8>) -> Written {
        text.resize(PART_BYTES, b'f');
        Written::InPart
    }

    fn add(&mut self, _: Option<EngineInventory>) {}
}

#[test]
fn the_list_of_a_client_that_takes_nothing_breaks_off_and_its_place_is_free() {
    run(async {
        let places = Arc::new(Semaphore::new(1));
        let place = places.clone().try_acquire_owned().unwrap();
        let begun = begin(&gone(), Box::new(Endless), place).await.unwrap();
        let mut content = begun.into_body();
        // One that takes a part in time goes on.
        for _ in 0..3 {
            tokio::time::sleep(TAKEN_WITHIN / 2).await;
            assert!(matches!(next(&mut content).await, Some(Ok(_))));
            assert_eq!(places.available_permits(), 0);
        }
        tokio::time::sleep(2 * TAKEN_WITHIN).await;
        assert_eq!(places.available_permits(), 1);
        let mut rest = next(&mut content).await;
        while let Some(Ok(_)) = rest {
            rest = next(&mut content).await;
        }
        assert_eq!(rest, Some(Err(BrokeOff)));
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
