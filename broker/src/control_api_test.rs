use super::*;

#[test]
fn who_asks_for_activity_leaves_room_for_other_requests() {
    let mut pending = Pending::default();
    let is_full = |pending: &Pending, request: &EngineRequest| {
        let (waiting, most) = pending.room_for(request);
        waiting >= most
    };
    let add = |pending: &mut Pending, is_reader| {
        let asked = Asked {
            worker: 0,
            client: None,
            is_reader,
            is_inventory: false,
        };
        let id = pending.engine.len() as u64;
        pending.engine.insert(id, asked);
    };
    let (activity, resume) = (EngineRequest::Activity { from: 0 }, EngineRequest::Resume);
    // Others do not take the readers' room.
    for _ in 0..MOST_READERS {
        add(&mut pending, false);
    }
    assert!(!is_full(&pending, &activity));
    for _ in 0..MOST_READERS {
        add(&mut pending, true);
    }
    assert!(is_full(&pending, &activity));
    while pending.engine.len() < MOST_WAITING {
        assert!(!is_full(&pending, &resume));
        add(&mut pending, false);
    }
    assert!(is_full(&pending, &resume));
}

#[test]
fn behind_an_engine_that_is_gone_come_the_pages_of_the_others() {
    let next = |worker| match without_engine(true, worker, 3, BUSY) {
        ClientAnswer::Engine {
            reply: EngineReply::Inventory(page),
        } => page.next.and_then(|next| page_of(next, 3)),
        other => panic!("{other:?}"),
    };
    assert_eq!((next(0), next(1)), (Some((1, 0)), Some((2, 0))));
    // The last one's is the end, and is said.
    assert_eq!(without_engine(true, 2, 3, BUSY), ClientAnswer::busy(BUSY));
    assert_eq!(without_engine(false, 0, 3, BUSY), ClientAnswer::busy(BUSY));
}
