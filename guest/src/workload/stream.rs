//! `stream`: predictable bytes, or zeroes, in one direction.
//!
//! The client's request is 17 bytes: `S` (the server sends) or `R` (it receives), then length and
//! seed as big-endian u64; for raw streams `P` (zeroes without end) or `D` (discards all bytes).
//! After `R` and `D` the server sends a receipt: 8 bytes of length, big-endian, and a SHA-256. The
//! receiver of `R` checks each byte and sends no receipt if one is wrong. So the hash, which is not
//! checked here, adds nothing to that.

use alloc::vec::Vec;

use super::{
    Failure, Outcome, Plan,
    connection::{Condition, Connection, Pool, note_errors},
};
use crate::{
    command::{Direction, Workload},
    net::{Stack, Turn},
    pattern::Pattern,
    platform::{Nic, Platform},
};

/// Largest amount of data in flight, bytes: an upper bound of bandwidth times delay.
const WINDOW_BYTES: usize = 2 << 20;
const SMALL_BYTES: usize = 64 * 1024;
/// Bytes that an idle connection brings down in the end, to show that it lives.
const IDLE_BYTES: u64 = 4096;
const RECEIPT_BYTES: usize = 40;
/// Seeds of checked streams, one for each direction.
const DOWN_SEED: u64 = 1;
const UP_SEED: u64 = 2;

pub(super) fn work<P: Platform, N: Nic>(plan: &Plan, stack: &mut Stack<'_, P, N>) -> Outcome {
    let Workload::Stream {
        bytes,
        direction,
        raw,
        ..
    } = plan.workload
    else {
        return Outcome::default();
    };
    let mut outcome = Outcome::default();
    let share = plan.share(stack.cpu);
    let (receive_bytes, send_bytes) = match direction {
        Direction::Up => (SMALL_BYTES, WINDOW_BYTES),
        Direction::Down => (WINDOW_BYTES, SMALL_BYTES),
        Direction::Mixed => (SMALL_BYTES, SMALL_BYTES),
    };
    let mut pool = Pool::new(stack, share, receive_bytes, send_bytes);
    let mut transfers = Vec::with_capacity(share);
    for number in 0..share {
        let (is_up, is_idle) = match direction {
            Direction::Mixed => (number % 3 == 0, number % 3 == 2),
            Direction::Up => (true, false),
            Direction::Down => (false, false),
        };
        match pool.open(stack, plan.server) {
            Ok(connection) => transfers.push(Transfer {
                connection,
                bytes: if is_idle { IDLE_BYTES } else { bytes },
                is_up,
                is_idle,
                ordered: false,
                pattern: (!raw).then(|| Pattern::new(if is_up { UP_SEED } else { DOWN_SEED })),
                moved: 0,
                receipt: Vec::with_capacity(RECEIPT_BYTES),
                closed: false,
            }),
            Err(_) => outcome.fail(Failure::Unable),
        }
    }
    stack.drive(|stack| {
        let connections = transfers
            .iter_mut()
            .map(|transfer| &mut transfer.connection);
        note_errors(stack, plan.server, connections);
        let mut at = 0;
        while let Some(transfer) = transfers.get_mut(at) {
            let Some(end) = transfer.advance(stack, &mut outcome) else {
                at += 1;
                continue;
            };
            let transfer = transfers.swap_remove(at);
            let now_ns = stack.now_ns();
            match end {
                Ok(()) => {
                    outcome.done += 1;
                    outcome.ended_ns = now_ns;
                    outcome
                        .latency
                        .record(now_ns - transfer.connection.opened_ns);
                    match (transfer.is_up, raw) {
                        // The server would send on.
                        (false, true) => pool.abort(stack, transfer.connection),
                        _ => pool.close(stack, transfer.connection),
                    }
                }
                Err(failure) => {
                    outcome.fail_on(stack, failure);
                    outcome.note.get_or_insert_with(|| {
                        let Transfer { moved, bytes, .. } = transfer;
                        alloc::format!("{failure:?} at byte {moved} of {bytes}")
                    });
                    pool.abort(stack, transfer.connection);
                }
            }
        }
        if transfers.is_empty() {
            return Turn::Done(());
        }
        if !transfers.iter().all(|transfer| transfer.is_idle) {
            return Turn::Waiting(None);
        }
        // They begin.
        transfers
            .iter_mut()
            .for_each(|transfer| transfer.is_idle = false);
        Turn::Waiting(Some(stack.now_ns()))
    });
    pool.remove(stack);
    outcome
}

