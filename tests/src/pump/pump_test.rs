use std::{
    io::ErrorKind,
    thread,
    time::{Duration, Instant},
};

use super::*;
use crate::tap::{VNET_HDR_LEN, VnetHdr};

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);

/// A pump between two pairs, the end into which the frames are written that it moves outward, and the one at
/// which these come out.
fn pump() -> (Pump, TapQueue, TapQueue) {
    let [from, inner] = TapQueue::pair().unwrap();
    let [outer, to] = TapQueue::pair().unwrap();
    let sides = Sides {
        inner: vec![inner],
        outer: vec![outer],
        ethernet: true,
        count: false,
        impairment: None,
        cpu: None,
    };
    (Pump::start("test", sides).unwrap(), from, to)
}

fn frame(number: u64) -> Vec<u8> {
    let mut frame = vec![0; VNET_HDR_LEN + 1_514];
    frame[VNET_HDR_LEN..][..8].copy_from_slice(&number.to_ne_bytes());
    frame
}

fn passed(pump: &Pump) -> u64 {
    pump.moved(Direction::Out).frames
}

/// Writes frames until the pump moves none any more, because nobody reads them. Returns how many.
fn fill(pump: &Pump, from: &TapQueue) -> u64 {
    let mut written = 0;
    let mut looks = 0;
    while looks < 4 {
        let before = passed(pump);
        match from.write(&frame(written)) {
            Ok(()) => written += 1,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                from.wait(libc::POLLOUT);
                looks = if passed(pump) == before { looks + 1 } else { 0 };
            }
        }
    }
    written
}

/// Reads what comes out until it is so many frames, or it takes too long. Returns their numbers.
fn drain(to: &TapQueue, mut is_all: impl FnMut(u64) -> bool) -> Vec<u64> {
    let mut buffer = vec![0; 4_096];
    let (mut read, until) = (Vec::new(), Instant::now() + LONG);
    while !is_all(read.len() as u64) && Instant::now() < until {
        match to.read(&mut buffer) {
            Ok(_) => read.push(number(&buffer[VNET_HDR_LEN..])),
            Err(_) => to.wait(libc::POLLIN),
        }
    }
    read
}

fn number(frame: &[u8]) -> u64 {
    u64::from_ne_bytes(*frame.first_chunk().unwrap())
}

#[test]
fn a_frame_that_waits_for_room_meets_the_filter_that_is_set_meanwhile() {
    let (pump, from, to) = pump();
    let written = fill(&pump, &from);
    let lost = Arc::new(AtomicU64::new(0));
    let losing = lost.clone();
    let filter = move |_, _: &VnetHdr, _: &[u8]| {
        losing.fetch_add(1, Ordering::SeqCst);
        Fate::Lose
    };
    let began = Instant::now();
    pump.set_filter(Some(Box::new(filter)));
    assert!(began.elapsed() < LONG, "it waits for nobody who reads");
    let passed = passed(&pump);
    let came = drain(&to, |read| read + lost.load(Ordering::SeqCst) == written);
    assert_eq!(
        (came.len() as u64, lost.load(Ordering::SeqCst)),
        (passed, written - passed)
    );
}

#[test]
fn a_frame_that_waits_for_room_is_seen_by_who_subscribes_meanwhile() {
    let (pump, from, to) = pump();
    let written = fill(&pump, &from);
    let tap = pump.subscribe();
    let passed = passed(&pump);
    drain(&to, |read| read == written);
    let first = number(&tap.wait_for(LONG, |_| true).unwrap().bytes);
    assert!(
        first <= passed,
        "{passed} had passed, and the first that was seen is {first}"
    );
}

#[test]
fn a_frame_that_waits_while_the_hooks_change_is_seen_once_by_each_subscriber() {
    let (pump, from, to) = pump();
    let early = pump.subscribe();
    let written = fill(&pump, &from);
    // The pump looks at them between two waits.
    let late: Vec<_> = (0..3)
        .map(|_| {
            pump.set_filter(None);
            let tap = pump.subscribe();
            thread::sleep(Duration::from_millis(300));
            tap
        })
        .collect();
    let came = drain(&to, |read| read == written);
    assert_eq!(came, (0..written).collect::<Vec<_>>());
    let seen =
        |tap: &FrameTap| -> Vec<u64> { tap.drain().iter().map(|it| number(&it.bytes)).collect() };
    assert_eq!(seen(&early), came);
    for tap in &late {
        let seen = seen(tap);
        assert_eq!(seen, (seen[0]..written).collect::<Vec<_>>());
    }
}

#[test]
fn a_frame_that_waits_between_its_copies_comes_no_more_often_when_the_hooks_change() {
    let mut has_waited_between = false;
    for times in 2..=5 {
        let (pump, from, to) = pump();
        let filter = || -> Filter { Box::new(move |_, _, _| Fate::Repeat(times)) };
        pump.set_filter(Some(filter()));
        let written = fill(&pump, &from);
        has_waited_between |= !passed(&pump).is_multiple_of(times as u64);
        for _ in 0..3 {
            pump.set_filter(Some(filter()));
            let _ = pump.subscribe();
            thread::sleep(Duration::from_millis(300));
        }
        let came = drain(&to, |read| read == written * times as u64);
        let all = (0..written).flat_map(|number| vec![number; times]);
        assert_eq!(came, all.collect::<Vec<_>>());
    }
    assert!(has_waited_between);
}

#[test]
fn once_a_filter_is_set_no_frame_passes_that_was_judged_before() {
    let (pump, from, to) = pump();
    let is_over = AtomicBool::new(false);
    let over = || is_over.load(Ordering::SeqCst);
    let (late, stalled_in) = thread::scope(|scope| {
        scope.spawn(|| while from.write_waiting(&frame(0), over).is_ok() && !over() {});
        scope.spawn(|| {
            while !over() {
                drain(&to, |read| over() || read == 1_000);
            }
        });
        let (mut late, mut stalled_in) = (0, None);
        for round in 0..300 {
            pump.set_filter(Some(Box::new(|_, _, _| Fate::Lose)));
            let before = passed(&pump);
            thread::sleep(Duration::from_micros(200));
            late += passed(&pump) - before;
            pump.set_filter(None);
            let until = Instant::now() + LONG;
            while passed(&pump) == before && Instant::now() < until {
                thread::yield_now();
            }
            if passed(&pump) == before {
                stalled_in = Some(round);
                break;
            }
        }
        // An assertion in here would wait for the other threads, which nobody tells that it is over.
        is_over.store(true, Ordering::SeqCst);
        (late, stalled_in)
    });
    assert_eq!((late, stalled_in), (0, None));
}
