use nix::poll::{PollFd, PollTimeout};

use super::*;

/// Returns the input that the guest gets from the keys, read in these pieces, and the last result.
fn typed(pieces: &[&[u8]]) -> (Vec<u8>, Typed) {
    let (mut escape, mut text) = (Escape::default(), Vec::new());
    for piece in pieces {
        if escape.read(piece, &mut text) == Typed::Quit {
            return (text, Typed::Quit);
        }
    }
    (text, Typed::Text)
}

#[test]
fn the_escape_quits_in_one_piece_or_two() {
    assert_eq!(typed(&[b"ls\r\x01x"]), (b"ls\r".to_vec(), Typed::Quit));
    assert_eq!(typed(&[b"\x01", b"X"]), (vec![], Typed::Quit));
}

#[test]
fn all_other_keys_are_the_guests() {
    assert_eq!(typed(&[b"\x03x\x1b[A"]).0, b"\x03x\x1b[A");
    assert_eq!(typed(&[b"\x01\x01x"]), (b"\x01x".to_vec(), Typed::Text));
    assert_eq!(typed(&[b"\x01", b"e"]).0, b"\x01e");
}

#[test]
fn a_guest_that_does_not_listen_reads_an_end() {
    let (console, guest) = Console::open(false).unwrap();
    assert!(console.wants().is_none());
    let mut byte = [0];
    assert_eq!(nix::unistd::read(&guest, &mut byte), Ok(0));
}

#[test]
fn what_the_guest_has_not_read_waits_and_then_nobody_reads() {
    let (mut console, guest) = Console::open(true).unwrap();
    let Some(way) = &mut console.way else {
        panic!("the test's stdin is a terminal in the background")
    };
    way.waiting = vec![b'x'; 1 << 20];
    assert!(way.write());
    assert!(!way.waiting.is_empty(), "a pipe holds 64 KiB");
    assert!(way.write(), "full is no error");
    drop(guest);
    wait_for_the_last_reader(&console);
    assert_eq!(console.turn(), Typed::Text);
    assert!(console.wants().is_none(), "nobody is left to write to");
}

/// Waits until no process has the guest's end: children that other tests start have a copy of it
/// between their `fork` and their `exec`.
fn wait_for_the_last_reader(console: &Console) {
    let (to, events) = console.wants().expect("input waits");
    let mut to = [PollFd::new(to, events)];
    assert_eq!(
        nix::poll::poll(&mut to, PollTimeout::from(10_000_u16)),
        Ok(1)
    );
    let seen = to[0].revents().expect("known events");
    assert!(seen.contains(PollFlags::POLLERR), "{seen:?}");
}
