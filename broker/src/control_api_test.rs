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
