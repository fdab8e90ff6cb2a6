//! A STUN client that finds out how the NAT in front of it behaves (RFC 5780 sections 4.3 to 4.5).

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use crate::{
    error::{Result, Tried},
    stun::{Request, Response, TransactionId},
};

/// Time until a request is sent again.
const AGAIN: Duration = Duration::from_millis(250);

/// Parts of the other end that a mapping or a filter depends on (RFC 4787 sections 4.1 and 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dependence {
    /// Neither the other end's address nor its port.
    EndpointIndependent,
    /// The other end's address.
    AddressDependent,
    /// The other end's address and port.
    AddressAndPortDependent,
}

/// Behaviour of a NAT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behaviour {
    /// Parts of the destination that the translated port depends on.
    pub mapping: Dependence,
    /// Whose packets are let in.
    pub filtering: Dependence,
    /// Whether a host behind it reaches another one behind it by its translated address.
    pub hairpinning: bool,
}

/// Asks a server how the NAT behaves. `patience`: time after which no response counts as none; a
/// response that has to come is awaited for ten times as long.
///
/// # Errors
/// The server does not answer at all, or a socket fails.
pub fn behaviour(server: SocketAddr, patience: Duration) -> Result<Behaviour> {
    Ok(Behaviour {
        mapping: mapping(server, patience)?,
        filtering: filtering(server, patience)?,
        hairpinning: hairpinning(server, patience)?,
    })
}

/// Binds a socket and asks for its address as a server sees it. Returns the socket and the response.
///
/// # Errors
/// No response came in time, or the socket fails.
pub fn bind(server: SocketAddr, patience: Duration) -> Result<(UdpSocket, Response)> {
    let what = || format!("ask {server} by STUN");
    let socket = match server {
        SocketAddr::V4(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = socket.tried(what())?;
    let response = certain(&socket, server, patience)?;
    Ok((socket, response))
}

/// RFC 5780 section 4.3: one socket asks the server at three addresses.
fn mapping(server: SocketAddr, patience: Duration) -> Result<Dependence> {
    let (socket, first) = bind(server, patience)?;
    let other_address = SocketAddr::new(first.other.ip(), server.port());
    let second = certain(&socket, other_address, patience)?;
    if second.mapped == first.mapped {
        return Ok(Dependence::EndpointIndependent);
    }
    let third = certain(&socket, first.other, patience)?;
    Ok(match third.mapped == second.mapped {
        true => Dependence::AddressDependent,
        false => Dependence::AddressAndPortDependent,
    })
}

/// RFC 5780 section 4.4: a new socket asks for responses from elsewhere.
fn filtering(server: SocketAddr, patience: Duration) -> Result<Dependence> {
    let (socket, _) = bind(server, patience)?;
    let from = |changes_address, changes_port| {
        let request = Request {
            changes_address,
            changes_port,
            ..Request::default()
        };
        let response = ask(&socket, server, request, patience);
        response.tried(format!("ask {server} for a response from elsewhere"))
    };
    if from(true, true)?.is_some() {
        return Ok(Dependence::EndpointIndependent);
    }
    Ok(match from(false, true)? {
        Some(_) => Dependence::AddressDependent,
        None => Dependence::AddressAndPortDependent,
    })
}

/// RFC 5780 section 4.5: a request to the client's own translated address, from another port. The
/// first port sends to the second one before, so that filtering lets the request in.
fn hairpinning(server: SocketAddr, patience: Duration) -> Result<bool> {
    let (receiver, own) = bind(server, patience)?;
    let (sender, other) = bind(server, patience)?;
    let tried = || -> io::Result<bool> {
        let request = Request {
            id: next_id(),
            ..Request::default()
        };
        let request = request.encode();
        let began = Instant::now();
        receiver.set_read_timeout(Some(AGAIN.min(patience)))?;
        while began.elapsed() < patience {
            receiver.send_to(b"opens the filter", other.mapped)?;
            sender.send_to(&request, own.mapped)?;
            let mut buffer = [0; 2048];
            match receiver.recv_from(&mut buffer) {
                Ok((len, from)) if buffer[..len] == request[..] => {
                    return Ok(from == other.mapped);
                }
                Ok(_) => {}
                // A port of the host's own is refused by ICMP, or nothing comes.
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock
                    | io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::HostUnreachable => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(false)
    };
    tried().tried(format!("send to {}", own.mapped))
}

/// Returns an id that no other request of this process has.
fn next_id() -> TransactionId {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let mut id = *b"test00000000";
    id[4..].copy_from_slice(&NUMBER.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    id
}

fn certain(socket: &UdpSocket, to: SocketAddr, patience: Duration) -> Result<Response> {
    let response = ask(socket, to, Request::default(), 10 * patience);
    let response = response.and_then(|response| response.ok_or(io::ErrorKind::TimedOut.into()));
    response.tried(format!("get a STUN response from {to}"))
}

/// Sends a request, again every 250 ms, until its response arrives or patience is over.
fn ask(
    socket: &UdpSocket,
    to: SocketAddr,
    request: Request,
    patience: Duration,
) -> io::Result<Option<Response>> {
    let request = Request {
        id: next_id(),
        ..request
    };
    let began = Instant::now();
    let mut buffer = [0; 2048];
    while began.elapsed() < patience {
        socket.send_to(&request.encode(), to)?;
        let again = Instant::now() + AGAIN;
        loop {
            let left = again.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            socket.set_read_timeout(Some(left))?;
            let len = match socket.recv(&mut buffer) {
                Ok(len) => len,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            };
            let response = Response::parse(&buffer[..len]);
            if let Some(response) = response.filter(|response| response.id == request.id) {
                return Ok(Some(response));
            }
        }
    }
    Ok(None)
}
