use std::{
    sync::mpsc::{self, Receiver, Sender},
    time::Instant,
};

use super::*;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);

/// A disk that takes each write when it is let.
struct Disk {
    lets: Receiver<io::Result<()>>,
    took: Sender<Vec<u8>>,
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // One that is gone lets everything.
        self.lets.recv().unwrap_or(Ok(()))?;
        let _ = self.took.send(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn disk() -> (Sender<io::Result<()>>, Receiver<Vec<u8>>, File) {
    let (lets, may) = mpsc::channel();
    let (took, taken) = mpsc::channel();
    (lets, taken, Box::new(Disk { lets: may, took }))
}

fn background(unwritten: Unwritten, file: File) -> Output {
    let mut background = Background::start("a test's", unwritten).unwrap();
    background.set_file(file);
    background.into()
}

#[test]
fn who_gives_never_waits_and_what_finds_no_room_is_refused() {
    let (lets, taken, file) = disk();
    let mut output = background(Unwritten::Lost, file);
    let line = vec![b'x'; 1_000];
    let begun = Instant::now();
    let given = (0..10_000).filter(|_| output.give(&line, 1).is_some());
    // What waits, and what the thread has taken meanwhile.
    let given = given.count();
    assert!((1_000..2_200).contains(&given), "{given}");
    assert!(begun.elapsed() < LONG);
    assert!(!output.is_done(1) && !output.is_done(given as u64));
    assert!(!output.finish(Duration::from_millis(1)));
    drop(lets);
    assert!(output.finish(LONG));
    assert!(output.is_done(1) && output.is_done(given as u64));
    let outcome = output.take_outcome();
    assert_eq!((outcome.written, outcome.lost), (given as u64, 0));
    drop(output);
    assert_eq!(taken.iter().flatten().count(), given * line.len());
}

#[test]
fn batches_are_done_in_order_and_lost_ones_are_counted() {
    let (lets, taken, file) = disk();
    let mut output = background(Unwritten::Lost, file);
    assert_eq!(output.give(b"one\n", 1), Some(1));
    lets.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
    assert!(output.finish(LONG));
    let outcome = output.take_outcome();
    assert_eq!((outcome.written, outcome.lost), (0, 1));
    assert_eq!(outcome.error.unwrap().kind(), io::ErrorKind::StorageFull);
    // The next line begins on one of its own.
    assert_eq!(output.give(b"two\n", 1), Some(2));
    assert!(!output.is_done(2));
    drop(lets);
    assert!(output.finish(LONG));
    assert_eq!(output.take_outcome().written, 1);
    drop(output);
    assert_eq!(taken.iter().flatten().collect::<Vec<_>>(), b"\ntwo\n");
}

#[test]
fn what_was_given_before_another_file_goes_to_the_one_before() {
    let (lets, taken, file) = disk();
    let mut output = background(Unwritten::Lost, file);
    output.give(b"old\n", 1).unwrap();
    let (new_lets, new_taken, new) = disk();
    output.set_file(new);
    output.give(b"new\n", 1).unwrap();
    drop((lets, new_lets));
    assert!(output.finish(LONG));
    drop(output);
    assert_eq!(taken.iter().flatten().collect::<Vec<_>>(), b"old\n");
    assert_eq!(new_taken.iter().flatten().collect::<Vec<_>>(), b"new\n");
}

#[test]
fn a_stream_is_tried_again_and_has_no_hole() {
    let (lets, taken, file) = disk();
    let mut output = background(Unwritten::TriedAgain, file);
    assert_eq!(output.take_some(b"abc").unwrap(), 3);
    lets.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
    assert_eq!(output.take_some(b"def").unwrap(), 3);
    drop(lets);
    assert!(output.finish(LONG));
    drop(output);
    assert_eq!(taken.iter().flatten().collect::<Vec<_>>(), b"abcdef");
}

#[test]
fn a_stream_whose_disk_takes_nothing_is_not_waited_for() {
    let (lets, _taken, file) = disk();
    let mut output = background(Unwritten::TriedAgain, file);
    let bytes = vec![0; 3 * MOST_QUEUED];
    let mut taken = 0;
    let full = loop {
        match output.take_some(&bytes[taken % MOST_QUEUED..]) {
            Ok(some) => taken += some,
            Err(error) => break error,
        }
        // Once for what waits, and once for what the thread has taken.
        assert!(taken <= 3 * MOST_QUEUED);
    };
    assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
    drop(lets);
    assert!(output.finish(LONG));
}
