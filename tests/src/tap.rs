//! TAP and TUN queues with virtio-net headers, opened inside a namespace.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd as _, OwnedFd},
    sync::Arc,
};

use crate::{
    error::{Error, Result, Tried, checked, checked_len},
    netns::NetNs,
};

/// The guest's device in its own namespace.
pub const GUEST_DEVICE: &str = "eth0";

/// Length of the header in front of every frame: `struct virtio_net_hdr` without `num_buffers`.
pub const VNET_HDR_LEN: usize = 10;

/// The largest frame a TAP hands over: 64 KiB of IP, an Ethernet header with a tag, the vnet
/// header.
pub(crate) const FRAME_MAX: usize = 65535 + 18 + VNET_HDR_LEN;

/// `struct virtio_net_hdr` (virtio 1.2, 5.1.6), host byte order as Linux's TUN has it by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHdr {
    /// Flags, such as [`VnetHdr::NEEDS_CSUM`].
    pub flags: u8,
    /// Segmentation type: [`VnetHdr::GSO_NONE`], [`VnetHdr::GSO_TCPV4`], …
    pub gso_type: u8,
    /// Length of all headers, a hint.
    pub hdr_len: u16,
    /// Payload bytes per segment.
    pub gso_size: u16,
    /// Where checksumming starts, from the frame's first byte.
    pub csum_start: u16,
    /// Where the checksum goes, from `csum_start`.
    pub csum_offset: u16,
}

impl VnetHdr {
    /// Flag: the checksum field holds the pseudo-header's sum only.
    pub const NEEDS_CSUM: u8 = 1;
    /// Flag: the checksum was verified.
    pub const DATA_VALID: u8 = 2;
    /// GSO type: no segmentation.
    pub const GSO_NONE: u8 = 0;
    /// GSO type: TCP over IPv4.
    pub const GSO_TCPV4: u8 = 1;
    /// UDP fragmentation, the old UFO.
    pub const GSO_UDP: u8 = 3;
    /// GSO type: TCP over IPv6.
    pub const GSO_TCPV6: u8 = 4;
    /// GSO type: UDP segmentation, USO.
    pub const GSO_UDP_L4: u8 = 5;
    /// Flag in the type: a segment carries ECN's CWR.
    pub const GSO_ECN: u8 = 0x80;

    /// Reads the header at the start of `bytes`; `None` when they are too few.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let b: &[u8; VNET_HDR_LEN] = bytes.first_chunk()?;
        let half = |at: usize| u16::from_ne_bytes([b[at], b[at + 1]]);
        Some(VnetHdr {
            flags: b[0],
            gso_type: b[1],
            hdr_len: half(2),
            gso_size: half(4),
            csum_start: half(6),
            csum_offset: half(8),
        })
    }

    /// The header as the kernel reads it.
    pub fn to_bytes(self) -> [u8; VNET_HDR_LEN] {
        let mut out = [0; VNET_HDR_LEN];
        out[0] = self.flags;
        out[1] = self.gso_type;
        let halves = [
            self.hdr_len,
            self.gso_size,
            self.csum_start,
            self.csum_offset,
        ];
        for (slot, half) in out[2..].chunks_exact_mut(2).zip(halves) {
            slot.copy_from_slice(&half.to_ne_bytes());
        }
        out
    }

    /// Whether the frame is a GSO frame, which represents several segments.
    pub fn is_gso(&self) -> bool {
        self.gso_type & !Self::GSO_ECN != Self::GSO_NONE
    }
}

/// Options for opening a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TapOptions {
    /// Frames with an Ethernet header (TAP), or bare IP packets (TUN).
    pub(crate) ethernet: bool,
    /// A vnet header before each frame; without it there are no offloads either.
    pub(crate) vnet_hdr: bool,
    /// The fd's side takes partial checksums and GSO frames.
    pub(crate) offloads: bool,
    /// Queues, each with a descriptor; above 1 the device is made IFF_MULTI_QUEUE.
    pub(crate) queues: usize,
}

/// One queue of a TAP or TUN device, non-blocking. The device goes when its last queue is closed.
#[derive(Clone, Debug)]
pub struct TapQueue {
    fd: Arc<OwnedFd>,
    vnet_hdr: bool,
    uso: bool,
}

/// Time after which a thread that waits looks whether it is to end, ms.
const LOOKS_EVERY_MS: i32 = 50;

const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const OFFLOADS: libc::c_ulong = 0x01 | 0x02 | 0x04 | 0x08; // CSUM, TSO4, TSO6, TSO_ECN
const OFFLOADS_USO: libc::c_ulong = 0x20 | 0x40; // USO4 and USO6, only together; Linux 6.2

impl TapQueue {
    /// Makes device `name` in `ns` and opens its queues.
    pub(crate) fn open(ns: &NetNs, name: &str, options: TapOptions) -> Result<Vec<TapQueue>> {
        let queues = ns.run(|| -> io::Result<Vec<TapQueue>> {
            (0..options.queues.max(1))
                .map(|_| open_queue(name, options))
                .collect()
        });
        queues.tried(format!("make the TAP `{name}` in {ns:?}"))
    }

