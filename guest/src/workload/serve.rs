//! `serve`: an echo server (RFC 862), TCP and UDP, for a limited time.

use alloc::{vec, vec::Vec};

use smoltcp::{
    iface::SocketHandle,
    socket::{tcp, udp},
};

use crate::{
    net::{Stack, Turn},
    platform::{Nic, Platform},
};

/// Largest number of TCP connections per port. A further SYN is reset.
const CONNECTIONS: usize = 16;
const BUFFER_BYTES: usize = 16 * 1024;
/// Capacity of a port's queue, datagrams.
const DATAGRAMS: usize = 64;

/// Totals of one `serve`.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// Number of TCP connections.
    pub connections: u64,
    /// Number of UDP datagrams.
    pub datagrams: u64,
    /// Payload bytes that were sent back.
    pub bytes: u64,
}

/// Socket for one TCP connection.
struct Place {
    handle: SocketHandle,
    port: u16,
    /// True while a client is connected.
    taken: bool,
}

/// Serves on CPU 0, to which the ports below the guest's own local ports are steered.
pub(crate) fn serve<P: Platform, N: Nic>(
    stack: &mut Stack<'_, P, N>,
    ports: &[u16],
    for_ns: u64,
) -> Served {
    let until_ns = stack.now_ns() + for_ns;
    let mut served = Served::default();
    let each = ports.iter().flat_map(|port| [*port; CONNECTIONS]);
    let mut places: Vec<Place> = each
        .map(|port| Place {
            handle: stack.add_tcp(BUFFER_BYTES, BUFFER_BYTES),
            port,
            taken: false,
        })
        .collect();
    let datagrams: Vec<SocketHandle> = ports.iter().map(|port| bind(stack, *port)).collect();
    let mut buffer = vec![0; BUFFER_BYTES];
    stack.drive(|stack| {
        let over = stack.now_ns() >= until_ns;
        for place in &mut places {
            let socket = stack.sockets.get_mut(place.handle);
            place.turn(socket, &mut buffer, &mut served);
            if over {
                // Sends a RST, if a client is connected.
                socket.abort();
            }
        }
        for handle in &datagrams {
            echo_datagrams(stack.sockets.get_mut(*handle), &mut buffer, &mut served);
        }
        match over {
            true => Turn::Done(()),
            false => Turn::Waiting(Some(until_ns)),
        }
    });
    for handle in places.iter().map(|place| place.handle).chain(datagrams) {
        stack.sockets.remove(handle);
    }
    served
}

impl Place {
    fn turn(&mut self, socket: &mut tcp::Socket<'_>, buffer: &mut [u8], served: &mut Served) {
        // A socket in TIME-WAIT is reused for the next connection.
        if matches!(socket.state(), tcp::State::Closed | tcp::State::TimeWait) {
            self.taken = false;
            // It fails for port 0 and open sockets only.
            let _ = socket.listen(self.port);
        }
        if !self.taken && socket.may_send() {
            self.taken = true;
            served.connections += 1;
        }
        let room = socket.send_capacity() - socket.send_queue();
        let most = room.min(buffer.len());
        if socket.may_send()
            && let Ok(count @ 1..) = socket.recv_slice(&mut buffer[..most])
        {
            // There is room for all of it.
            let _ = socket.send_slice(&buffer[..count]);
            served.bytes += count as u64;
        }
        // The client has closed, and all its data is sent back or queued.
        if socket.state() == tcp::State::CloseWait && socket.recv_queue() == 0 {
            socket.close();
        }
    }
}

fn bind<P: Platform, N: Nic>(stack: &mut Stack<'_, P, N>, port: u16) -> SocketHandle {
    let buffer = || {
        let room = vec![0; DATAGRAMS * 1500];
        udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; DATAGRAMS], room)
    };
    let mut socket = udp::Socket::new(buffer(), buffer());
    // It is not bound yet, and the port is not 0.
    let _ = socket.bind(port);
    stack.sockets.add(socket)
}

fn echo_datagrams(socket: &mut udp::Socket<'_>, buffer: &mut [u8], served: &mut Served) {
    while socket.can_send()
        && let Ok((count, from)) = socket.recv_slice(buffer)
    {
        // Without room the datagram is lost, as datagrams may be.
        if socket.send_slice(&buffer[..count], from).is_ok() {
            served.datagrams += 1;
            served.bytes += count as u64;
        }
    }
}
