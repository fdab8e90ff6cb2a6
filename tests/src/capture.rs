//! A capture on a device, counted per flow as if segmented.
//!
//! Packet sockets see what a device receives before TC ingress and what it sends after TC egress
//! and before segmentation, so a capture on a guest's `eth0` and one on the uplink see one flow's
//! packets on either side of a NAT. PACKET_VNET_HDR gives each frame its segment size.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{
    accounting::FlowCounts,
    error::{Error, Result, Tried, checked, checked_len},
    frame::Packet,
    netns::NetNs,
    pcap::{LinkType, PcapWriter},
    sockets,
    tap::{FRAME_MAX, VNET_HDR_LEN, VnetHdr},
};

const RECEIVE_BUFFER_BYTES: i32 = 512 << 20;
/// Enough for all headers; the lengths are in them.
const SNAP_BYTES: usize = VNET_HDR_LEN + 256;
const PACKET_VNET_HDR: i32 = 15;
const POLL_MS: i32 = 20;
/// Frames between looks at the stop flag.
const BATCH: usize = 256;

/// Results of a capture.
#[derive(Clone, Debug, Default)]
pub struct Captured {
    /// Flows that the device received.
    pub received: FlowCounts,
    /// Flows that the device sent.
    pub sent: FlowCounts,
    /// Frames the capture itself missed; [`Capture::finish`] makes it an error.
    pub missed: u64,
}

/// A frame as it passed the device.
#[derive(Clone, Debug)]
pub struct CapturedFrame {
    /// When it passed, by the kernel's clock.
    pub at: SystemTime,
    /// Whether the device sent it; else it received it.
    pub sent: bool,
    /// Offload header of the frame.
    pub vnet: VnetHdr,
    /// The whole frame, from the Ethernet header on.
    pub bytes: Vec<u8>,
}

type Kept = Arc<Mutex<Vec<CapturedFrame>>>;

/// A running capture. [`Capture::finish`] takes the counts; a drop throws them away.
pub struct Capture {
    device: String,
    stop: Arc<AtomicBool>,
    kept: Kept,
    thread: Option<JoinHandle<io::Result<Captured>>>,
}

/// Frames to keep besides their counts.
enum Keep {
    Nothing,
    Pcap(PathBuf),
    Frames,
}

impl Capture {
    /// Starts capturing on `device` in `ns`.
    ///
    /// # Errors
    /// The packet socket cannot be opened on the device.
    pub fn start(ns: &NetNs, device: &str) -> Result<Capture> {
        Self::open(ns, device, Keep::Nothing)
    }

    /// Starts a capture that also stores whole frames: see [`Capture::frames`].
    ///
    /// # Errors
    /// The socket can't be opened.
    pub fn keeping(ns: &NetNs, device: &str) -> Result<Capture> {
        Self::open(ns, device, Keep::Frames)
    }

    /// Starts a capture that also writes whole frames to a pcap file.
    ///
    /// # Errors
    /// The socket or the file can't be opened.
    pub fn to_pcap(ns: &NetNs, device: &str, path: &Path) -> Result<Capture> {
        Self::open(ns, device, Keep::Pcap(path.to_owned()))
    }

