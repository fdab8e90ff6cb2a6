//! A Linux guest behind a stream socket: a namespace with a real TCP stack, and what QEMU does for
//! `-netdev stream` between them. Each frame is preceded by its length, 32 bits, big-endian.

use std::{
    io::{Read, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use crate::{
    dhcp::{self, Lease},
    error::{Result, Tried},
    frame::Mac,
    netns::NetNs,
    tap::{FRAME_MAX, GUEST_DEVICE, TapQueue, VNET_HDR_LEN},
};

const MAC: Mac = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];

/// A guest that is connected to a socket. Its connection ends on drop.
pub struct SocketGuest {
    /// Network namespace of the guest.
    pub ns: NetNs,
    tap: TapQueue,
    /// `None` only while it is made anew.
    wire: Option<StreamWire>,
}

impl SocketGuest {
    /// Connects a guest to a socket. It has no address yet.
    ///
    /// # Errors
    /// Nobody listens, or the guest can't be made.
    pub fn connect(path: &Path) -> Result<Self> {
        let connecting = || format!("connect a guest to {}", path.display());
        let stream = UnixStream::connect(path).tried(connecting())?;
        Self::over(stream)
    }

    /// Makes a guest with this connection. It has no address yet.
    ///
    /// # Errors
    /// The guest can't be made.
    pub fn over(stream: UnixStream) -> Result<Self> {
        Self::with(stream, |ns| TapQueue::alone(ns, GUEST_DEVICE))
    }

    /// The same, as libkrun has it: the guest leaves checksums and segments to its card, and what it says
    /// about them does not pass the stream, which has no place for it.
    ///
    /// # Errors
    /// The guest can't be made.
    pub fn of_libkrun(stream: UnixStream) -> Result<Self> {
        Self::with(stream, |ns| TapQueue::offloading(ns, GUEST_DEVICE))
    }

    fn with(stream: UnixStream, tap: impl FnOnce(&NetNs) -> Result<TapQueue>) -> Result<Self> {
        let ns = NetNs::new("socket-guest")?;
        let tap = tap(&ns)?;
        let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
        // Its MTU is that of its lease.
        ns.ip(&format!("link set {GUEST_DEVICE} address {mac} up"))?;
        let wire = Some(StreamWire::over(stream, tap.clone())?);
        Ok(Self { ns, tap, wire })
    }

    /// Cuts the connection wherever it is and makes another, as a VMM does that connects again. The guest's
    /// stack goes on.
    ///
    /// # Errors
    /// Nobody listens.
    pub fn reconnect(&mut self, path: &Path) -> Result<()> {
        self.wire = None;
        self.wire = Some(StreamWire::connect(path, self.tap.clone())?);
        Ok(())
    }

    /// Takes a lease by DHCP and applies it: address, route, MTU.
    ///
    /// # Errors
    /// No lease within `timeout`, or the kernel refuses a setting.
    pub fn dhcp(&self, timeout: Duration) -> Result<Lease> {
        let lease = dhcp::acquire(&self.ns, GUEST_DEVICE, MAC, timeout)?;
        dhcp::apply(&self.ns, GUEST_DEVICE, &lease)?;
        Ok(lease)
    }

    /// Runs `f` inside the guest: see [`NetNs::run`].
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.ns.run(f)
    }
}

impl Drop for SocketGuest {
    fn drop(&mut self) {
        self.ns.kill_processes();
    }
}

/// The threads between a queue of frames and a stream socket. The connection ends on drop.
pub(crate) struct StreamWire {
    stream: UnixStream,
    has_ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl StreamWire {
    /// Connects the queue to a socket.
    ///
    /// # Errors
    /// Nobody listens.
    pub(crate) fn connect(path: &Path, queue: TapQueue) -> Result<Self> {
        let connecting = || format!("connect a guest to {}", path.display());
        let stream = UnixStream::connect(path).tried(connecting())?;
        Self::over(stream, queue)
    }

    /// Has this connection for the queue.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn over(stream: UnixStream, queue: TapQueue) -> Result<Self> {
        let has_ended = Arc::new(AtomicBool::new(false));
        let copy = || stream.try_clone().tried("copy a guest's connection");
        let (to, from) = (copy()?, copy()?);
        let [ended, over] = [has_ended.clone(), has_ended.clone()];
        let (out, into) = (queue.clone(), queue);
        let threads = vec![
            std::thread::spawn(move || send(&out, to, &ended)),
            std::thread::spawn(move || receive(&into, from, &over)),
        ];
        Ok(Self {
            stream,
            has_ended,
            threads,
        })
    }
}

impl Drop for StreamWire {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Relaxed);
        let _ = self.stream.shutdown(Shutdown::Both);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Moves what the stack sends into the stream, until either has ended.
fn send(tap: &TapQueue, mut stream: UnixStream, has_ended: &AtomicBool) {
    let mut buffer = vec![0; FRAME_MAX];
    let mut framed = Vec::new();
    while !has_ended.load(Ordering::Relaxed) {
        let Ok(len) = tap.read(&mut buffer) else {
            tap.wait(libc::POLLIN);
            continue;
        };
        // The other end of a pair of sockets is closed.
        let Some(frame) = buffer.get(VNET_HDR_LEN..len) else {
            return;
        };
        framed.clear();
        framed.extend_from_slice(&(frame.len() as u32).to_be_bytes());
        framed.extend_from_slice(frame);
        if stream.write_all(&framed).is_err() {
            return;
        }
    }
}

/// Moves what comes from the stream to the stack, until the stream has ended.
fn receive(tap: &TapQueue, stream: UnixStream, has_ended: &AtomicBool) {
    let mut stream = std::io::BufReader::with_capacity(1 << 18, stream);
    let mut frame = vec![0; FRAME_MAX];
    loop {
        let mut len = [0; 4];
        if stream.read_exact(&mut len).is_err() {
            return;
        }
        let end = VNET_HDR_LEN + u32::from_be_bytes(len) as usize;
        assert!(
            end <= frame.len(),
            "a frame of {} bytes",
            end - VNET_HDR_LEN
        );
        if stream.read_exact(&mut frame[VNET_HDR_LEN..end]).is_err() {
            return;
        }
        // A frame for which there is no room waits, as in QEMU.
        let _ = tap.write_waiting(&frame[..end], || has_ended.load(Ordering::Relaxed));
    }
}
