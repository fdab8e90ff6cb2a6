//! The TAP behind the card: its capabilities and its settings.
//!
//! Offloads and header length belong to the whole device; attachment belongs to each queue.
//!
//! A socket (datagrams or sequenced packets) may take the place of a TAP: each message is a frame
//! behind the same 12-byte header, and its peer accepts all offloads. Where a TAP gets
//! TUNSETOFFLOAD, the peer gets a message of four bytes, the same bits, little-endian: it may use
//! these offloads from then on, and none before the first such message.
//!
//! Or the peer takes the rings themselves ([`super::rings`]), and is told of offloads there.
use std::{
    io, mem,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::{Mutex, PoisonError},
};

use super::{IoMethod, NetError, counters::NetLink, features::Offloads, tried};

/// Length of `struct virtio_net_hdr_v1`, bytes. The header is the same on the ring and on the TAP,
/// so it passes through unchanged.
pub(super) const HEADER_BYTES: usize = 12;
/// Time limit for a socket's peer to take a message, ms.
const TOLD_WITHIN_MS: libc::c_int = 1_000;

/// All queues of one device.
#[derive(Debug)]
pub(super) struct Tap {
    queues: Vec<OwnedFd>,
    kind: Kind,
    can: Offloads,
    /// Offloads that are set. To set them, or to attach a queue, the kernel takes a lock of the
    /// whole host (RTNL), and to detach a queue it waits for all CPUs. So a setting that is in
    /// effect already is not made again: a driver that resets the card in a loop must not cost
    /// that.
    offloads: Mutex<Option<Offloads>>,
    attached: Mutex<Vec<bool>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Tap {
        multi_queue: bool,
    },
    Socket,
    /// A socket whose peer serves the rings.
    Rings,
}

impl Tap {
    /// Checks the descriptors, probes the device's offloads, and configures it: non-blocking, 12-byte
    /// headers, no offloads yet. `gives_rings`: whether the peer of a socket serves the rings.
    ///
    /// # Errors
    /// There is no descriptor, one is no suitable TAP, or the host refuses a setting.
    pub(super) fn new(queues: Vec<OwnedFd>, gives_rings: bool) -> Result<Tap, NetError> {
        let first = queues.first().ok_or(NetError::NoQueues)?;
        let kind = if is_socket(first)? {
            if gives_rings {
                Kind::Rings
            } else {
                Kind::Socket
            }
        } else {
            tap_kind(first)?
        };
        if queues.len() > 1 && kind == (Kind::Tap { multi_queue: false }) {
            return Err(NetError::OneQueue {
                wanted: queues.len(),
            });
        }
        for queue in &queues {
            set_non_blocking(queue).map_err(tried("make a TAP descriptor non-blocking"))?;
        }
        let mut tap = Tap {
            attached: Mutex::new(vec![true; queues.len()]),
            queues,
            kind,
            can: Offloads::default(),
            offloads: Mutex::default(),
        };
        if matches!(kind, Kind::Tap { .. }) {
            tap.point_to_int(libc::TUNSETVNETHDRSZ, HEADER_BYTES as libc::c_int)
                .map_err(tried("set a TAP's virtio-net header to 12 bytes"))?;
            // Virtio 1 is little-endian whatever the host is.
            tap.point_to_int(libc::TUNSETVNETLE, 1)
                .map_err(tried("set a TAP's virtio-net header to little-endian"))?;
        }
        tap.can = tap.probe()?;
        Ok(tap)
    }

    /// Returns what the card sends its frames to.
    pub(super) fn link(&self) -> NetLink {
        match self.kind {
            Kind::Tap { .. } => NetLink::Tap,
            Kind::Socket => NetLink::Socket,
            Kind::Rings => NetLink::Rings,
        }
    }

    /// Returns the number of queue pairs that it serves.
    pub(super) fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Returns a queue's descriptor. It is valid as long as the TAP.
    pub(super) fn descriptor(&self, queue: usize) -> RawFd {
        self.queues[queue].as_raw_fd()
    }

    /// Returns a copy of the socket whose peer serves the rings.
    ///
    /// # Errors
    /// The host has no descriptor for it.
    pub(super) fn socket(&self) -> io::Result<UnixStream> {
        Ok(self.queues[0].try_clone()?.into())
    }

    /// Returns the offloads that the device supports.
    pub(super) fn offloads(&self) -> Offloads {
        self.can
    }

    /// Returns the offloads that are set.
    pub(super) fn set(&self) -> Offloads {
        let set = self.offloads.lock().unwrap_or_else(PoisonError::into_inner);
        set.unwrap_or_default()
    }

    /// Returns the method of reading and writing frames. In a batch of io_uring, the peer of a socket
    /// may make room between two frames, so that the second one overtakes the first; one call for each
    /// frame keeps their order.
    pub(super) fn method(&self, wanted: IoMethod) -> IoMethod {
        match (self.kind, wanted) {
            (Kind::Socket, IoMethod::Auto) => IoMethod::Vectored,
            (_, wanted) => wanted,
        }
    }

