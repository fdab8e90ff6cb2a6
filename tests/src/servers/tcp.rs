use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use sha2::{Digest, Sha256};

use super::{Address, Running};
use crate::{
    error::{Result, Tried, checked},
    netns::NetNs,
    pattern::Pattern,
    streams::{BUFFER, Order, Receipt, drain, hexadecimal, pour, receive, send},
};

/// Treatment of a connection by a TCP server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TcpService {
    /// Sends received bytes back until the client ends.
    Echo,
    /// Echoes, except that a ClientHello is answered as by [`crate::tls::answer_to`].
    EchoTls,
    /// Takes an order for a stream of predictable bytes, either way: see
    /// [`crate::clients::tcp::download`] and [`upload`](crate::clients::tcp::upload).
    Streams,
    /// The same, but a stream is slow, and does not end, until [`TcpServer::release`].
    HeldStreams,
    /// Reads until the client ends, and answers with the SHA-256 in hexadecimal digits and a
    /// newline: for clients that can't send an order.
    Digest,
    /// Closes at once, in the accepting thread: the far end of connect-close measurements.
    Close,
    /// Accepts and holds, reading nothing.
    Hold,
    /// Sends these bytes and closes.
    Greet(Vec<u8>),
    /// Accepts and resets at once.
    Reset,
}

/// Between two pieces of a stream that is held.
const HELD_PAUSE: Duration = Duration::from_millis(10);

#[derive(Default)]
struct Seen {
    accepted: AtomicU64,
    /// The server's own handles, by connection number, to end them on drop.
    open: Mutex<HashMap<u64, TcpStream>>,
    peers: Mutex<Vec<SocketAddr>>,
    /// Whether held streams may end.
    released: AtomicBool,
}

/// A TCP server. On drop it stops and resets its open connections.
pub struct TcpServer<I: Address = Ipv4Addr> {
    address: I::Socket,
    listener: TcpListener,
    seen: Arc<Seen>,
    running: Running,
}

impl<I: Address> TcpServer<I> {
    /// Listens on `address` in `ns` (port 0: any) with a backlog of 4096.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn start(ns: &NetNs, address: (I, u16), service: TcpService) -> Result<Self> {
        let bound = ns.run(|| TcpListener::bind((address.0.into(), address.1)));
        let listener = bound.tried(format!("listen on {}:{} in {ns:?}", address.0, address.1))?;
        // SAFETY: listen on our own socket; a second call only changes the backlog.
        checked(unsafe { libc::listen(listener.as_raw_fd(), 4096) }).tried("set the backlog")?;
        let local = listener.local_addr().tried("read the server's address")?;
        let (seen, stop) = (Arc::new(Seen::default()), Arc::new(AtomicBool::new(false)));
        let accepting = listener.try_clone().tried("clone the listener")?;
        let (their_seen, their_stop) = (seen.clone(), stop.clone());
        let thread = ns.thread("tcp-server", move || {
            accept_all(&accepting, &service, &their_seen, &their_stop);
        });
        let address = address.0.at(local.port());
        let running = Running {
            stop,
            threads: vec![thread],
        };
        Ok(TcpServer {
            address,
            listener,
            seen,
            running,
        })
    }

    /// The address it listens on.
    pub fn address(&self) -> I::Socket {
        self.address
    }

    /// Returns the number of connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.seen.accepted.load(Ordering::Relaxed)
    }

    /// Returns the number of connections that are still served.
    pub fn open(&self) -> usize {
        let open = self.seen.open.lock();
        open.unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Lets the streams of [`TcpService::HeldStreams`] go on at full speed, and end.
    pub fn release(&self) {
        self.seen.released.store(true, Ordering::SeqCst);
    }

    /// Returns the peers of all connections so far, in order: the guests' translated addresses.
    pub fn peers(&self) -> Vec<I::Socket> {
        let peers = self.seen.peers.lock();
        let peers = peers.unwrap_or_else(PoisonError::into_inner);
        peers.iter().filter_map(|peer| I::of(*peer)).collect()
    }
}

