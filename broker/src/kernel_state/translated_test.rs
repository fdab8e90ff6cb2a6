use std::sync::{
    Mutex,
    atomic::{AtomicU32, Ordering::SeqCst},
    mpsc::channel,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::*;

const RANGES: [RangeInclusive<u16>; 1] = [100..=109];

/// Waits until the thread has read.
fn await_end(ports: &TranslatedPorts) {
    let fd = ports.fd().expect("a thread reads");
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::NONE).unwrap();
}

#[test]
fn one_thread_at_a_time_reads_and_nobody_waits_for_it() {
    let (go, gone) = channel::<u16>();
    let gone = Mutex::new(gone);
    let at_once = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&at_once);
    let mut ports = TranslatedPorts::by(move |_| {
        assert_eq!(count.fetch_add(1, SeqCst), 0);
        // Until the test says so, however long that takes.
        let port = gone.lock().unwrap().recv().unwrap();
        count.fetch_sub(1, SeqCst);
        Ok([(6, port)].into())
    });
    ports.ask(&RANGES);
    assert!(!ports.follow());
    assert!(ports.taken().is_empty());
    assert_eq!(ports.due(), None);
    // While it reads, there is another change to look at.
    ports.ask(&RANGES);
    assert_eq!(ports.due(), None, "it has not ended");
    go.send(101).unwrap();
    await_end(&ports);
    assert!(ports.follow());
    assert_eq!(*ports.taken(), [(6, 101)].into());
    let due = ports.due().expect("the second is owed");
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
    ports.ask(&RANGES);
    assert_eq!(ports.due(), None);
    go.send(101).unwrap();
    await_end(&ports);
    assert!(!ports.follow(), "the same as before");
    assert_eq!(at_once.load(SeqCst), 0);
}

#[test]
fn reading_takes_a_twentieth_of_the_time_at_most() {
    const TAKES: Duration = Duration::from_millis(10);
    let mut ports = TranslatedPorts::by(|_| {
        std::thread::sleep(TAKES);
        Ok(BTreeSet::new())
    });
    let begun = Instant::now();
    ports.ask(&RANGES);
    await_end(&ports);
    ports.follow();
    assert!(ports.not_before >= begun + 20 * TAKES);
    // As long as the test likes, however busy the machine is.
    ports.not_before = Instant::now() + Duration::from_secs(3_600);
    ports.ask(&RANGES);
    assert!(ports.fd().is_none(), "it is too early");
    assert_eq!(ports.due(), Some(ports.not_before));
    ports.forget();
    assert_eq!(ports.due(), None);
    // Read at once, it counts too.
    let begun = Instant::now();
    ports.read_now(&RANGES);
    assert!(ports.not_before >= begun + 20 * TAKES);
}

#[test]
fn what_does_not_matter_any_more_is_not_taken_in() {
    let mut ports = TranslatedPorts::by(|_| Ok([(17, 102)].into()));
    ports.read_now(&RANGES);
    assert_eq!(*ports.taken(), [(17, 102)].into());
    ports.not_before = Instant::now();
    ports.ask(&RANGES);
    ports.forget();
    await_end(&ports);
    ports.follow();
    assert!(ports.taken().is_empty());
}

#[test]
fn a_failure_leaves_what_was_known() {
    let fails = Arc::new(AtomicU32::new(0));
    let is_failing = Arc::clone(&fails);
    let mut ports = TranslatedPorts::by(move |_| match is_failing.load(SeqCst) {
        0 => Ok([(6, 105)].into()),
        1 => Err(io::Error::other("no room")),
        _ => panic!("of the test's own"),
    });
    ports.read_now(&RANGES);
    for how in [1, 2] {
        fails.store(how, SeqCst);
        ports.not_before = Instant::now();
        ports.ask(&RANGES);
        await_end(&ports);
        assert!(!ports.follow());
        assert!(ports.fd().is_none(), "it is over");
        assert_eq!(*ports.taken(), [(6, 105)].into());
    }
}

#[test]
fn clients_of_the_host_leave_guests_half_of_the_ports() {
    let ranges = [100..=109, 200..=201];
    let all = |protocol: u8| {
        ranges
            .iter()
            .cloned()
            .flatten()
            .map(move |port| (protocol, port))
    };
    let few = BTreeSet::from([(6, 100), (6, 105), (17, 109), (17, 201)]);
    assert_eq!(at_most_half(few.clone(), &ranges), few);
    let every = all(6).chain(all(17)).collect();
    let kept = at_most_half(every, &ranges);
    for protocol in [6, 17] {
        let of = |range: &RangeInclusive<u16>| {
            let own = kept.range((protocol, *range.start())..=(protocol, *range.end()));
            own.count()
        };
        assert_eq!(ranges.each_ref().map(of), [5, 1]);
    }
}