    /// Makes a TAP without offloads, whose other end is the caller's alone, as a VMM's is.
    ///
    /// # Errors
    /// The device can't be made.
    pub fn alone(ns: &NetNs, name: &str) -> Result<TapQueue> {
        Self::single(ns, name, false)
    }

    /// The same with offloads.
    pub(crate) fn offloading(ns: &NetNs, name: &str) -> Result<TapQueue> {
        Self::single(ns, name, true)
    }

    fn single(ns: &NetNs, name: &str, offloads: bool) -> Result<TapQueue> {
        let options = TapOptions {
            ethernet: true,
            vnet_hdr: true,
            offloads,
            queues: 1,
        };
        let queue = Self::open(ns, name, options)?.pop();
        queue.ok_or_else(|| Error::unexpected(format!("the TAP `{name}` has no queue")))
    }

    /// A queue that is no device's: both ends of a pair of sockets that carry frames with their vnet
    /// headers as messages. What is written into one is read from the other.
    ///
    /// # Errors
    /// The sockets can't be made.
    pub(crate) fn pair() -> Result<[TapQueue; 2]> {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let mut ends = [-1; 2];
        // SAFETY: the array takes the two descriptors.
        checked(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) })
            .tried("make a pair of sockets for frames")?;
        Ok(ends.map(|end| TapQueue {
            // SAFETY: a fresh descriptor that nothing else owns.
            fd: Arc::new(unsafe { OwnedFd::from_raw_fd(end) }),
            vnet_hdr: true,
            uso: false,
        }))
    }

    /// Whether frames have a vnet header in front.
    pub fn has_vnet_hdr(&self) -> bool {
        self.vnet_hdr
    }

    /// Whether UDP GSO frames pass whole; the kernel's TUN knows them from 6.2 on.
    pub fn takes_udp_gso(&self) -> bool {
        self.uso
    }

    /// The descriptor, non-blocking, for `poll` and for generators that write frames by themselves.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Reads one frame, preceded by its vnet header.
    ///
    /// # Errors
    /// `WouldBlock` if there is none.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the buffer is writable for its length.
        checked_len(unsafe {
            libc::read(
                self.fd.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
            )
        })
    }

    /// Writes one frame, preceded by its vnet header.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn write(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: the frame is readable for its length.
        checked_len(unsafe { libc::write(self.fd.as_raw_fd(), frame.as_ptr().cast(), frame.len()) })
            .map(drop)
    }

    /// As [`TapQueue::write`], of a pair's end: waits while it is full, as a VMM leaves a frame in its
    /// ring, until `is_over`. A TAP is never full.
    ///
    /// # Errors
    /// The kernel refuses the frame.
    pub(crate) fn write_waiting(&self, frame: &[u8], is_over: impl Fn() -> bool) -> io::Result<()> {
        loop {
            match self.write(frame) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !is_over() => {
                    self.wait(libc::POLLOUT);
                }
                result => return result,
            }
        }
    }

    /// Waits for events of `poll`, for a while at most: [`LOOKS_EVERY_MS`].
    pub(crate) fn wait(&self, events: libc::c_short) {
        let mut waits = libc::pollfd {
            fd: self.fd.as_raw_fd(),
            events,
            revents: 0,
        };
        // SAFETY: one struct, writable.
        unsafe { libc::poll(&raw mut waits, 1, LOOKS_EVERY_MS) };
    }
}

fn open_queue(name: &str, options: TapOptions) -> io::Result<TapQueue> {
    let fd = OwnedFd::from(
        File::options()
            .read(true)
            .write(true)
            .open("/dev/net/tun")?,
    );
    let mut flags = libc::IFF_NO_PI
        | if options.ethernet {
            libc::IFF_TAP
        } else {
            libc::IFF_TUN
        };
    if options.vnet_hdr {
        flags |= libc::IFF_VNET_HDR;
    }
    if options.queues > 1 {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    // SAFETY: ifreq is plain data, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the name is above 15 bytes",
        ));
    }
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = byte as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = flags as i16;
    // SAFETY: the request outlives the call and is the type TUNSETIFF takes.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
    let mut uso = false;
    if options.vnet_hdr {
        let wanted = if options.offloads { OFFLOADS } else { 0 };
        let set = |bits: libc::c_ulong| {
            // SAFETY: TUNSETOFFLOAD takes its argument by value.
            checked(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, bits) })
        };
        uso = options.offloads && set(wanted | OFFLOADS_USO).is_ok();
        if !uso {
            set(wanted)?;
        }
    }
    // SAFETY: F_SETFL on our own descriptor.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })?;
    Ok(TapQueue {
        fd: Arc::new(fd),
        vnet_hdr: options.vnet_hdr,
        uso,
    })
}
