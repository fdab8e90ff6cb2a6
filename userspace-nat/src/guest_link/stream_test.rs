use std::{
    io::{ErrorKind, Read as _, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
};

use nix::sys::epoll::{EpollCreateFlags, EpollTimeout};

use super::*;
use crate::guest_link::framing::{MOST_FRAME, MOST_QUEUED, PREFIX_LEN};

const LISTENER: u64 = 1;
const GUEST: u64 = 2;
const NOW_NS: u64 = 1_000_000_000;

struct Rig {
    link: StreamLink,
    epoll: Epoll,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Rig {
    fn new(is_for_one: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let link = StreamLink::new(listener.into(), is_for_one);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        link.watch(&epoll, LISTENER).unwrap();
        let rig = Self {
            link,
            epoll,
            path,
            _dir: dir,
        };
        assert_eq!(rig.events(), []);
        rig
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    }

    fn accept(&mut self) {
        let _ = self.link.accept(&self.epoll, GUEST, NOW_NS);
    }

    fn settle(&mut self) -> Option<Input> {
        self.link.settle(&self.epoll, GUEST, NOW_NS).unwrap()
    }

    fn events(&self) -> Vec<(u64, EpollFlags)> {
        let mut events = [EpollEvent::empty(); 8];
        let ready = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap();
        let events = events[..ready].iter();
        events.map(|event| (event.data(), event.events())).collect()
    }

    /// One turn's input, until there is none.
    fn read(&mut self) -> Vec<Input> {
        if let Some(end) = self.link.fill() {
            return vec![end];
        }
        let mut into = vec![0; VNET_LEN + MOST_FRAME];
        let mut all = Vec::new();
        loop {
            match self.link.next(&mut into) {
                Input::Nothing => return all,
                Input::Frame(len) => all.push(Input::Frame(len - VNET_LEN)),
                input => all.push(input),
            }
            if matches!(all.last(), Some(Input::Closed(_))) {
                return all;
            }
        }
    }

    fn send(&mut self, len: usize) -> Option<DropReason> {
        self.link.send(&vec![0; VNET_LEN + len])
    }
}

/// A set to which nothing can be added, as if this user watched too much (ENOSPC).
fn no_epoll() -> Epoll {
    Epoll(std::fs::File::open("/dev/null").unwrap().into())
}

fn framed(len: usize) -> Vec<u8> {
    [&(len as u32).to_be_bytes()[..], &vec![3; len]].concat()
}

#[test]
fn one_guest_after_the_other() {
    let mut rig = Rig::new(false);
    assert_eq!(rig.send(60), Some(DropReason::StaleVm));
    assert!(
        rig.link
            .queued()
            .is_none_or(|queued| queued >= ENOUGH_QUEUED)
    );
    let mut first = rig.connect();
    assert_eq!(rig.events(), [(LISTENER, EpollFlags::EPOLLIN)]);
    rig.accept();
    let mut second = rig.connect();
    rig.accept();
    second.write_all(&framed(61)).unwrap();
    assert_eq!(rig.read(), []);
    first
        .write_all(&[framed(60), framed(0), framed(1_514)].concat())
        .unwrap();
    let frames = [60, 0, 1_514].map(Input::Frame);
    assert_eq!(rig.read(), frames);
    // Two bytes of a length, and the end.
    first.write_all(&[0, 0]).unwrap();
    assert_eq!(rig.read(), []);
    assert_eq!(rig.send(60), None);
    drop(first);
    assert_eq!(rig.read(), [Input::Ended(2)]);
    // The next one's stream begins anew, both ways.
    rig.accept();
    assert_eq!(rig.read(), [Input::Frame(61)]);
    assert_eq!(rig.send(62), None);
    assert_eq!(rig.settle(), None);
    let mut got = Vec::new();
    let error = second.read_to_end(&mut got).unwrap_err();
    assert_eq!(
        (error.kind(), got.len()),
        (ErrorKind::WouldBlock, PREFIX_LEN + 62)
    );
    assert_eq!(got[..PREFIX_LEN], [0, 0, 0, 62]);
}

#[test]
fn a_link_for_one_is_shut_when_that_one_has_gone() {
    let mut rig = Rig::new(true);
    let first = rig.connect();
    rig.accept();
    drop(first);
    assert_eq!(rig.read(), [Input::Ended(0)]);
    rig.accept();
    assert_eq!(rig.send(60), Some(DropReason::StaleVm));
    let refused = UnixStream::connect(&rig.path).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    let hung_up = rig.events();
    assert!(
        hung_up
            .iter()
            .any(|(_, flags)| flags.contains(EpollFlags::EPOLLHUP))
    );
}

#[test]
fn a_length_that_no_frame_has_closes_the_connection() {
    let mut rig = Rig::new(false);
    let mut guest = rig.connect();
    rig.accept();
    guest
        .write_all(&[&framed(60)[..], &[0xff; 100]].concat())
        .unwrap();
    let closed = Input::Closed(TooLong(u32::MAX));
    assert_eq!(rig.read(), [Input::Frame(60), closed]);
    assert_eq!(guest.read(&mut [0; 9]).unwrap(), 0);
    let again = rig.connect();
    rig.accept();
    drop(again);
    assert_eq!(rig.read(), [Input::Ended(0)]);
}

#[test]
fn a_guest_that_does_not_read_loses_frames_and_gets_the_rest_whole() {
    let mut rig = Rig::new(false);
    let mut guest = rig.connect();
    rig.accept();
    let mut taken = 0;
    while rig.send(1_514).is_none() {
        taken += 1;
        assert_eq!(rig.settle(), None);
    }
    assert_eq!(rig.send(1_514), Some(DropReason::EngineBusy));
    assert!(rig.link.queue.unsent().len() <= MOST_QUEUED);
    assert!(
        rig.link
            .queued()
            .is_none_or(|queued| queued >= ENOUGH_QUEUED)
    );
    assert_eq!(rig.events(), [], "nothing to do until it reads");
    // It reads.
    let mut got = Vec::new();
    while got.len() < taken * (PREFIX_LEN + 1_514) {
        let _ = guest.read_to_end(&mut got);
        assert_eq!(rig.settle(), None);
    }
    assert!(
        rig.link
            .queued()
            .is_some_and(|queued| queued < ENOUGH_QUEUED)
    );
    assert_eq!(got.len(), taken * (PREFIX_LEN + 1_514));
    assert_eq!(rig.events(), [], "and no more events of room");
}

#[test]
fn data_waits_and_other_frames_still_fit_between_the_two_bounds() {
    let mut rig = Rig::new(false);
    let _guest = rig.connect();
    rig.accept();
    while rig
        .link
        .queued()
        .is_some_and(|queued| queued < ENOUGH_QUEUED)
    {
        assert_eq!(rig.send(60_000), None);
        rig.settle();
    }
    for _ in 0..1_000 {
        assert_eq!(rig.send(60), None);
    }
}

#[test]
fn a_guest_that_has_closed_its_reading_side_is_gone() {
    let mut rig = Rig::new(false);
    let guest = rig.connect();
    rig.accept();
    guest.shutdown(std::net::Shutdown::Read).unwrap();
    assert_eq!(rig.send(60), None);
    assert_eq!(rig.settle(), Some(Input::Ended(0)));
}

#[test]
fn a_connection_that_was_given_is_the_only_one() {
    let (ours, mut guest) = UnixStream::pair().unwrap();
    let theirs = ours.try_clone().unwrap();
    let mut link = StreamLink::connected(ours.into()).unwrap();
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    link.watch(&epoll, LISTENER).unwrap();
    assert_eq!(link.queued(), None, "not before the first turn's end");
    // The kernel can't watch it yet: it is kept.
    let accepted = link.accept(&no_epoll(), GUEST, NOW_NS);
    assert_eq!((accepted, link.queued()), (Accepted::No, None));
    let due_ns = NOW_NS + SHORTAGE_NS;
    assert_eq!(link.due_ns(), Some(due_ns));
    assert_eq!(link.accept(&epoll, GUEST, due_ns - 1), Accepted::No);
    assert_eq!(link.accept(&epoll, GUEST, due_ns), Accepted::Yes);
    assert_eq!(link.due_ns(), None);
    assert_eq!(link.accept(&epoll, GUEST, NOW_NS), Accepted::No);
    assert_eq!(link.queued(), Some(0));
    guest.write_all(&[0, 0, 0, 60]).unwrap();
    guest.write_all(&[7; 60]).unwrap();
    assert_eq!(link.fill(), None);
    let mut into = vec![0; VNET_LEN + MOST_FRAME];
    assert_eq!(link.next(&mut into), Input::Frame(VNET_LEN + 60));
    assert_eq!(into[VNET_LEN..][..60], [7; 60]);
    // It ends, and whoever shares the socket sees it hang up.
    drop(guest);
    assert_eq!(link.fill(), Some(Input::Ended(0)));
    assert_eq!(link.accept(&epoll, GUEST, NOW_NS), Accepted::No);
    assert_eq!(link.queued(), None);
    assert_eq!((&theirs).read(&mut [0; 1]).unwrap(), 0);
    assert!((&theirs).write(&[0]).is_err());
}

#[test]
fn a_host_short_of_memory_delays_frames_and_ends_nothing() {
    for error in [Errno::ENOBUFS, Errno::ENOMEM] {
        let mut rig = Rig::new(false);
        let mut guest = rig.connect();
        rig.accept();
        assert_eq!(rig.link.due_ns(), None);
        rig.link.refuses = Some(error);
        let mut taken = 0;
        while rig.send(1_514).is_none() {
            taken += 1;
            assert_eq!(rig.settle(), None, "{error}");
        }
        // What finds no place is counted, and no event comes again and again.
        assert_eq!(rig.send(1_514), Some(DropReason::EngineBusy));
        assert_eq!(rig.events(), []);
        assert_eq!(rig.link.due_ns(), Some(NOW_NS + SHORTAGE_NS));
        // The guest is heard meanwhile.
        guest.write_all(&framed(60)).unwrap();
        assert_eq!(rig.read(), [Input::Frame(60)]);
        rig.link.refuses = None;
        let mut got = Vec::new();
        while got.len() < taken * (PREFIX_LEN + 1_514) {
            assert_eq!(rig.settle(), None);
            let _ = guest.read_to_end(&mut got);
        }
        assert_eq!(got.len(), taken * (PREFIX_LEN + 1_514));
        assert_eq!(rig.settle(), None);
        assert_eq!((rig.link.due_ns(), rig.events()), (None, vec![]));
        // Others are ends.
        rig.link.refuses = Some(Errno::EPIPE);
        assert_eq!(rig.send(60), None);
        assert_eq!(rig.settle(), Some(Input::Ended(0)));
    }
}

#[test]
fn what_could_not_be_accepted_is_tried_again_without_an_event() {
    // It fails, as if the host had no descriptor.
    let (listener, _other) = UnixStream::pair().unwrap();
    let mut link = StreamLink::new(listener.into(), false);
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    assert_eq!(link.accept(&epoll, GUEST, NOW_NS), Accepted::No);
    assert_eq!(link.due_ns(), Some(NOW_NS + SHORTAGE_NS));
    // Nobody is there: the event tells of the next.
    let mut rig = Rig::new(false);
    rig.accept();
    assert_eq!(rig.link.due_ns(), None);
}

#[test]
fn a_guest_that_cannot_be_watched_is_refused_and_a_later_one_is_served() {
    let mut rig = Rig::new(false);
    let mut guests = [(); 3].map(|()| rig.connect());
    let due_ns = NOW_NS + SHORTAGE_NS;
    // One at a time, however many turns there are.
    for (now_ns, accepted) in [
        (NOW_NS, Accepted::Refused),
        (NOW_NS, Accepted::No),
        (due_ns - 1, Accepted::No),
        (due_ns, Accepted::Refused),
        (due_ns + 1, Accepted::No),
    ] {
        assert_eq!(rig.link.accept(&no_epoll(), GUEST, now_ns), accepted);
    }
    let [first, second, third] = &mut guests;
    for refused in [first, second] {
        assert_eq!(refused.read(&mut [0]).unwrap(), 0, "it learns of it");
    }
    assert_eq!(rig.send(60), Some(DropReason::StaleVm));
    // No event tells of who waits.
    assert_eq!(rig.link.due_ns(), Some(due_ns + SHORTAGE_NS));
    let due_ns = due_ns + SHORTAGE_NS;
    let accepted = rig.link.accept(&rig.epoll, GUEST, due_ns);
    assert_eq!((accepted, rig.link.due_ns()), (Accepted::Yes, None));
    third.write_all(&framed(60)).unwrap();
    assert_eq!(rig.read(), [Input::Frame(60)]);
}
