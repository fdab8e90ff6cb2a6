use super::*;
use slipgate_abi::VmId;

/// Fetches so much at most.
fn fetched(listener: &mut Listener, mut most: usize) -> String {
    let mut text = Vec::new();
    let took: Result<(), ()> = listener.fetch(|bytes| {
        let n = bytes.len().min(most);
        most -= n;
        text.extend_from_slice(&bytes[..n]);
        Ok(n)
    });
    took.unwrap();
    String::from_utf8(text).unwrap()
}

#[test]
fn what_is_taken_is_fetched_once_in_order() {
    let mut listener = Listener::new(1, VmId::new(7));
    listener.take(b"one\n");
    listener.take(b"two\n");
    assert_eq!(fetched(&mut listener, 6), "one\ntw");
    listener.take(b"three\n");
    assert_eq!(fetched(&mut listener, 100), "o\nthree\n");
    assert_eq!((listener.waiting(), listener.lost), (0, 0));
}

#[test]
fn it_hears_of_its_vm_alone_and_no_refusals() {
    let listener = Listener::new(1, VmId::new(7));
    for event in Event::ALL {
        assert_eq!(listener.hears(event, VmId::new(7)), event != Event::Refused);
        assert!(!listener.hears(event, VmId::new(8)));
    }
}

#[test]
fn what_waits_is_bounded_and_what_is_lost_is_said() {
    let mut listener = Listener::new(1, VmId::new(7));
    let line = [&[b'x'; 999][..], b"\n"].concat();
    let room = (MOST_WAITING - LOST_LINE) / line.len();
    for _ in 0..room + 5 {
        listener.take(&line);
        assert!(listener.waiting.len() <= MOST_WAITING);
    }
    assert_eq!(listener.lost, 5);
    // Whole lines only, and the loss at its place.
    let text = fetched(&mut listener, 3_500);
    assert_eq!(text.len(), 3_500);
    listener.take(b"after\n");
    let rest = fetched(&mut listener, usize::MAX);
    assert!(rest.ends_with("x\n{\"event\":\"lost\",\"count\":5}\nafter\n"));
    assert_eq!((text + &rest).matches("x\n").count(), room);
    // Fetched slowly, the buffer stays as it is.
    for _ in 0..10 * room {
        listener.take(&line);
        fetched(&mut listener, line.len());
        assert!(listener.waiting.len() <= 2 * MOST_WAITING);
    }
    assert_eq!(listener.lost, 0);
}

#[test]
fn what_is_lost_at_the_end_is_said_too() {
    let mut listener = Listener::new(1, VmId::new(7));
    let line = [b'x'; 500_000];
    for _ in 0..3 {
        listener.take(&line);
    }
    listener.report_lost();
    assert!(fetched(&mut listener, usize::MAX).ends_with("{\"event\":\"lost\",\"count\":1}\n"));
}
