//! Sockets that another process makes, while descriptors are short.
use std::{
    fs::File,
    os::fd::AsRawFd as _,
    thread,
    time::{Duration, Instant},
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use slipgate_model::NAMESPACE_SOCKETS;

use super::{
    super::*,
    spliced::{MANY_FILES, answer, channel},
};
use crate::{host_sockets::KEPT, test_child};

/// Descriptors that are free in the test.
const FREE: usize = 10;

#[test]
fn without_descriptors_some_sockets_are_missing_and_none_is_lost() {
    // The limit is the whole process's.
    test_child::passes("relay::tests::namespace::with_few_descriptors");
}

#[test]
#[ignore = "the child of without_descriptors_some_sockets_are_missing_and_none_is_lost"]
fn with_few_descriptors() {
    let (ours, theirs) = channel();
    let mut sockets = NamespaceSockets::new(ours, MANY_FILES);
    answer(&theirs).unwrap();
    // What it was started with has any numbers: none above these.
    let open = || File::open("/dev/null").unwrap();
    let _low: Vec<_> = std::iter::repeat_with(open)
        .take_while(|file| file.as_raw_fd() < 500)
        .collect();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let before = next_descriptor();
    setrlimit(Resource::RLIMIT_NOFILE, before + FREE as u64, hard).unwrap();
    let taken: Vec<_> = std::iter::from_fn(|| sockets.take(Version::V4)).collect();
    assert_eq!(taken.len(), FREE);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert_eq!(next_descriptor(), before + FREE as u64);
    drop(taken);
    assert_eq!(next_descriptor(), before, "one is open still");
    // All were answered: it has asked for as many again.
    assert_eq!(answer(&theirs), Some(4));
    let taken = std::iter::from_fn(|| sockets.take(Version::V4));
    assert_eq!(taken.count(), NAMESPACE_SOCKETS);
}

/// The lowest number that is free, and all above it are.
fn next_descriptor() -> u64 {
    File::open("/dev/null").unwrap().as_raw_fd() as u64
}

#[test]
fn the_last_descriptors_are_not_for_them() {
    let (ours, theirs) = channel();
    let mut sockets = NamespaceSockets::new(ours, KEPT);
    answer(&theirs).unwrap();
    assert!(sockets.take(Version::V4).is_none());
    assert_eq!(answer(&theirs), Some(4), "it goes on to ask");
    // Those of IPv6 are asked for when there is a client by IPv6.
    assert!(sockets.take(Version::V6).is_none());
    assert_eq!(answer(&theirs), Some(6));
}

#[test]
fn the_first_sockets_are_waited_for_while_their_maker_lives() {
    let minute = Duration::from_secs(60);
    let (ours, theirs) = channel();
    let mut sockets = NamespaceSockets::new(ours, MANY_FILES);
    // One that has had no CPU yet.
    let maker = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        answer(&theirs)
    });
    assert_eq!(sockets.await_first(minute), Ok(()));
    let taken = std::iter::from_fn(|| sockets.take(Version::V4));
    assert_eq!(taken.count(), NAMESPACE_SOCKETS);
    assert_eq!(maker.join().unwrap(), Some(4));

    // One that says nothing yet: what it makes later is used.
    let (ours, theirs) = channel();
    let mut sockets = NamespaceSockets::new(ours, MANY_FILES);
    let moment = Duration::from_millis(20);
    assert_eq!(sockets.await_first(moment), Err(NoneReady::Late(moment)));
    assert!(sockets.take(Version::V4).is_none());
    answer(&theirs).unwrap();
    assert!(sockets.take(Version::V4).is_some());

    // One that has ended before it was asked, and one that did so before it answered.
    for is_asked in [false, true] {
        let (ours, theirs) = channel();
        let theirs = is_asked.then_some(theirs);
        let mut sockets = NamespaceSockets::new(ours, MANY_FILES);
        drop(theirs);
        let began = Instant::now();
        assert_eq!(sockets.await_first(minute), Err(NoneReady::Ended));
        assert!(began.elapsed() < minute / 2);
        assert!(sockets.take(Version::V4).is_none());
    }
}
