use std::{os::unix::net::UnixStream, thread};

use super::*;

#[test]
fn a_changed_answer_is_noticed() {
    let (mut ours, mut other) = UnixStream::pair().unwrap();
    let echo = thread::spawn(move || {
        let mut data = [0; MESSAGE_BYTES];
        for number in 0..3 {
            other.read_exact(&mut data).unwrap();
            if number == 2 {
                data[63] ^= 1;
            }
            other.write_all(&data).unwrap();
        }
    });
    assert_eq!(exchanges(&mut ours, 2).unwrap().len(), 2);
    let why = exchanges(&mut ours, 1).unwrap_err().to_string();
    assert!(why.contains("came back changed"), "{why}");
    echo.join().unwrap();
}

#[test]
fn a_receipt_of_fewer_bytes_is_an_error() {
    for (taken, passes) in [(100_000, true), (99_999, false)] {
        let (mut ours, mut other) = UnixStream::pair().unwrap();
        let sink = thread::spawn(move || {
            let mut data = vec![0; 100_000];
            other.read_exact(&mut data).unwrap();
            other.write_all(&u64::to_le_bytes(taken)).unwrap();
        });
        assert_eq!(to_guest(&mut ours, 100_000).is_ok(), passes);
        sink.join().unwrap();
    }
}

#[test]
fn a_stream_that_ends_early_or_goes_on_is_an_error() {
    for (sent, why) in [(10, ""), (9, "1 bytes too early"), (12, "2 bytes too many")] {
        let (mut ours, mut other) = UnixStream::pair().unwrap();
        other.write_all(&vec![0; sent]).unwrap();
        drop(other);
        match from_guest(&mut ours, 10) {
            Ok(()) => assert_eq!(why, ""),
            Err(error) => assert!(error.to_string().contains(why) && sent != 10, "{error}"),
        }
    }
}
