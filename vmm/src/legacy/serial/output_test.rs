use std::{fs::File, io::Read, sync::atomic::Ordering::Relaxed};

use super::*;

/// More bytes than a pipe and the buffer hold together.
const TOO_MUCH: usize = (64 << 10) + BUFFER_BYTES + 5_000;

fn start(patience: Duration) -> (Arc<Output>, Writer, File) {
    start_limited(patience, None)
}

fn start_limited(patience: Duration, limit: Option<u64>) -> (Arc<Output>, Writer, File) {
    let (reader, writer) = io::pipe().unwrap();
    let output = Arc::new(Output::new(Arc::default(), patience));
    kick::install().unwrap();
    let setup: ThreadSetup = ThreadSetup::new(|_| Ok(()));
    let writer = Writer::start(output.clone(), writer.into(), limit, &setup).unwrap();
    (output, writer, OwnedFd::from(reader).into())
}

fn lost(output: &Output) -> u64 {
    output.counters.output_lost_bytes.load(Relaxed)
}

/// Prints 300,000 bytes to a reader that takes all. Returns them, what it read, and the lost bytes.
fn printed(limit: Option<u64>) -> (Vec<u8>, Vec<u8>, u64) {
    let (output, writer, mut reader) = start_limited(PATIENCE, limit);
    let sent: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    let reading = std::thread::spawn(move || {
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        all
    });
    Feed(output.clone()).write_all(&sent).unwrap();
    writer.close();
    (sent, reading.join().unwrap(), lost(&output))
}

#[test]
fn everything_arrives_in_order_before_the_end() {
    let (sent, read, lost) = printed(None);
    assert!(read == sent);
    assert_eq!(lost, 0);
}

#[test]
fn what_is_printed_beyond_the_limit_is_lost_and_counted_and_delays_nobody() {
    let (sent, read, lost) = printed(Some(100_000));
    assert!(read == sent[..100_000]);
    assert_eq!(lost, 200_000);
}

#[test]
fn a_prompt_without_an_end_of_line_is_shown() {
    let (output, writer, mut reader) = start(PATIENCE);
    Feed(output.clone()).write_all(b"login: ").unwrap();
    let mut shown = [0; 7];
    reader.read_exact(&mut shown).unwrap();
    assert_eq!(&shown, b"login: ");
    writer.close();
}

#[test]
fn a_reader_that_sleeps_delays_the_guest_once_and_loses_counted_bytes() {
    let patience = Duration::from_millis(100);
    let (output, writer, mut reader) = start(patience);
    let before = Instant::now();
    let refused = (0..TOO_MUCH)
        .filter(|_| Feed(output.clone()).write_all(b"x").is_err())
        .count();
    assert!(refused > 0);
    let waited = before.elapsed();
    assert!(waited >= patience && waited < 20 * patience, "{waited:?}");
    assert_eq!(lost(&output), refused as u64);

    // The reader resumes and gets the buffered bytes; then no byte is lost any more.
    let mut some = vec![0; 100_000];
    reader.read_exact(&mut some).unwrap();
    while output.lock().stuck {
        std::thread::yield_now();
    }
    Feed(output.clone()).write_all(b"y").unwrap();

    // The reader stops again: the machine still ends, and the lost bytes are counted.
    let before = Instant::now();
    writer.close();
    assert!(before.elapsed() < 20 * patience);
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).unwrap();
    assert_eq!(
        lost(&output) as usize,
        TOO_MUCH + 1 - some.len() - rest.len()
    );
}

#[test]
fn a_reader_that_went_away_stops_nothing() {
    let (output, writer, reader) = start(PATIENCE);
    drop(reader);
    Feed(output.clone()).write_all(b"nobody listens\n").unwrap();
    writer.close();
    assert_eq!(lost(&output), 15);
}
