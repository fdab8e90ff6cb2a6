//! The devices of a running VM, with their threads, over a small memory: what a snapshot restores.
mod checks;

pub(crate) use checks::SERVED;

use std::{
    fs::File,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener},
    },
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socketpair},
};
use slipgate_vmm::{
    GuestMemory, ThreadSetup,
    fake::Fabric,
    pci::{Root, Windows},
    snapshot::FunctionState,
    virtio::{
        VirtioDevice,
        balloon::{Balloon, BalloonConfig},
        block::{Cache, Disk, DiskConfig},
        net::{Net, NetConfig, NetCounters},
        rate::RateConfig,
        transport::VirtioPci,
        vsock::{Vsock, VsockConfig},
    },
};
use vm_memory::{Bytes as _, GuestAddress};

use crate::tape::Tape;

/// Numbers of the functions on the bus.
pub(crate) const NET: u8 = 1;
pub(crate) const DISK: u8 = 2;
pub(crate) const VSOCK: u8 = 3;
pub(crate) const BALLOON: u8 = 4;
/// Queue pairs of the card.
pub(crate) const PAIRS: usize = 2;
/// Length of the memory, which begins at address 0 and has nothing behind it.
pub(crate) const MEMORY_BYTES: usize = 0x4_0000;
const DISK_BYTES: u64 = 0x1_0000;
const WINDOWS: Windows = Windows {
    mmio32: 0xc000_0000..0xc010_0000,
    mmio64: 1 << 36..(1 << 36) + 0x10_0000,
};

/// Time for devices to serve what waits. A driver may have asked for what is never served.
const SERVED_WITHIN: Duration = Duration::from_millis(50);

/// A card with two queue pairs, a disk with two queues, vsock and a balloon.
pub(crate) struct Devices {
    pub(crate) root: Root,
    pub(crate) fabric: Arc<Fabric>,
    pub(crate) memory: Arc<GuestMemory>,
    /// The other ends of the card's sockets.
    peers: Vec<OwnedFd>,
}

impl Devices {
    pub(crate) fn new() -> Self {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]);
        let memory = Arc::new(memory.expect("memory"));
        let fabric: Arc<Fabric> = Arc::default();
        let threads = ThreadSetup::new(|_| Ok(()));
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let pairs = (0..PAIRS).map(|_| {
            let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags);
            pair.expect("a pair of sockets")
        });
        let (taps, peers) = pairs.unzip();
        let card = NetConfig::new([2, 0, 0, 0, 0, 1], 1500, taps);
        let net = Net::new(card, threads.clone(), NetCounters::new(PAIRS)).expect("a card");
        let disk = Disk::new(0, disk_config(), &threads, Arc::default()).expect("a disk");
        let vsock = VsockConfig {
            cid: 7,
            listener: listener(),
            connector: None,
        };
        let vsock = Vsock::new(vsock, &threads, Arc::default()).expect("a vsock device");
        let balloon = BalloonConfig { target_bytes: 0 };
        let balloon = Balloon::new(balloon, &threads, Arc::default()).expect("a balloon");
        threads.finish().expect("threads");
        let devices: [Box<dyn VirtioDevice>; 4] = [
            Box::new(net),
            Box::new(disk),
            Box::new(vsock),
            Box::new(balloon),
        ];
        let mut root = Root::new(WINDOWS);
        for device in devices {
            let function = VirtioPci::new(device, memory.clone(), fabric.clone(), fabric.clone());
            root.add(Box::new(function.expect("eventfds")))
                .expect("room");
        }
        Self {
            root,
            fabric,
            memory,
            peers,
        }
    }

    /// Has devices go on that were restored or saved in these states, until they have served what waits
    /// or [`SERVED_WITHIN`] is over. They rest then; returns what they have come to.
    fn serve_from(&self, states: &[FunctionState]) -> Vec<FunctionState> {
        self.root.resume();
        self.root.signal_again();
        let until = Instant::now() + SERVED_WITHIN;
        while checks::waits(states, &self.root.state().1, &self.content()) && Instant::now() < until
        {
            self.drain();
            thread::sleep(Duration::from_micros(50));
        }
        self.root.suspend();
        self.drain();
        self.root.state().1
    }

    /// Takes what the card has sent, so that it does not wait for room.
    fn drain(&self) {
        let mut frame = [0; 256];
        for peer in &self.peers {
            while recv(peer.as_raw_fd(), &mut frame, MsgFlags::MSG_DONTWAIT).is_ok() {}
        }
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        let written = self.memory.write_slice(bytes, GuestAddress(at as u64));
        written.expect("within the memory");
    }

    /// Returns all of the memory.
    pub(crate) fn content(&self) -> Vec<u8> {
        let mut content = vec![0; MEMORY_BYTES];
        let read = self.memory.read_slice(&mut content, GuestAddress(0));
        read.expect("the memory is there");
        content
    }
}