    /// Sets the offloads that the guest accepts from now on.
    ///
    /// # Errors
    /// The host refuses them.
    pub(super) fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        let mut set = self.offloads.lock().unwrap_or_else(PoisonError::into_inner);
        if *set == Some(offloads) {
            return Ok(());
        }
        match self.kind {
            Kind::Socket => self.tell(offloads)?,
            Kind::Tap { .. } => {
                let bits = libc::c_ulong::from(offloads.0);
                // SAFETY: TUNSETOFFLOAD takes its argument by value.
                check(unsafe { libc::ioctl(self.descriptor(0), libc::TUNSETOFFLOAD, bits) })?;
            }
            Kind::Rings => {}
        }
        *set = Some(offloads);
        Ok(())
    }

    /// Tells a socket's peer. The queue may be full of frames, of which the peer takes some soon.
    fn tell(&self, offloads: Offloads) -> io::Result<()> {
        let message = offloads.0.to_le_bytes();
        let fd = self.descriptor(0);
        loop {
            // SAFETY: the kernel reads as many bytes as the message has.
            let sent = unsafe { libc::write(fd, message.as_ptr().cast(), message.len()) };
            let error = match sent {
                0.. => return Ok(()),
                _ => io::Error::last_os_error(),
            };
            match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => await_room(fd)?,
                _ => return Err(error),
            }
        }
    }

    /// Attaches a queue, so that the kernel gives it flows, or detaches it, which empties it. The
    /// first queue stays attached: a device with one queue can do neither.
    ///
    /// # Errors
    /// The host refuses it.
    pub(super) fn set_attached(&self, queue: usize, attached: bool) -> io::Result<()> {
        let mut all = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if queue == 0 || !matches!(self.kind, Kind::Tap { .. }) || all[queue] == attached {
            return Ok(());
        }
        let flag = if attached {
            libc::IFF_ATTACH_QUEUE
        } else {
            libc::IFF_DETACH_QUEUE
        };
        // SAFETY: an ifreq is plain data, for which zeroes are valid.
        let mut request: libc::ifreq = unsafe { mem::zeroed() };
        request.ifr_ifru.ifru_flags = flag as libc::c_short;
        let fd = self.descriptor(queue);
        // SAFETY: the request outlives the call and is the type TUNSETQUEUE takes.
        let done = check(unsafe { libc::ioctl(fd, libc::TUNSETQUEUE, &raw mut request) });
        match done {
            // The queue is in that state already.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            other => other?,
        }
        all[queue] = attached;
        Ok(())
    }

    /// Tries each offload. A kernel that does not know one refuses it.
    fn probe(&self) -> Result<Offloads, NetError> {
        match self.kind {
            Kind::Socket => return Ok(Offloads::all()),
            Kind::Rings => return Ok(Offloads::of_rings()),
            Kind::Tap { .. } => {}
        }
        let mut can = Offloads::default();
        for offload in Offloads::ALL {
            let attempt = can.with(*offload);
            match self.set_offloads(attempt) {
                Ok(()) => can = attempt,
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(error) => return Err(tried("probe a TAP's offloads")(error)),
            }
        }
        self.set_offloads(Offloads::default())
            .map_err(tried("turn a TAP's offloads off"))?;
        Ok(can.consistent())
    }

    fn point_to_int(&self, request: libc::Ioctl, value: libc::c_int) -> io::Result<()> {
        // SAFETY: these requests read an int, which outlives the call.
        check(unsafe { libc::ioctl(self.descriptor(0), request, &raw const value) })
    }
}

fn tap_kind(queue: &OwnedFd) -> Result<Kind, NetError> {
    // SAFETY: an ifreq is plain data, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    // SAFETY: the request outlives the call and is the type TUNGETIFF fills.
    check(unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })
        .map_err(NetError::NotATap)?;
    // SAFETY: TUNGETIFF sets the flags; any bits are valid.
    let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
    let wanted = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if flags & wanted != wanted {
        return Err(NetError::TapFlags { flags });
    }
    Ok(Kind::Tap {
        multi_queue: flags & libc::IFF_MULTI_QUEUE != 0,
    })
}

fn is_socket(fd: &OwnedFd) -> Result<bool, NetError> {
    // SAFETY: a stat is plain data, for which zeroes are valid.
    let mut stat: libc::stat = unsafe { mem::zeroed() };
    // SAFETY: the buffer outlives the call.
    check(unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) }).map_err(NetError::NotATap)?;
    Ok(stat.st_mode & libc::S_IFMT == libc::S_IFSOCK)
}

fn set_non_blocking(fd: &OwnedFd) -> io::Result<()> {
    // SAFETY: F_GETFL has no argument.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    check(flags)?;
    // SAFETY: F_SETFL takes an int.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) })
}

/// Waits until a socket takes a message.
///
/// # Errors
/// Its peer takes nothing.
fn await_room(fd: RawFd) -> io::Result<()> {
    let mut wanted = libc::pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: one element, which outlives the call.
    match unsafe { libc::poll(&raw mut wanted, 1, TOLD_WITHIN_MS) } {
        0 => Err(io::ErrorKind::TimedOut.into()),
        1.. => Ok(()),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            error => Err(error),
        },
    }
}

fn check(answer: libc::c_int) -> io::Result<()> {
    if answer < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
