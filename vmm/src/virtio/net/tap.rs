//! The TAP behind the card: what it can do, and what is set on it.
//!
//! Offloads and header length belong to the whole device, queues to a descriptor each.
//!
//! A socket (datagrams or sequenced packets) may stand for a TAP: each message is a frame behind
//! the same 12-byte header, and its peer is taken to know all offloads.
use std::{
    io, mem,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::{Mutex, PoisonError},
};

use super::{NetError, features::Offloads, tried};

/// `struct virtio_net_hdr_v1`: as on the ring, so that it passes through untouched.
pub(super) const HEADER_BYTES: usize = 12;

/// All queues of one device.
#[derive(Debug)]
pub(super) struct Tap {
    queues: Vec<OwnedFd>,
    kind: Kind,
    can: Offloads,
    /// What is set. The kernel takes a lock of the whole host's (RTNL) to be told either, and to
    /// detach a queue waits for its CPUs: not for a driver that resets the card for nothing.
    offloads: Mutex<Option<Offloads>>,
    attached: Mutex<Vec<bool>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Tap { multi_queue: bool },
    Socket,
}

impl Tap {
    /// Checks the descriptors, finds out what the device can do, and sets it up: non-blocking,
    /// 12-byte headers, no offloads yet.
    pub(super) fn new(queues: Vec<OwnedFd>) -> Result<Tap, NetError> {
        let first = queues.first().ok_or(NetError::NoQueues)?;
        let kind = if is_socket(first)? {
            Kind::Socket
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
        if kind != Kind::Socket {
            tap.point_to_int(libc::TUNSETVNETHDRSZ, HEADER_BYTES as libc::c_int)
                .map_err(tried("set a TAP's virtio-net header to 12 bytes"))?;
            // Virtio 1 is little-endian whatever the host.
            tap.point_to_int(libc::TUNSETVNETLE, 1)
                .map_err(tried("set a TAP's virtio-net header to little-endian"))?;
        }
        tap.can = tap.probe()?;
        Ok(tap)
    }

    /// How many queue pairs it serves.
    pub(super) fn queues(&self) -> usize {
        self.queues.len()
    }

    /// A queue's descriptor; lives as long as the TAP.
    pub(super) fn descriptor(&self, queue: usize) -> RawFd {
        self.queues[queue].as_raw_fd()
    }

    /// What it can do.
    pub(super) fn offloads(&self) -> Offloads {
        self.can
    }

    /// Says what the guest takes from now on.
    pub(super) fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        if self.kind == Kind::Socket {
            return Ok(());
        }
        let mut set = self.offloads.lock().unwrap_or_else(PoisonError::into_inner);
        if *set == Some(offloads) {
            return Ok(());
        }
        let bits = libc::c_ulong::from(offloads.0);
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        check(unsafe { libc::ioctl(self.descriptor(0), libc::TUNSETOFFLOAD, bits) })?;
        *set = Some(offloads);
        Ok(())
    }

    /// Attaches a queue, so that the kernel gives it flows, or detaches it, which empties it.
    /// The first stays as it is: a device with one queue can't do either.
    pub(super) fn set_attached(&self, queue: usize, attached: bool) -> io::Result<()> {
        let mut all = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if queue == 0 || self.kind == Kind::Socket || all[queue] == attached {
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
            // It is so already.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            other => other?,
        }
        all[queue] = attached;
        Ok(())
    }

    /// Tries each offload: a kernel that does not know one refuses it.
    fn probe(&self) -> Result<Offloads, NetError> {
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

fn check(answer: libc::c_int) -> io::Result<()> {
    if answer < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
