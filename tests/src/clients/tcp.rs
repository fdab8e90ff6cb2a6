//! TCP clients: connect-close, request-response, verified streams, and how a connect ends.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use crate::{
    error::{Error, Result, Tried, checked},
    pattern::Pattern,
    sockets,
    streams::{BUFFER, Order, Receipt, receive, send},
};

/// Outcome of a connect, with the time until then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectOutcome {
    /// The handshake was completed.
    Connected(Duration),
    /// The peer answered with RST.
    Refused(Duration),
    /// An ICMP error came (or there is no route): the errno.
    Unreachable(i32, Duration),
    /// No answer arrived in time.
    TimedOut(Duration),
}

/// Connects and returns the outcome.
///
/// # Errors
/// The failure says nothing about the network.
pub fn connect_outcome(
    address: impl Into<SocketAddr>,
    timeout: Duration,
) -> Result<ConnectOutcome> {
    let address = address.into();
    let started = Instant::now();
    let connected = TcpStream::connect_timeout(&address, timeout);
    let took = started.elapsed();
    match connected {
        Ok(_) => Ok(ConnectOutcome::Connected(took)),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Ok(ConnectOutcome::Refused(took))
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(ConnectOutcome::TimedOut(took)),
        Err(error) => match error.raw_os_error() {
            Some(
                errno @ (libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::EACCES
                | libc::EPERM
                | libc::ENOPROTOOPT),
            ) => Ok(ConnectOutcome::Unreachable(errno, took)),
            _ => Err(error).tried(format!("connect to {address}")),
        },
    }
}

/// Checks that a connect is answered by RST before the first SYN is retransmitted (1 s). Returns
/// the time.
///
/// # Errors
/// The connect succeeds, fails otherwise, or is refused too late.
pub fn expect_refused(address: impl Into<SocketAddr>) -> Result<Duration> {
    let address = address.into();
    match connect_outcome(address, Duration::from_secs(3))? {
        ConnectOutcome::Refused(took) if took < Duration::from_millis(900) => Ok(took),
        other => Err(Error::unexpected(format!(
            "connect to {address} should be refused at once by RST, but: {other:?}"
        ))),
    }
}

/// Connects within `timeout`, with reads and writes bounded by it too.
///
/// # Errors
/// The connect is refused, or not answered within `timeout`.
pub fn connect(address: impl Into<SocketAddr>, timeout: Duration) -> Result<TcpStream> {
    let address = address.into();
    let connected = TcpStream::connect_timeout(&address, timeout);
    let stream = connected.tried(format!("connect to {address}"))?;
    stream
        .set_read_timeout(Some(timeout))
        .tried("set a read timeout")?;
    stream
        .set_write_timeout(Some(timeout))
        .tried("set a write timeout")?;
    stream.set_nodelay(true).tried("set TCP_NODELAY")?;
    Ok(stream)
}

/// Connects from this port, even if an earlier connection from it to the same server ended just
/// before, so that the tuple is reused. EADDRNOTAVAIL is retried until that connection is gone.
///
/// # Errors
/// The connect is refused, or not done within `timeout`.
pub fn connect_from(
    port: u16,
    address: impl Into<SocketAddr>,
    timeout: Duration,
) -> Result<TcpStream> {
    let address = address.into();
    let what = || format!("connect from port {port} to {address}");
    let started = Instant::now();
    loop {
        let socket = sockets::tcp_from(port, address).tried(what())?;
        sockets::set(&socket, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, {
            timeout.as_millis() as i32
        })
        .tried(what())?;
        match sockets::connect(&socket, address) {
            Ok(()) => {
                let stream = TcpStream::from(socket);
                stream.set_read_timeout(Some(timeout)).tried(what())?;
                stream.set_write_timeout(Some(timeout)).tried(what())?;
                stream.set_nodelay(true).tried(what())?;
                return Ok(stream);
            }
            Err(error)
                if error.raw_os_error() == Some(libc::EADDRNOTAVAIL)
                    && started.elapsed() < timeout =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(error).tried(what()),
        }
    }
}

/// Connects, waits until the server has closed, and closes. Returns the total time.
///
/// # Errors
/// The connect fails, or the server does not close within `timeout`.
pub fn connect_close(address: impl Into<SocketAddr>, timeout: Duration) -> Result<Duration> {
    let address = address.into();
    let started = Instant::now();
    let mut stream = connect(address, timeout)?;
    match stream.read(&mut [0; 1]) {
        Ok(0) => Ok(started.elapsed()),
        Ok(_) => Err(Error::unexpected(format!(
            "{address} sent data where it should close"
        ))),
        Err(error) => Err(error).tried(format!("wait for {address} to close")),
    }
}

