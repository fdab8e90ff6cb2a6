use super::*;

#[test]
fn frames_come_out_whole_and_in_order_around_the_end() {
    let (inbox, mut out) = (Inbox::default(), Vec::new());
    let (mut put, mut taken) = (0u32, 0u32);
    let frame = |number: u32| {
        let mut frame = vec![number as u8; 60 + (number as usize * 7919) % 65_000];
        frame[..4].copy_from_slice(&number.to_le_bytes());
        frame
    };
    assert!(inbox.is_empty() && !inbox.take(&mut out));
    while taken < 500 {
        for _ in 0..3 {
            inbox.put(&frame(put));
            put += 1;
        }
        for _ in 0..3 {
            assert!(inbox.take(&mut out));
            assert_eq!(out, frame(taken));
            taken += 1;
        }
    }
    assert!(inbox.is_empty());
    let (passed, dropped) = (put.into(), 0);
    assert_eq!(inbox.counters(), InboxCounters { passed, dropped });
}

#[test]
fn what_does_not_fit_is_counted_and_harms_no_other() {
    let (inbox, mut out) = (Inbox::default(), Vec::new());
    let frame = [7; 65_535];
    for _ in 0..10 {
        inbox.put(&frame);
    }
    inbox.put(&[0; 65_536]);
    let fit = (CAPACITY / (frame.len() + 2)) as u64;
    let (passed, dropped) = (fit, 11 - fit);
    assert_eq!(inbox.counters(), InboxCounters { passed, dropped });
    for _ in 0..fit {
        assert!(inbox.take(&mut out) && out == frame);
    }
    assert!(!inbox.take(&mut out));
}

#[test]
fn many_put_while_one_takes() {
    let inbox = Inbox::default();
    let mut seen = [0u64; 3];
    std::thread::scope(|scope| {
        for who in 0..3u8 {
            let inbox = &inbox;
            scope.spawn(move || {
                for number in 0..5000u64 {
                    let mut frame = [who; 100];
                    frame[1..9].copy_from_slice(&number.to_le_bytes());
                    inbox.put(&frame);
                }
            });
        }
        let (mut out, mut last) = (Vec::new(), std::time::Instant::now());
        while last.elapsed() < std::time::Duration::from_millis(200) {
            if inbox.take(&mut out) {
                last = std::time::Instant::now();
                let number = u64::from_le_bytes(out[1..9].try_into().unwrap());
                let who = &mut seen[usize::from(out[0])];
                assert!(number >= *who && out[9..] == [out[0]; 91]);
                *who = number + 1;
            }
        }
    });
    let counters = inbox.counters();
    assert_eq!(counters.passed + counters.dropped, 15_000);
}
