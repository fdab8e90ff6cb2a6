use super::*;

fn written(pieces: &[&str]) -> String {
    let mut out = Vec::new();
    let mut plain = PlainOutput::after(&mut out, "\x1b[H");
    for piece in pieces {
        plain.write_all(piece.as_bytes()).unwrap();
    }
    plain.finish().unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn control_characters_are_replaced_wherever_the_text_is_cut() {
    for (given, plain) in [
        ("a\tb\n", "a\tb\n"),
        ("a\x1b[mb\x7f\n", "a\u{fffd}[mb\u{fffd}\n"),
        ("\u{85}\u{9b}x\n", "\u{fffd}\u{fffd}x\n"),
        ("\u{a0}\u{e9}\u{20ac}\n", "\u{a0}\u{e9}\u{20ac}\n"),
        ("no end", "no end"),
    ] {
        assert_eq!(written(&[given]), format!("\x1b[H{plain}"));
    }
    // Longer than what is held: lines whose characters are at every place of the cut.
    let line = "\u{20ac}uro \u{9b}\n".repeat(HELD);
    let expected = format!("\x1b[H{}", slipgate_policy::plain(&line));
    for first in 0..4 {
        let shift = "x".repeat(first);
        let whole = written(&[&shift, &line]);
        assert_eq!(whole.len(), expected.len() + first);
        assert!(whole.ends_with(&expected[3..]));
    }
}

#[test]
fn a_text_that_is_never_finished_clears_no_screen() {
    let mut out = Vec::new();
    let mut plain = PlainOutput::after(&mut out, "\x1b[H");
    plain.write_all(b"half a lin").unwrap();
    drop(plain);
    assert!(out.is_empty());
    // An empty one does.
    PlainOutput::after(&mut out, "\x1b[H").finish().unwrap();
    assert_eq!(out, b"\x1b[H");
}

#[test]
fn a_reader_that_has_gone_is_an_error_at_once() {
    /// Takes nothing.
    struct Gone;
    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut plain = PlainOutput::after(Gone, "");
    let written = (0..HELD).map(|_| plain.write_all(b"line\n"));
    let failed = written.into_iter().find_map(Result::err).unwrap();
    assert_eq!(failed.kind(), io::ErrorKind::BrokenPipe);
}