/// Sends `size` bytes to an echo server and awaits them, `rounds` times on one connection. Returns
/// the time of each round.
///
/// # Errors
/// The connection fails, or an echo differs from what was sent.
pub fn request_response(
    address: impl Into<SocketAddr>,
    rounds: usize,
    size: usize,
    timeout: Duration,
) -> Result<Vec<Duration>> {
    let address = address.into();
    let mut stream = connect(address, timeout)?;
    let mut session = EchoSession {
        stream: &mut stream,
        sent: Pattern::new(address.port().into()),
    };
    (0..rounds).map(|_| session.round(size)).collect()
}

/// What may be sent to an echo server before its echo is read, bytes. Of more, the server fills the
/// client's receive buffer and its own send buffer with echoes that the client does not read yet, takes
/// nothing more then, and both wait for each other. Where that begins depends on the size of the kernel's
/// buffers at the time: by some devices 1 MB was too much now and then.
const UNREAD_BYTES: usize = 64 << 10;

/// An open connection to an echo server on which rounds can be made one by one.
pub struct EchoSession<'a> {
    stream: &'a mut TcpStream,
    sent: Pattern,
}

impl<'a> EchoSession<'a> {
    /// Over an open connection.
    pub fn new(stream: &'a mut TcpStream) -> Self {
        EchoSession {
            stream,
            sent: Pattern::new(1),
        }
    }

    /// Sends `size` bytes and checks their echo; returns the time taken. After an error of more than
    /// [`UNREAD_BYTES`] the connection is shut down.
    ///
    /// # Errors
    /// The connection fails, or the echo differs from what was sent.
    pub fn round(&mut self, size: usize) -> Result<Duration> {
        let (mut out, mut back) = (vec![0; size], vec![0; size]);
        self.sent.fill(&mut out);
        let started = Instant::now();
        let stream = &*self.stream;
        let send = || (&*stream).write_all(&out).tried("send to an echo server");
        let mut receive = || (&*stream).read_exact(&mut back).tried("await the echo");
        if size <= UNREAD_BYTES {
            send()?;
            receive()?;
        } else {
            std::thread::scope(|scope| {
                let sending = scope.spawn(send);
                let received = receive();
                if received.is_err() {
                    // Nobody takes what is still to be sent.
                    let _ = stream.shutdown(Shutdown::Both);
                }
                let sent = sending.join();
                sent.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                received
            })?;
        }
        let took = started.elapsed();
        if out != back {
            return Err(Error::unexpected("the echo is not what was sent"));
        }
        Ok(took)
    }
}

/// A stream that was transferred whole and checked byte by byte.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Length and hash at the receiver.
    pub receipt: Receipt,
    /// Time from before the connect to the last byte or the receipt.
    pub took: Duration,
}

impl Transfer {
    /// Returns the rate of the transfer, bits per second.
    pub fn bits_per_second(&self) -> f64 {
        self.receipt.bytes as f64 * 8.0 / self.took.as_secs_f64()
    }
}

/// Receives `len` predictable bytes from a [`TcpService::Streams`](crate::servers::TcpService)
/// server. `timeout` bounds each wait, not the total.
///
/// # Errors
/// The connection fails, stalls, or brings other bytes than predicted.
pub fn download(
    address: impl Into<SocketAddr>,
    len: u64,
    seed: u64,
    timeout: Duration,
) -> Result<Transfer> {
    let address = address.into();
    let started = Instant::now();
    let mut transfer = download_over(connect(address, timeout)?, len, seed)?;
    transfer.took = started.elapsed();
    Ok(transfer)
}

/// Receives as [`download`] does, over an open connection to such a server.
///
/// # Errors
/// The connection fails, stalls, or brings other bytes than predicted.
pub fn download_over(mut stream: TcpStream, len: u64, seed: u64) -> Result<Transfer> {
    let started = Instant::now();
    let peer = stream.peer_addr().tried("read the peer's address")?;
    let what = || format!("download {len} bytes from {peer}");
    Order::Send { len, seed }.write(&mut stream).tried(what())?;
    let receipt = receive(&mut stream, len, Pattern::new(seed)).tried(what())?;
    match stream.read(&mut [0; 1]).tried(what())? {
        0 => Ok(Transfer {
            receipt,
            took: started.elapsed(),
        }),
        _ => Err(Error::unexpected(format!("{}: there was more", what()))),
    }
}

