use std::io::Read as _;

use super::*;

#[test]
fn a_pipe_that_nobody_reads_is_not_waited_for_and_what_is_lost_is_counted() {
    const LINE: &[u8] = b"a message of some length, as they are\n";
    let (mut reader, to) = std::io::pipe().unwrap();
    let dropped = AtomicU64::new(0);
    let mut log = Unheard {
        to,
        dropped: &dropped,
    };
    // Far more than a pipe holds. That it comes to an end is the test.
    for _ in 0..10_000 {
        assert_eq!(log.write(LINE).unwrap(), LINE.len());
    }
    let lost = dropped.load(Relaxed);
    assert!((1..10_000).contains(&lost), "{lost}");
    // Somebody reads some; that it lost some is the first that he is told.
    let mut held = vec![0; (10_000 - lost as usize) * LINE.len()];
    reader.read_exact(&mut held).unwrap();
    assert!(held.chunks(LINE.len()).all(|line| line == LINE));
    log.write_all(b"the next\n").unwrap();
    drop(log);
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    let told = format!("{lost} messages are lost: nobody read them\nthe next\n");
    assert_eq!((rest, dropped.load(Relaxed)), (told, 0));
}

#[test]
fn a_reader_that_is_gone_is_no_error() {
    let (reader, to) = std::io::pipe().unwrap();
    drop(reader);
    let dropped = AtomicU64::new(0);
    let mut log = Unheard {
        to,
        dropped: &dropped,
    };
    log.write_all(b"to nobody\n").unwrap();
    log.flush().unwrap();
}

#[test]
fn levels_and_filters_by_target_are_read() {
    for good in ["error", "INFO", "trace", "slipgate=debug,info", "off"] {
        assert!(good.parse::<Targets>().is_ok(), "{good}");
    }
    assert!("slipgate=loud".parse::<Targets>().is_err());
}
