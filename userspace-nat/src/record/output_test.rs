use std::{
    io::Cursor,
    sync::mpsc::{self, Receiver, Sender},
    time::Instant,
};

use super::*;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);

/// A disk that takes each write when it is let, and so many bytes of it.
struct Disk {
    lets: Receiver<io::Result<usize>>,
    took: Sender<Vec<u8>>,
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // One that is gone lets everything.
        let most = self.lets.recv().unwrap_or(Ok(usize::MAX))?;
        let takes = &bytes[..bytes.len().min(most)];
        let _ = self.took.send(takes.to_vec());
        Ok(takes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn disk() -> (Sender<io::Result<usize>>, Receiver<Vec<u8>>, File) {
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
    assert_eq!(output.give(b"two\n", 1), Some(2));
    assert!(!output.is_done(2));
    drop(lets);
    assert!(output.finish(LONG));
    assert_eq!(output.take_outcome().written, 1);
    drop(output);
    // Nothing of the first is there that would be a line.
    assert_eq!(taken.iter().flatten().collect::<Vec<_>>(), b"two\n");
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

/// A file that others see too, on a disk that is full as often as this says.
#[derive(Clone, Default)]
struct SharedLog {
    content: Arc<Mutex<Cursor<Vec<u8>>>>,
    refuses: Arc<Mutex<u32>>,
}

impl SharedLog {
    fn of(text: &str, refuses: u32) -> Self {
        Self {
            content: Arc::new(Mutex::new(Cursor::new(text.into()))),
            refuses: Arc::new(Mutex::new(refuses)),
        }
    }

    fn text(&self) -> String {
        String::from_utf8(self.content.lock().unwrap().get_ref().clone()).unwrap()
    }
}

impl Read for SharedLog {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.content.lock().unwrap().read(into)
    }
}

impl Seek for SharedLog {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.content.lock().unwrap().seek(to)
    }
}

impl Write for SharedLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut refuses = self.refuses.lock().unwrap();
        if *refuses > 0 {
            *refuses -= 1;
            return Err(io::ErrorKind::StorageFull.into());
        }
        let mut content = self.content.lock().unwrap();
        content.seek(SeekFrom::End(0))?;
        content.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn what_a_killed_writer_left_of_a_line_is_ended_before_the_next_line() {
    for (left, ended) in [
        ("", ""),
        ("{\"id\":1}\n", "{\"id\":1}\n"),
        ("{\"id\":1}\n{\"i", "{\"id\":1}\n{\"i\n"),
    ] {
        let log = SharedLog::of(left, 0);
        let mut writer = Background::start("a test's", Unwritten::Lost).unwrap();
        writer.continue_log(log.clone()).unwrap();
        assert_eq!(log.text(), ended, "at once");
        let mut output = Output::from(writer);
        output.give(b"two\n", 1).unwrap();
        assert!(output.finish(LONG));
        assert_eq!(log.text(), format!("{ended}two\n"));
    }
}

#[test]
fn a_torn_line_that_a_full_disk_lets_nobody_end_is_ended_with_the_next_line_that_is_written() {
    // The disk is full at the start only, and for the first line too.
    for refuses in [1, 2] {
        let log = SharedLog::of("{\"i", refuses);
        let mut writer = Background::start("a test's", Unwritten::Lost).unwrap();
        let error = writer.continue_log(log.clone()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        let mut output = Output::from(writer);
        for line in ["one\n", "two\n"] {
            output.give(line.as_bytes(), 1).unwrap();
            assert!(output.finish(LONG));
        }
        let written = if refuses == 1 { "one\ntwo\n" } else { "two\n" };
        assert_eq!(log.text(), format!("{{\"i\n{written}"));
        assert_eq!(output.take_outcome().lost, u64::from(refuses) - 1);
    }
}

#[test]
fn a_torn_line_is_ended_by_the_write_of_the_next_one() {
    let full = || Err(io::ErrorKind::StorageFull.into());
    // A part of a line, a whole line of a batch, and nothing.
    for (takes, parts) in [
        (2, &["on", "\nthree\n"][..]),
        (4, &["one\n", "three\n"]),
        (0, &["three\n"]),
    ] {
        let (lets, taken, file) = disk();
        let mut output = background(Unwritten::Lost, file);
        output.give(b"one\ntwo\n", 2).unwrap();
        if takes > 0 {
            lets.send(Ok(takes)).unwrap();
        }
        // The disk stays full for another line: what is torn stays so.
        lets.send(full()).unwrap();
        assert!(output.finish(LONG));
        output.give(b"lost\n", 1).unwrap();
        lets.send(full()).unwrap();
        assert!(output.finish(LONG));
        output.give(b"three\n", 1).unwrap();
        drop(lets);
        assert!(output.finish(LONG));
        drop(output);
        let taken: Vec<_> = taken.iter().collect();
        assert_eq!(
            taken,
            parts.iter().map(|it| it.as_bytes()).collect::<Vec<_>>()
        );
    }
}

#[test]
fn another_file_begins_with_no_empty_line_whatever_became_of_the_last_one() {
    for takes in [0, 2] {
        let (lets, _taken, file) = disk();
        let mut output = background(Unwritten::Lost, file);
        output.give(b"one\n", 1).unwrap();
        if takes > 0 {
            lets.send(Ok(takes)).unwrap();
        }
        lets.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
        assert!(output.finish(LONG));
        for (had, next) in [("", "two\n"), ("zero\n", "zero\nthree\n")] {
            let log = SharedLog::of(had, 0);
            output.set_log(log.clone());
            output.give(&next.as_bytes()[had.len()..], 1).unwrap();
            assert!(output.finish(LONG));
            assert_eq!(log.text(), next);
        }
    }
}

/// A reload opens the file by its name, moved away or not.
#[test]
fn a_torn_line_is_not_forgotten_when_the_same_file_is_given_again() {
    let log = SharedLog::of("", 0);
    let mut output = background(Unwritten::Lost, Box::new(log.clone()));
    output.give(b"one\n", 1).unwrap();
    assert!(output.finish(LONG));
    *log.refuses.lock().unwrap() = 1;
    output.give(b"two\n", 1).unwrap();
    assert!(output.finish(LONG));
    // What the failing write left of it.
    let mut content = log.content.lock().unwrap();
    content.get_mut().extend_from_slice(b"tw");
    drop(content);
    output.set_log(log.clone());
    output.give(b"three\n", 1).unwrap();
    assert!(output.finish(LONG));
    assert_eq!(log.text(), "one\ntw\nthree\n");
}
