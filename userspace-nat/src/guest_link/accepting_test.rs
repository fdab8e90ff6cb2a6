use std::{
    fs::File,
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use nix::sys::epoll::EpollCreateFlags;
use tracing::{
    Event, Level, Metadata, Subscriber,
    span::{Attributes, Id, Record},
    subscriber::with_default,
};

use super::*;

/// Counts warnings.
struct Warnings(Arc<AtomicU32>);

impl Subscriber for Warnings {
    fn enabled(&self, of: &Metadata<'_>) -> bool {
        *of.level() == Level::WARN
    }

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Relaxed);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_shortage_is_warned_of_once_until_it_is_over() {
    let (socket, _other) = UnixStream::pair().unwrap();
    let socket: OwnedFd = socket.into();
    let warned = Arc::new(AtomicU32::new(0));
    let mut warned_of = Warned::default();
    for warnings in 1..=2 {
        let full = Epoll(File::open("/dev/null").unwrap().into());
        with_default(Warnings(warned.clone()), || {
            for _ in 0..3 {
                let watched = watch(&socket, &full, 1);
                assert!(watched.is_err());
                warned_of.of(watched.err(), "waits");
            }
        });
        assert_eq!(warned.load(Relaxed), warnings);
        let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
        let watched = watch(&socket, &epoll, 1);
        assert_eq!(watched, Ok(()));
        warned_of.of(watched.err(), "waits");
    }
}
