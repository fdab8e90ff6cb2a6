use super::*;

/// What a guest gets of these keys, read in these pieces.
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
    assert!(!way.write());
}
