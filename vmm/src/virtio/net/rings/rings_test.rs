//! A card, and in the engine's place a peer that follows a script.
use std::{
    fs::File,
    io::Read as _,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use nix::sys::memfd::{MFdFlags, memfd_create};
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

use super::{super::stepped::tests::enabled, engine::ANSWERED_WITHIN, *};
use crate::{
    GuestMemory, ThreadSetup, memory,
    snapshot::Model,
    virtio::{
        Activation, VirtioDevice as _,
        net::{Net, NetConfig, NetCounters, NetLink, shared_bytes},
    },
};

const MEMORY: u64 = 8 << 20;
const SET_FEATURES: u32 = 2;
const RESET_OWNER: u32 = 4;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_TALLY: u32 = 0x5347_0001;
const WAIT: Duration = Duration::from_secs(20);
const GUEST_TSO4: u64 = 1 << 7;

/// Records the driver's notifications, with lines of its own for queues 0 and 1.
struct Recorder {
    lines: [EventFd; 2],
    needs_reset: AtomicBool,
    config: AtomicU64,
}

impl Signals for Recorder {
    fn queue(&self, _index: u16) {}
    fn line(&self, index: u16) -> Option<&EventFd> {
        self.lines.get(usize::from(index))
    }
    fn config(&self) {
        self.config.fetch_add(1, Ordering::AcqRel);
    }
    fn needs_reset(&self) {
        self.needs_reset.store(true, Ordering::Release);
    }
}

/// A request: number, body, descriptors.
type Request = (u32, Vec<u8>, Vec<File>);

struct Peer {
    socket: Option<UnixStream>,
    /// Where its rings stand, by what it says.
    at: [u32; 2],
    said: Vec<Request>,
}

impl Peer {
    /// Hears and answers until it was asked so often where a ring stands, or nothing comes any more.
    fn serve(&mut self, questions: usize) {
        let socket = self.socket.as_mut().unwrap();
        let mut left = questions;
        loop {
            let mut header = [0; 12];
            let (len, fd) = match socket.recv_with_fd(&mut header) {
                Ok((0, _)) | Err(_) => return,
                Ok(received) => received,
            };
            assert_eq!(len, 12);
            let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
            let mut body = vec![0; word(8) as usize];
            socket.read_exact(&mut body).unwrap();
            let number = word(0);
            if number == GET_VRING_BASE {
                let nth = body[0];
                let words = [number, 5, 8, nth.into(), self.at[usize::from(nth)]];
                let answer: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                socket.send_with_fds(&[&answer[..]], &[]).unwrap();
                left -= 1;
            }
            self.said.push((number, body, fd.into_iter().collect()));
            if left == 0 {
                return;
            }
        }
    }

    fn of(&self, number: u32) -> Vec<&Request> {
        let said = self.said.iter();
        said.filter(|(other, ..)| *other == number).collect()
    }
}

struct Rig {
    net: Net,
    counters: Arc<NetCounters>,
    memory: Arc<GuestMemory>,
    signals: Arc<Recorder>,
    file: File,
    peer: Arc<Mutex<Peer>>,
}

impl Rig {
    fn new() -> Rig {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs
            .set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let file = memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap();
        let file = File::from(file);
        file.set_len(shared_bytes(MEMORY)).unwrap();
        let copy = || file.try_clone().unwrap();
        let counters = NetCounters::new(1);
        let mut config = NetConfig::new([2, 0, 0, 0, 0, 1], 1500, vec![OwnedFd::from(ours)]);
        config.shared = Some(copy());
        let net = Net::new(config, ThreadSetup::new(|_| Ok(())), Arc::clone(&counters)).unwrap();
        let memory = memory::shared(MEMORY, copy(), shared_bytes(MEMORY)).unwrap();
        let line = || EventFd::new(EFD_NONBLOCK).unwrap();
        Rig {
            net,
            counters,
            memory: Arc::new(memory),
            signals: Arc::new(Recorder {
                lines: [line(), line()],
                needs_reset: AtomicBool::new(false),
                config: AtomicU64::new(0),
            }),
            file,
            peer: Arc::new(Mutex::new(Peer {
                socket: Some(theirs),
                at: [0; 2],
                said: Vec::new(),
            })),
        }
    }

    fn activate(&mut self) {
        let activation = Activation {
            memory: Arc::clone(&self.memory),
            features: self.net.features(),
            queues: vec![enabled(0, 16), enabled(1, 16)],
            signals: self.signals.clone(),
            restored: None,
        };
        self.net.activate(activation).unwrap();
    }

    /// Lets the peer answer so many questions meanwhile; 0: until nothing comes any more.
    fn meanwhile<T>(&mut self, questions: usize, does: impl FnOnce(&mut Net) -> T) -> T {
        let peer = Arc::clone(&self.peer);
        let serves = std::thread::spawn(move || {
            let questions = if questions == 0 {
                usize::MAX
            } else {
                questions
            };
            peer.lock().unwrap().serve(questions);
        });
        let done = does(&mut self.net);
        serves.join().unwrap();
        done
    }

    fn said<T>(&self, look: impl FnOnce(&Peer) -> T) -> T {
        look(&self.peer.lock().unwrap())
    }

    fn forget(&self) {
        self.peer.lock().unwrap().said.clear();
    }
}

fn eventually(what: &str, so: impl Fn() -> bool) {
    let until = Instant::now() + WAIT;
    while !so() {
        assert!(Instant::now() < until, "not yet: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn the_engine_is_told_of_memory_rings_and_lines_and_a_pause_goes_on_where_it_was() {
    let mut rig = Rig::new();
    rig.activate();
    rig.meanwhile(0, |_| ());
    rig.said(|peer| {
        // What the file has is what the guest has.
        let (_, table, files) = peer.of(SET_MEM_TABLE)[0];
        assert_eq!((table.len(), files.len()), (8 + 32, 1));
        rig.memory.write_obj(77_u8, GuestAddress(4_096)).unwrap();
        let mut byte = [0];
        std::os::unix::fs::FileExt::read_exact_at(&files[0], &mut byte, 4_096).unwrap();
        assert_eq!(byte, [77]);
        for number in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
            let told = peer.of(number);
            assert!(told.len() == 2 && told.iter().all(|(.., fds)| fds.len() == 1));
        }
        // A call is the line of the queue's vector itself.
        let (_, told, fds) = peer.of(SET_VRING_CALL)[1];
        assert_eq!(told[0], 1);
        std::io::Write::write_all(&mut &fds[0], &1_u64.to_ne_bytes()).unwrap();
        assert_eq!(rig.signals.lines[1].read().unwrap(), 1);
        // Protocol features, and no filter of the receiver's.
        let (_, features, _) = peer.of(SET_FEATURES)[0];
        let features = u64::from_ne_bytes(features[..].try_into().unwrap());
        assert_eq!(
            features & (1 << 30 | 1 << 32 | GUEST_TSO4),
            1 << 30 | 1 << 32 | GUEST_TSO4
        );
        assert_eq!(features & (1 << 17 | 1 << 18 | 1 << 20), 0);
    });
    assert_eq!(rig.net.features() & (1 << 18 | 1 << 20), 0);

    rig.forget();
    rig.peer.lock().unwrap().at = [5, 65_535];
    let saved = rig.meanwhile(2, |net| net.suspend());
    let stand = |queue: u16| {
        let progress = saved.queues.iter().find(|progress| progress.queue == queue);
        let progress = progress.unwrap();
        assert!(progress.taken.is_empty());
        (progress.next_available, progress.next_used)
    };
    assert_eq!((stand(0), stand(1)), ((5, 5), (65_535, 65_535)));
    assert!(matches!(saved.model, Model::Net(_)));
    rig.forget();
    rig.meanwhile(0, |net| net.resume());
    rig.said(|peer| {
        let bases = peer.of(SET_VRING_BASE);
        let base = |nth: usize| u32::from_ne_bytes(bases[nth].1[4..].try_into().unwrap());
        assert_eq!((base(0), base(1)), (5, 65_535));
        assert!(peer.of(SET_MEM_TABLE).is_empty(), "it is the same");
    });

    // A reset waits until the engine has stopped both rings.
    rig.forget();
    rig.meanwhile(2, |net| net.reset());
    rig.said(|peer| {
        let numbers: Vec<u32> = peer.said.iter().map(|(number, ..)| *number).collect();
        assert_eq!(numbers, [RESET_OWNER, GET_VRING_BASE, GET_VRING_BASE]);
    });
    rig.meanwhile(2, |_| ());
}

#[test]
fn an_engine_with_much_to_read_is_waited_for() {
    let (ours, mut theirs, filled) = full();
    let counts = memfd_create(c"counts", MFdFlags::MFD_CLOEXEC).unwrap();
    let (done, told) = mpsc::channel();
    std::thread::spawn(move || done.send(Engine::new(ours, (counts.into(), 0)).map(drop)));
    let meanwhile = told.recv_timeout(Duration::from_millis(100));
    assert!(meanwhile.is_err(), "there is no room: {meanwhile:?}");
    let mut all = Vec::new();
    theirs.read_to_end(&mut all).unwrap();
    told.recv().unwrap().unwrap();
    assert_eq!(all.len(), filled + 12 + 8);
}

/// A socket whose other end takes no more before that reads.
fn full() -> (UnixStream, UnixStream, usize) {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let mut filled = 0;
    while let Ok(some) = std::io::Write::write(&mut ours, &[0; 4_096]) {
        filled += some;
    }
    (ours, theirs, filled)
}

#[test]
fn an_engine_that_reads_or_answers_nothing_is_given_up_after_ten_seconds() {
    let (ours, _theirs, _) = full();
    let counts = memfd_create(c"counts", MFdFlags::MFD_CLOEXEC).unwrap();
    let reads_nothing = std::thread::spawn(move || {
        let began = Instant::now();
        let told = Engine::new(ours, (counts.into(), 0)).map(drop);
        (began.elapsed(), told.map_err(|e| e.kind()))
    });
    let in_time = |took: Duration| took >= ANSWERED_WITHIN && took < ANSWERED_WITHIN * 2;
    let mut rig = Rig::new();
    rig.activate();
    let began = Instant::now();
    let saved = rig.net.suspend();
    let took = began.elapsed();
    assert!(in_time(took), "{took:?}");
    assert_eq!(
        saved.queues.len(),
        2,
        "the rings say how far they were served"
    );
    assert_eq!(link(&rig.net), 0);
    assert_eq!(rig.signals.config.load(Ordering::Acquire), 1);
    // What it was told, and the end.
    let mut socket = rig.peer.lock().unwrap().socket.take().unwrap();
    let end = socket.read_to_end(&mut Vec::new());
    assert!(end.is_ok(), "{end:?}");
    let (took, told) = reads_nothing.join().unwrap();
    assert!(in_time(took), "{took:?}");
    assert_eq!(told, Err(std::io::ErrorKind::TimedOut));
}

#[test]
fn a_ring_that_the_engine_found_broken_needs_a_reset() {
    let mut rig = Rig::new();
    rig.activate();
    rig.meanwhile(0, |_| ());
    rig.said(|peer| {
        let (.., fds) = peer.of(SET_VRING_ERR)[0];
        std::io::Write::write_all(&mut &fds[0], &1_u64.to_ne_bytes()).unwrap();
    });
    let signals = Arc::clone(&rig.signals);
    eventually("a reset is needed", || {
        signals.needs_reset.load(Ordering::Acquire)
    });
    assert_eq!(rig.counters.snapshot().pairs[0].broken_rings, 1);
    rig.peer.lock().unwrap().socket = None;
}

/// Whether a card's link is up, by its configuration.
fn link(net: &Net) -> u8 {
    let mut status = [0; 2];
    net.read_config(6, &mut status);
    status[0] & 1
}

#[test]
fn without_an_engine_the_link_is_down_and_nothing_waits() {
    let mut rig = Rig::new();
    rig.activate();
    assert_eq!(link(&rig.net), 1);
    rig.peer.lock().unwrap().socket = None;
    let signals = Arc::clone(&rig.signals);
    eventually("the driver is told", || {
        signals.config.load(Ordering::Acquire) == 1
    });
    assert_eq!(link(&rig.net), 0);
    // How far it was served is what the rings say.
    let used = |queue: u64| enabled(queue, 16).queue.used_ring() + 2;
    for (queue, index) in [(0, 7_u16), (1, 65_535)] {
        rig.memory
            .write_obj(index, GuestAddress(used(queue)))
            .unwrap();
    }
    let saved = rig.net.suspend();
    let stands: Vec<_> = saved
        .queues
        .iter()
        .map(|it| (it.queue, it.next_available, it.next_used))
        .collect();
    assert_eq!(stands, [(0, 7, 7), (1, 65_535, 65_535)]);
    rig.net.resume();
    rig.net.reset();
    rig.activate();
    rig.net.reset();
    assert_eq!(rig.counters.snapshot().pairs[0].host_failures, 1);
}

#[test]
fn the_figures_are_those_that_the_engine_has_counted() {
    let rig = Rig::new();
    let words: Vec<u8> = (1..=13_u64).flat_map(u64::to_ne_bytes).collect();
    std::os::unix::fs::FileExt::write_all_at(&rig.file, &words, MEMORY).unwrap();
    let counted = rig.counters.snapshot();
    assert_eq!(counted.link, NetLink::Rings);
    let pair = &counted.pairs[0];
    assert_eq!(
        (pair.kicks, pair.rx_frames, pair.rx_bytes, pair.rx_buffers),
        (1, 2, 3, 4)
    );
    assert_eq!(
        (pair.tx_frames, pair.tx_bytes, pair.tx_direct_bytes),
        (7, 8, 12)
    );
    assert_eq!(pair.rx_direct_bytes, 13);
    assert_eq!(
        (pair.interrupts, pair.interrupts_suppressed),
        (5 + 10, 6 + 11)
    );
    rig.meanwhile_said_tally();
}

impl Rig {
    /// The engine was told where to count.
    fn meanwhile_said_tally(mut self) {
        self.meanwhile(0, |_| ());
        self.said(|peer| {
            let (_, at, files) = peer.of(SET_TALLY)[0];
            assert_eq!(at[..], MEMORY.to_ne_bytes());
            assert_eq!(files.len(), 1);
        });
    }
}

#[test]
fn memory_that_is_shared_is_zeroes_again_for_all() {
    let rig = Rig::new();
    rig.memory.write_obj(7_u64, GuestAddress(1 << 20)).unwrap();
    memory::clear(&rig.memory).unwrap();
    let mut word = [1; 8];
    std::os::unix::fs::FileExt::read_exact_at(&rig.file, &mut word, 1 << 20).unwrap();
    assert_eq!(word, [0; 8]);
    assert_eq!(
        rig.memory.read_obj::<u64>(GuestAddress(1 << 20)).unwrap(),
        0
    );
}
