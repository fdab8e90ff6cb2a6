use std::{
    sync::{Arc, mpsc},
    thread,
};

use super::*;

const WAIT: Duration = Duration::from_secs(20);

/// A vCPU that comes when it is called. Sends each order.
fn attend(meeting: &Arc<Meeting>, index: usize) -> (thread::JoinHandle<()>, mpsc::Receiver<Order>) {
    let (orders, received) = mpsc::channel();
    let meeting = meeting.clone();
    let thread = thread::spawn(move || {
        meeting.attend(index, |order| {
            orders.send(order).unwrap();
            (order != Order::Leave).then_some(Err(SnapshotError::NotAState))
        });
    });
    (thread, received)
}

#[test]
fn all_come_save_once_and_leave() {
    let meeting = Arc::new(Meeting::of(2));
    assert!(!meeting.is_called());
    meeting.call();
    assert!(meeting.is_called());
    assert_eq!(meeting.is_complete(Duration::ZERO), Some(false));
    let (first, said) = attend(&meeting, 0);
    assert_eq!(meeting.is_complete(Duration::from_millis(5)), Some(false));
    let (second, _said_to_it) = attend(&meeting, 1);
    assert_eq!(meeting.is_complete(WAIT), Some(true));
    for _ in 0..2 {
        let saved = meeting.save().unwrap();
        assert!(saved.len() == 2 && saved.iter().all(Result::is_err));
        assert_eq!(said.recv_timeout(WAIT), Ok(Order::Save));
    }
    assert_eq!(meeting.reset().unwrap().len(), 2);
    assert_eq!(said.recv_timeout(WAIT), Ok(Order::Reset));
    assert!(!first.is_finished(), "saving is not leaving");
    meeting.dismiss();
    first.join().unwrap();
    second.join().unwrap();
    assert_eq!(said.recv_timeout(WAIT), Ok(Order::Leave));
    assert!(said.try_recv().is_err());
}

#[test]
fn a_call_and_an_end_are_waited_for() {
    for end in [false, true] {
        let meeting = Arc::new(Meeting::of(1));
        let waiting = thread::spawn({
            let meeting = meeting.clone();
            move || meeting.await_call()
        });
        thread::sleep(Duration::from_millis(5));
        assert!(!waiting.is_finished());
        match end {
            true => meeting.end(),
            false => meeting.call(),
        }
        waiting.join().unwrap();
    }
}

#[test]
fn a_stop_ends_all_waiting() {
    let meeting = Arc::new(Meeting::of(2));
    meeting.call();
    let (thread, _said) = attend(&meeting, 1);
    let ended = thread::spawn({
        let meeting = meeting.clone();
        move || meeting.is_complete(WAIT)
    });
    thread::sleep(Duration::from_millis(5));
    meeting.end();
    thread.join().unwrap();
    assert_eq!(ended.join().unwrap(), None);
    assert!(meeting.save().is_none());
}