/// Restores devices, whoever wrote their states and the memory, and has them go on. What they have come
/// to then is restored in other devices, which go on from it.
pub(crate) fn go_on(tape: &mut Tape<'_>) {
    let patches: Vec<_> = (0..tape.u16()).map(|_| patch(tape)).collect();
    // Devices have a dozen threads: most inputs end here.
    let Ok((address, states)) = postcard::from_bytes::<(u32, Vec<FunctionState>)>(tape.rest())
    else {
        return;
    };
    let first = Devices::new();
    for (at, bytes) in patches {
        first.write(at, &bytes[..bytes.len().min(MEMORY_BYTES - at)]);
    }
    if let Err(error) = first.root.restore(address, &states) {
        assert!(!error.to_string().is_empty());
        return;
    }
    let after = first.serve_from(&states);
    checks::none_lost(&states, &after);
    let rested = first.content();
    let other = Devices::new();
    other.write(0, &rested);
    match other.root.restore(address, &after) {
        Ok(()) => {
            let again = other.serve_from(&after);
            checks::none_lost(&after, &again);
            checks::the_same(&after, &again, &rested, &other.content());
        }
        // A driver that said it had offered more than a ring has can be restored once.
        Err(error) => assert!(checks::is_overfull(&after), "{error}"),
    }
    assert!(rested == first.content(), "a device that rests has written");
    // In the machine that was saved they go on too.
    let later = first.serve_from(&after);
    checks::none_lost(&after, &later);
}

/// Reads a place of the memory, and what is there.
fn patch<'a>(tape: &mut Tape<'a>) -> (usize, &'a [u8]) {
    (usize::from(tape.u16()) * 8 % MEMORY_BYTES, tape.bytes())
}

/// Returns memory in the form that [`go_on`] reads: all that is not zero, in eights.
pub(crate) fn patches(content: &[u8]) -> Vec<u8> {
    let eights: Vec<&[u8]> = content.chunks(8).collect();
    let is_zero = |eight: &&[u8]| eight.iter().all(|byte| *byte == 0);
    let mut all = Vec::new();
    let (mut number, mut at) = (0_u16, 0);
    while at < eights.len() {
        if is_zero(&eights[at]) {
            at += 1;
            continue;
        }
        let run = eights[at..].iter().position(is_zero);
        let end = at + run.unwrap_or(eights.len() - at);
        all.extend(u16::try_from(at).expect("a small memory").to_be_bytes());
        all.extend(crate::tape::with_length(&eights[at..end].concat()));
        number += 1;
        at = end;
    }
    [&number.to_be_bytes()[..], &all].concat()
}

fn disk_config() -> DiskConfig {
    let file = File::from(memfd_create(c"disk", MFdFlags::MFD_CLOEXEC).expect("a file"));
    file.set_len(DISK_BYTES).expect("room for the file");
    DiskConfig {
        file,
        read_only: false,
        cache: Cache::WriteBack,
        queues: 2,
        rate: RateConfig::default(),
    }
}

/// A socket without a file, to which nobody connects.
fn listener() -> UnixListener {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("slipgate-fuzz-{}-{number}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).expect("a short name");
    let listener = UnixListener::bind_addr(&address).expect("a socket");
    listener.set_nonblocking(true).expect("a socket's flag");
    listener
}