struct Transfer {
    connection: Connection,
    bytes: u64,
    is_up: bool,
    /// Whether it says nothing yet.
    is_idle: bool,
    /// Whether the server has been told what to do.
    ordered: bool,
    /// Generator or checker of the bytes; `None` for zeroes.
    pattern: Option<Pattern>,
    /// Bytes received, or handed to the socket.
    moved: u64,
    receipt: Vec<u8>,
    /// True once the FIN is queued.
    closed: bool,
}

impl Transfer {
    fn order(&self) -> [u8; 17] {
        let (kind, len, seed) = match (self.is_up, &self.pattern) {
            (true, Some(_)) => (b'R', self.bytes, UP_SEED),
            (false, Some(_)) => (b'S', self.bytes, DOWN_SEED),
            (true, None) => (b'D', 0, 0),
            (false, None) => (b'P', 0, 0),
        };
        let mut order = [0; 17];
        order[0] = kind;
        order[1..9].copy_from_slice(&len.to_be_bytes());
        order[9..].copy_from_slice(&seed.to_be_bytes());
        order
    }

    fn advance<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        outcome: &mut Outcome,
    ) -> Option<Result<(), Failure>> {
        match self.connection.condition(stack, &mut outcome.connect) {
            Condition::Opening => return None,
            Condition::Failed(failure) => return Some(Err(failure)),
            Condition::Opened | Condition::Open => {}
        }
        if self.is_idle {
            return None;
        }
        if !self.ordered {
            // The buffer is empty, and larger than that.
            let _ = stack.tcp(self.connection.handle).send_slice(&self.order());
            self.ordered = true;
        }
        match self.is_up {
            true => self.send(stack, outcome),
            false => self.receive(stack, outcome),
        }
    }

    fn send<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        outcome: &mut Outcome,
    ) -> Option<Result<(), Failure>> {
        let now_ns = stack.now_ns();
        let socket = stack.tcp(self.connection.handle);
        while self.moved < self.bytes && socket.can_send() {
            let left = self.bytes - self.moved;
            let pattern = &mut self.pattern;
            let filled = socket.send(|room| {
                let len = left.min(room.len() as u64) as usize;
                match pattern {
                    Some(pattern) => pattern.fill(&mut room[..len]),
                    None => room[..len].fill(0),
                }
                (len, len)
            });
            self.moved += filled.unwrap_or(0) as u64;
            self.connection.moved_ns = now_ns;
        }
        if self.moved == self.bytes && !self.closed {
            socket.close();
            self.closed = true;
        }
        while socket.can_recv() {
            let receipt = &mut self.receipt;
            let _ = socket.recv(|data| {
                let room = RECEIPT_BYTES - receipt.len();
                receipt.extend_from_slice(&data[..data.len().min(room)]);
                (data.len(), ())
            });
            self.connection.moved_ns = now_ns;
        }
        let received = match self.receipt.first_chunk() {
            Some(bytes) if self.receipt.len() == RECEIPT_BYTES => u64::from_be_bytes(*bytes),
            _ => return (!socket.may_recv()).then_some(Err(Failure::Short)),
        };
        outcome.bytes += received;
        Some(match received == self.bytes {
            true => Ok(()),
            false => Err(Failure::Wrong),
        })
    }

    fn receive<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        outcome: &mut Outcome,
    ) -> Option<Result<(), Failure>> {
        let now_ns = stack.now_ns();
        let socket = stack.tcp(self.connection.handle);
        let before = self.moved;
        let mut wrong = false;
        while socket.can_recv() && !wrong {
            let (pattern, moved) = (&mut self.pattern, &mut self.moved);
            let _ = socket.recv(|data| {
                *moved += data.len() as u64;
                if let Some(pattern) = pattern
                    && let Err(at) = pattern.check(data)
                {
                    *moved = at;
                    wrong = true;
                }
                (data.len(), ())
            });
        }
        if wrong {
            return Some(Err(Failure::Wrong));
        }
        if self.moved > before {
            outcome.bytes += self.moved - before;
            self.connection.moved_ns = now_ns;
        }
        let ended = !socket.may_recv();
        match &self.pattern {
            None if self.moved >= self.bytes => Some(Ok(())),
            Some(_) if self.moved > self.bytes => Some(Err(Failure::Wrong)),
            Some(_) if ended && self.moved == self.bytes => Some(Ok(())),
            _ if ended => Some(Err(Failure::Short)),
            _ => None,
        }
    }
}
