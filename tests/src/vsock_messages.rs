//! Numbered messages over vsock, as a program of the host has them with a guest's `vsock messages`
//! (`guest/src/workload/vsock/messages.rs` describes them).
use std::{
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
    thread,
};

use crate::{
    MicroVmEnd,
    error::{Error, Result, Tried},
    pattern::Pattern,
};

/// Bytes of a message's number.
const NUMBER_BYTES: usize = 8;

/// Messages of one end: made one after the other, or compared with what comes.
#[derive(Clone, Debug)]
pub struct Messages {
    pattern: Pattern,
    number: u64,
    /// What is due before message `number`.
    due: Vec<u8>,
}

impl Messages {
    /// Those of the guest on a connection.
    pub fn of_guest(connection: u64) -> Messages {
        Messages::new(2 * connection)
    }

    /// Those of the host.
    pub fn of_host(connection: u64) -> Messages {
        Messages::new(2 * connection + 1)
    }

    fn new(seed: u64) -> Messages {
        Messages {
            pattern: Pattern::new(seed),
            number: 0,
            due: Vec::new(),
        }
    }

    fn next(&mut self) -> Vec<u8> {
        let mut message = self.number.to_le_bytes().to_vec();
        message.resize(NUMBER_BYTES + body_bytes(self.number), 0);
        self.pattern.fill(&mut message[NUMBER_BYTES..]);
        self.number += 1;
        message
    }

    /// Compares the next bytes with those that are due.
    ///
    /// # Errors
    /// They are others.
    pub fn check(&mut self, bytes: &[u8]) -> Result<()> {
        while self.due.len() < bytes.len() {
            let next = self.next();
            self.due.extend(next);
        }
        let is_right = self.due[..bytes.len()] == *bytes;
        self.due.drain(..bytes.len());
        let wrong = || Error::unexpected(format!("wrong before message {}", self.number));
        is_right.then_some(()).ok_or_else(wrong)
    }

    /// Checks what comes to its end, and returns how many messages these are. One of which a part came
    /// does not count.
    ///
    /// # Errors
    /// A byte is wrong, or the socket fails otherwise than by a reset of the guest.
    pub fn check_all(&mut self, stream: &mut UnixStream) -> Result<u64> {
        let mut part = vec![0; 64 << 10];
        loop {
            match stream.read(&mut part) {
                Ok(0) => break,
                Ok(read) => self.check(&part[..read])?,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break,
                Err(error) => return Err(error).tried("read a guest's messages"),
            }
        }
        Ok(self.number - u64::from(!self.due.is_empty()))
    }
}

/// Reads the number of its connection, with which a guest begins.
///
/// # Errors
/// The connection ends before.
pub fn greeting(stream: &mut UnixStream) -> Result<u64> {
    let mut number = [0; NUMBER_BYTES];
    let read = stream.read_exact(&mut number);
    read.tried("read the number of a guest's connection")?;
    Ok(u64::from_le_bytes(number))
}

/// Sends so many messages on a connection, each by one call, and half-closes it.
///
/// # Errors
/// The socket's.
pub fn send(mut stream: UnixStream, connection: u64, count: u64) -> io::Result<()> {
    let mut messages = Messages::of_host(connection);
    while messages.number < count {
        stream.write_all(&messages.next())?;
    }
    stream.shutdown(Shutdown::Write)
}

/// A program of the host: sends so many messages, and checks that as many come, beside each other.
///
/// # Errors
/// One is wrong, or others are sent or come than so many.
pub fn talk(mut stream: UnixStream, count: u64) -> Result<()> {
    let connection = greeting(&mut stream)?;
    let writer = stream.try_clone().tried("have a socket twice")?;
    let sender = thread::spawn(move || send(writer, connection, count));
    let came = Messages::of_guest(connection).check_all(&mut stream)?;
    let sent = sender.join();
    let sent = sent.map_err(|_| Error::unexpected("the sender of messages has panicked"))?;
    sent.tried(format!("send messages on connection {connection}"))?;
    let other = || Error::unexpected(format!("{came} of {count} messages on {connection}"));
    (came == count).then_some(()).ok_or_else(other)
}

/// Checks that so many messages went each way on a guest's one connection, by what it says itself and by
/// what the device has counted.
///
/// # Panics
/// They did not.
#[track_caller]
pub fn assert_all_went_each_way(end: &MicroVmEnd, count: u64) {
    let said = end.said("workload");
    assert_eq!(end.status.code(), Some(0), "{said:?} {}", end.stderr);
    assert_eq!(said[0]["messages_sent"], count, "{said:?}");
    assert_eq!(said[0]["messages_received"], count, "{said:?}");
    let counters = &end.report["vmm"]["vsock"];
    let bytes = bytes_of(count);
    let of_guest = bytes + NUMBER_BYTES as u64;
    assert_eq!(counters["to_host_bytes"], of_guest, "{counters}");
    assert_eq!(counters["to_guest_bytes"], bytes, "{counters}");
    assert_eq!(counters["violations"], 0, "{counters}");
}

/// Bytes of so many messages.
pub fn bytes_of(count: u64) -> u64 {
    let of = |number| (NUMBER_BYTES + body_bytes(number)) as u64;
    (0..count).map(of).sum()
}

fn body_bytes(number: u64) -> usize {
    (number * 31 % 241) as usize
}