/// Sends `len` predictable bytes to a [`TcpService::Streams`](crate::servers::TcpService) server,
/// and compares its receipt. `timeout` bounds each wait, not the whole.
///
/// # Errors
/// The connection fails, stalls, or the receipt differs from what was sent.
pub fn upload(
    address: impl Into<SocketAddr>,
    len: u64,
    seed: u64,
    timeout: Duration,
) -> Result<Transfer> {
    let address = address.into();
    let expected = Receipt::expected(len, seed);
    let started = Instant::now();
    let mut stream = connect(address, timeout)?;
    let what = || format!("upload {len} bytes to {address}");
    Order::Receive { len, seed }
        .write(&mut stream)
        .tried(what())?;
    send(&mut stream, len, Pattern::new(seed)).tried(what())?;
    stream.shutdown(Shutdown::Write).tried(what())?;
    let receipt = Receipt::read(&mut stream).tried(what())?;
    if receipt != expected {
        return Err(Error::unexpected(format!(
            "{}: received {receipt:?}",
            what()
        )));
    }
    Ok(Transfer {
        receipt,
        took: started.elapsed(),
    })
}

/// Bytes that a connection carried in a time, unchecked.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Number of bytes that arrived.
    pub bytes: u64,
    /// Time in which they arrived.
    pub took: Duration,
    /// Whether it stood still for as long as was waited for it; that time is part of `took`.
    pub stalled: bool,
}

impl Rate {
    /// Returns the rate, bits per second.
    pub fn bits_per_second(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.took.as_secs_f64()
    }
}

/// Receives unchecked bytes from a `Streams` server for `duration`, to measure the rate. A stream
/// that stalls for `timeout` is ended.
///
/// # Errors
/// The connection cannot be made, or fails otherwise than by a stall.
pub fn rate_down(
    address: impl Into<SocketAddr>,
    duration: Duration,
    timeout: Duration,
) -> Result<Rate> {
    let address = address.into();
    let what = || format!("measure from {address}");
    let mut stream = connect(address, timeout)?;
    Order::Pour.write(&mut stream).tried(what())?;
    let (mut buffer, mut bytes, started) = (vec![0; BUFFER], 0, Instant::now());
    let mut stalled = false;
    while !stalled && started.elapsed() < duration {
        match stream.read(&mut buffer) {
            Ok(read) => bytes += read as u64,
            Err(error) => {
                stalled = true;
                expect_stall(error).tried(what())?;
            }
        }
    }
    Ok(Rate {
        bytes,
        took: started.elapsed(),
        stalled,
    })
}

/// Sends unchecked bytes to a `Streams` server for `duration`, and waits for its receipt. Measures
/// the received bytes; for a stream that stalls for `timeout`, the acknowledged ones.
///
/// # Errors
/// The connection cannot be made, or fails otherwise than by a stall.
pub fn rate_up(
    address: impl Into<SocketAddr>,
    duration: Duration,
    timeout: Duration,
) -> Result<Rate> {
    let address = address.into();
    let what = || format!("measure to {address}");
    let mut stream = connect(address, timeout)?;
    Order::Drain.write(&mut stream).tried(what())?;
    let (buffer, started) = (vec![0; BUFFER], Instant::now());
    let received = (|| {
        while started.elapsed() < duration {
            stream.write_all(&buffer)?;
        }
        stream.shutdown(Shutdown::Write)?;
        Ok(Receipt::read(&mut stream)?.bytes)
    })();
    let stalled = received.is_err();
    let bytes = match received {
        Ok(bytes) => bytes,
        Err(error) => {
            expect_stall(error).tried(what())?;
            acknowledged(&stream).tried(what())?
        }
    };
    Ok(Rate {
        bytes,
        took: started.elapsed(),
        stalled,
    })
}

/// Accepts the error of a socket's timeout, and returns any other.
fn expect_stall(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Ok(()),
        _ => Err(error),
    }
}

/// Bytes that the peer has acknowledged: `tcpi_bytes_acked` of Linux's `struct tcp_info`.
fn acknowledged(stream: &TcpStream) -> io::Result<u64> {
    let info = info(stream)?;
    let bytes = info[120..128].try_into().expect("eight bytes");
    Ok(u64::from_ne_bytes(bytes))
}

/// Number of segments that this end has sent again so far, SYNs too: `tcpi_total_retrans` of Linux's
/// `struct tcp_info`.
///
/// # Errors
/// The kernel does not say it.
pub fn repeated(stream: &TcpStream) -> Result<u32> {
    let info = info(stream).tried("read what was repeated")?;
    let segments = info[100..104].try_into().expect("four bytes");
    Ok(u32::from_ne_bytes(segments))
}

/// The beginning of a `struct tcp_info`, which grows at its end.
fn info(stream: &TcpStream) -> io::Result<[u8; 128]> {
    let mut info = [0; 128];
    let mut len = info.len() as libc::socklen_t;
    // SAFETY: the buffer is writable for `len` bytes.
    checked(unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    })?;
    Ok(info)
}
