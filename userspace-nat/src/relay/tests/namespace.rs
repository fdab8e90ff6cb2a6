//! Sockets that another process makes, while descriptors are short.
use std::{fs::File, os::fd::AsRawFd as _, process::Command};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use slipgate_model::NAMESPACE_SOCKETS;

use super::{
    super::*,
    spliced::{MANY_FILES, answer, channel},
};
use crate::host_sockets::KEPT;

/// Descriptors that are free in the test.
const FREE: usize = 10;

#[test]
fn without_descriptors_some_sockets_are_missing_and_none_is_lost() {
    // The limit is the whole process's.
    let child = "relay::tests::namespace::with_few_descriptors";
    let status = Command::new(std::env::current_exe().unwrap())
        .args([child, "--exact", "--ignored", "--test-threads=1"])
        .status();
    assert!(status.unwrap().success());
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