    fn open(ns: &NetNs, device: &str, keep: Keep) -> Result<Capture> {
        let what = || format!("capture on `{device}` in {ns:?}");
        let missing = || Error::unexpected(format!("{}: there is no such device", what()));
        let ifindex = ns.ifindex(device).ok_or_else(missing)?;
        let socket = ns.run(|| packet_socket(ifindex)).tried(what())?;
        // Without a link-layer address it is a TUN: frames begin with the IP header.
        let ethernet = ns
            .ip(&format!("link show dev {device}"))?
            .contains("link/ether")
            || device == "lo";
        let link = if ethernet {
            LinkType::Ethernet
        } else {
            LinkType::Ip
        };
        let kept = Kept::default();
        let (pcap, keeps) = match keep {
            Keep::Nothing => (None, None),
            Keep::Pcap(path) => (Some(PcapWriter::create(&path, link).tried(what())?), None),
            Keep::Frames => (None, Some(kept.clone())),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let mut run = Run {
            socket,
            ethernet,
            pcap,
            kept: keeps,
            captured: Captured::default(),
        };
        let their_stop = stop.clone();
        let thread = ns.thread("capture", move || run.run(&their_stop));
        Ok(Capture {
            device: device.to_owned(),
            stop,
            kept,
            thread: Some(thread),
        })
    }

    /// Returns the frames so far, in order, of a capture that stores them.
    pub fn frames(&self) -> Vec<CapturedFrame> {
        locked(&self.kept).clone()
    }

    /// Stops the capture after all queued frames are counted.
    ///
    /// # Errors
    /// The capture missed frames.
    pub fn finish(mut self) -> Result<Captured> {
        self.stop.store(true, Ordering::SeqCst);
        let what = || format!("capture on `{}`", self.device);
        let Some(thread) = self.thread.take() else {
            return Err(Error::unexpected(format!("{}: it is not running", what())));
        };
        let ended = thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let captured = ended.tried(what())?;
        match captured.missed {
            0 => Ok(captured),
            missed => Err(Error::unexpected(format!(
                "{}: it missed {missed} frames",
                what()
            ))),
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn packet_socket(ifindex: u32) -> io::Result<OwnedFd> {
    // Nothing is received before the bind names the device.
    let socket = sockets::packet(libc::SOCK_RAW | libc::SOCK_NONBLOCK, 0)?;
    sockets::set(&socket, libc::SOL_PACKET, PACKET_VNET_HDR, 1)?;
    sockets::set_receive_buffer(&socket, RECEIVE_BUFFER_BYTES)?;
    sockets::bind_to_link(&socket, ifindex, libc::ETH_P_ALL as u16)?;
    // The first call has the kernel note the time of each frame; there is none yet.
    let _ = passed_at(&socket);
    Ok(socket)
}

/// When the frame passed that was read last.
fn passed_at(socket: &OwnedFd) -> io::Result<SystemTime> {
    const SIOCGSTAMPNS: libc::c_ulong = 0x8907;
    let mut at = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: SIOCGSTAMPNS writes a timespec.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGSTAMPNS, &raw mut at) })?;
    Ok(UNIX_EPOCH + Duration::new(at.tv_sec as u64, at.tv_nsec as u32))
}

fn locked(kept: &Kept) -> std::sync::MutexGuard<'_, Vec<CapturedFrame>> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Run {
    socket: OwnedFd,
    ethernet: bool,
    pcap: Option<PcapWriter>,
    kept: Option<Kept>,
    captured: Captured,
}

impl Run {
    fn run(&mut self, stop: &AtomicBool) -> io::Result<Captured> {
        let room = if self.pcap.is_some() || self.kept.is_some() {
            FRAME_MAX
        } else {
            SNAP_BYTES
        };
        let mut buffer = vec![0; room];
        loop {
            // Read before the queue is emptied: what came before the stop is counted.
            let last = stop.load(Ordering::SeqCst);
            let mut emptied = false;
            for _ in 0..BATCH {
                if !self.take_one(&mut buffer)? {
                    emptied = true;
                    break;
                }
            }
            match (emptied, last) {
                (true, true) => break,
                (true, false) => drop(sockets::poll(&self.socket, libc::POLLIN, POLL_MS)?),
                (false, _) => {}
            }
        }
        self.captured.missed += self.missed_by_kernel()?;
        if let Some(pcap) = &mut self.pcap {
            pcap.flush()?;
        }
        Ok(std::mem::take(&mut self.captured))
    }

    /// Counts one frame; false when there is none.
    fn take_one(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        // SAFETY: sockaddr_ll is plain data, for which zeroes are valid.
        let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut from_len = size_of_val(&from) as libc::socklen_t;
        // SAFETY: buffer and address are writable for the lengths given.
        let received = checked_len(unsafe {
            libc::recvfrom(
                self.socket.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                0,
                (&raw mut from).cast(),
                &raw mut from_len,
            )
        });
        let len = match received {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            // A GSO type that a vnet header can't say.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.captured.missed += 1;
                return Ok(true);
            }
            // The device went down or away; the capture goes on if it comes up again.
            Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => return Ok(true),
            Err(error) => return Err(error),
        };
        let (Some(vnet), Some(frame)) = (
            VnetHdr::parse(&buffer[..len]),
            buffer.get(VNET_HDR_LEN..len),
        ) else {
            return Ok(true);
        };
        let packet = match self.ethernet {
            true => Packet::of_ethernet(frame),
            false => Packet::of_ip(frame),
        };
        let sent = from.sll_pkttype == libc::PACKET_OUTGOING;
        let counts = match sent {
            true => &mut self.captured.sent,
            false => &mut self.captured.received,
        };
        counts.add(&vnet, packet.as_ref());
        if let Some(kept) = &self.kept {
            let bytes = frame.to_vec();
            let at = passed_at(&self.socket)?;
            let kept_frame = CapturedFrame {
                at,
                sent,
                vnet,
                bytes,
            };
            locked(kept).push(kept_frame);
        }
        if let Some(pcap) = &mut self.pcap {
            pcap.write(frame)?;
        }
        Ok(true)
    }

    fn missed_by_kernel(&self) -> io::Result<u64> {
        // struct tpacket_stats: packets, drops.
        let mut stats = [0u32; 2];
        let mut len = size_of_val(&stats) as libc::socklen_t;
        // SAFETY: the buffer is writable for the length given.
        checked(unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                stats.as_mut_ptr().cast(),
                &raw mut len,
            )
        })?;
        Ok(stats[1].into())
    }
}