impl<I: Address> Drop for TcpServer<I> {
    fn drop(&mut self) {
        self.running.stop.store(true, Ordering::SeqCst);
        self.release();
        // Wakes the thread in accept.
        // SAFETY: shutdown on our own socket.
        unsafe { libc::shutdown(self.listener.as_raw_fd(), libc::SHUT_RDWR) };
        self.running.stop();
        for (_, stream) in self
            .seen
            .open
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .drain()
        {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn accept_all(listener: &TcpListener, service: &TcpService, seen: &Arc<Seen>, stop: &AtomicBool) {
    while !stop.load(Ordering::SeqCst) {
        let (stream, peer) = match listener.accept() {
            Ok(accepted) => accepted,
            // The client was gone before we came to it; or we are told to stop.
            Err(_) => continue,
        };
        seen.accepted.fetch_add(1, Ordering::Relaxed);
        if *service == TcpService::Close {
            continue;
        }
        seen.peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(peer);
        let (Ok(kept), number) = (stream.try_clone(), seen.accepted.load(Ordering::Relaxed)) else {
            continue;
        };
        seen.open
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(number, kept);
        let (service, seen) = (service.clone(), seen.clone());
        let serving = std::thread::Builder::new()
            .name("tcp-connection".into())
            .spawn(move || {
                // The client sees how it ended; a client that went away is its own business.
                let _ = serve(&stream, &service, &seen.released);
                if service != TcpService::Hold {
                    seen.open
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .remove(&number);
                }
            });
        drop(serving);
    }
}

fn serve(stream: &TcpStream, service: &TcpService, released: &AtomicBool) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = stream;
    match service {
        TcpService::Close | TcpService::Hold => Ok(()),
        TcpService::Greet(bytes) => stream.write_all(bytes),
        TcpService::Reset => reset_on_close(stream),
        TcpService::Echo => {
            let mut buffer = vec![0; BUFFER];
            loop {
                match stream.read(&mut buffer)? {
                    0 => return Ok(()),
                    len => stream.write_all(&buffer[..len])?,
                }
            }
        }
        TcpService::EchoTls => {
            let mut buffer = vec![0; BUFFER];
            let mut answer = crate::tls::Answer::default();
            loop {
                match stream.read(&mut buffer)? {
                    0 => return Ok(()),
                    len => {
                        answer.to(&mut buffer[..len]);
                        stream.write_all(&buffer[..len])?;
                    }
                }
            }
        }
        TcpService::Digest => {
            let mut digest = Sha256::new();
            let mut buffer = [0; 16_384];
            loop {
                match stream.read(&mut buffer)? {
                    0 => break,
                    n => digest.update(&buffer[..n]),
                }
            }
            writeln!(stream, "{}", hexadecimal(&digest.finalize()))
        }
        TcpService::Streams | TcpService::HeldStreams => match Order::read(&mut stream)? {
            Order::Send { len, seed } => {
                if *service == TcpService::HeldStreams {
                    let mut held = Held::new(stream, len, released);
                    send(&mut held, len, Pattern::new(seed))?;
                } else {
                    send(&mut stream, len, Pattern::new(seed))?;
                }
                stream.shutdown(Shutdown::Write)?;
                // Wait for the client's end, so that nothing of it meets a closed socket.
                let _ = stream.read(&mut [0; 1]);
                Ok(())
            }
            Order::Receive { len, seed } => {
                let receipt = if *service == TcpService::HeldStreams {
                    receive(
                        &mut Held::new(stream, len, released),
                        len,
                        Pattern::new(seed),
                    )?
                } else {
                    receive(&mut stream, len, Pattern::new(seed))?
                };
                stream.write_all(&Receipt::to_bytes(receipt))
            }
            Order::Pour => pour(&mut stream),
            Order::Drain => {
                let bytes = drain(&mut stream)?;
                stream.write_all(
                    &Receipt {
                        bytes,
                        sha256: [0; 32],
                    }
                    .to_bytes(),
                )
            }
        },
    }
}

/// A connection whose stream of `left` bytes more is carried in pieces, with a pause before each, and
/// whose last byte waits, until it is released.
struct Held<'a> {
    stream: &'a TcpStream,
    left: u64,
    released: &'a AtomicBool,
}

impl<'a> Held<'a> {
    fn new(stream: &'a TcpStream, left: u64, released: &'a AtomicBool) -> Self {
        Self {
            stream,
            left,
            released,
        }
    }

    /// Waits until bytes may be carried, and returns how many of `wanted`.
    fn turn(&self, wanted: usize) -> usize {
        loop {
            if self.released.load(Ordering::SeqCst) {
                return wanted;
            }
            std::thread::sleep(HELD_PAUSE);
            let but_last = self.left.saturating_sub(1);
            if but_last > 0 {
                return wanted.min(usize::try_from(but_last).unwrap_or(usize::MAX));
            }
        }
    }

    fn carried(&mut self, bytes: usize) -> usize {
        self.left = self.left.saturating_sub(bytes as u64);
        bytes
    }
}

impl Read for Held<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = self.turn(out.len());
        let read = self.stream.read(&mut out[..len])?;
        Ok(self.carried(read))
    }
}

impl Write for Held<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.turn(bytes.len());
        let written = self.stream.write(&bytes[..len])?;
        Ok(self.carried(written))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn reset_on_close(stream: &TcpStream) -> io::Result<()> {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // SAFETY: the option value is a `linger` and its size is given.
    checked(unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as libc::socklen_t,
        )
    })
    .map(drop)
}
