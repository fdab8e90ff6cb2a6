//! TCP toward the guest that buffers no stream: one side of a connection whose other side is a
//! socket of the host.
//!
//! # Theory of operation
//! The host's kernel has a whole TCP toward the server: its queues are the only buffers. Toward the
//! guest there is a [`Connection`], RFC 9293's state without the queues:
//!
//! - **From the guest**: the payload that is next in sequence goes from its frame into the socket's
//!   `send`. Only what the socket took is acknowledged. The window is the room of the socket's send
//!   queue, so it is seldom that the socket takes less. If it does, the rest of the frame is
//!   kept until it has room (`early`), within a bound for each VM. What is beyond that is forgotten,
//!   and once the socket has room again the guest is asked for it by duplicate acknowledgements. A
//!   segment behind a gap is answered by a duplicate acknowledgement, and kept within the same bound.
//!   The acknowledgement tells which ones are, if the guest's SYN permits it (RFC 2018), so that the
//!   guest sends only the gap.
//! - **To the guest**: what the socket has is *peeked* into a frame, and stays in the socket's receive
//!   queue until the guest has acknowledged it. What the guest's ring dropped is peeked again, from
//!   the first byte that is not acknowledged (go-back-N), after three duplicate acknowledgements or
//!   the retransmission timer. A guest that tells what it has behind gaps gets only these
//!   (`scoreboard`, RFC 6675): they are peeked at their place in the queue. The socket's own window
//!   toward the server closes by itself, since nothing is taken out of its queue.
//! - **Handshake**: the guest's SYN waits until the host's connection stands; then comes the SYN-ACK.
//!   A refused one is RST. So no connection ever seems to exist that does not.
//! - **Ends**: a FIN is passed on as a FIN once all before it was (half-closes both ways), an RST as
//!   an RST. A connection of user mode that the server ended first stays for [`TIME_WAIT_NS`], without
//!   its socket, to answer the guest's FIN sent again. A relayed one is forgotten once the guest's FIN
//!   is acknowledged: one that is sent again is answered by an RST.
//!
//! The host may also be who opens ([`Connection::open`]): a client of the host's that a forward leads to
//! the guest. The SYN goes to the guest, again and again until it answers; a guest that refuses has the
//! client reset. From then on it is the same.
//!
//! The state machine is pure: segments, events of the socket and the time come in, and headers to
//! send and things to do to the socket come out. `stream` puts a socket beside it. Two drive that:
//! [`crate::sockets`] for the flows of user mode, and [`crate::relay`] in both modes.
//!
//! | state | entered by | `guest_fin` | FIN sent |
//! | --- | --- | --- | --- |
//! | `Connecting` | the guest's SYN | | |
//! | `SynSent` | the host's client, whose SYN it is | | |
//! | `SynReceived` | the host's connection stands; a SYN of the guest's that crosses ours | | |
//! | `Established` | the guest's acknowledgement of our SYN | no | no |
//! | `CloseWait`, `LastAck` | the guest's FIN | yes | no, yes |
//! | `FinWait1`, `FinWait2`, `Closing` | the server's FIN | no, no, yes | yes |
//! | `TimeWait` | both FINs, the server's first | yes | acknowledged |
//! | `Closed` | both FINs, RST, giving up | | |
//!
//! A guest's keep-alive is answered here. From the first on the socket asks its peer too, in the guest's
//! rhythm, so that a peer that is gone ends the guest's connection as well: by an RST.
//!
//! Urgent data is delivered in its place, as data, without the mark: the meaning of the urgent pointer
//! differs between systems, and new programs are not to use it (RFC 6093 sections 3 to 6). So the server
//! has each byte once and in order, as with `SO_OOBINLINE`, and is not signalled. The segments are counted
//! for each VM. The same holds the other way: sockets have that option from before they are connected
//! ([`crate::inet::keep_urgent_in_place`]), so what a server sends as urgent comes to the guest as data.
//! Data on a SYN is not taken; its sender sends it again.
mod connection;
mod early;
mod options;
mod queue;
mod scoreboard;
mod stream;
mod wire;

#[cfg(test)]
mod held_test;
#[cfg(test)]
mod keepalive_test;
#[cfg(test)]
mod resend_test;
#[cfg(test)]
mod stream_test;

pub use self::{
    connection::{
        Connection, Due, GIVE_UP_AFTER, Host, MOST_RETRANSMISSION_NS, RETRANSMISSION_NS, Received,
        Sendable, State, TIME_WAIT_NS,
    },
    options::{SackBlocks, SynOptions, Timestamps},
    wire::{Header, Segment, headers_len, most_payload, reset_for, write_headers},
};
pub(crate) use self::{
    early::EarlyRoom,
    stream::{Next, SCRATCH_LEN, Stream, Workspace, reset_by_close},
};

/// Whether `a` is before `b` in sequence space (RFC 9293 section 3.4). Of two numbers that are half of the
/// space apart each is before the other, as in Linux.
pub(crate) const fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// Returns the sequence number that is before the other.
const fn earlier(a: u32, b: u32) -> u32 {
    if before(b, a) { b } else { a }
}

/// Returns the sequence number that is behind the other.
const fn later(a: u32, b: u32) -> u32 {
    if before(a, b) { b } else { a }
}
