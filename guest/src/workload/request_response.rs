//! `rr`: small messages to an echo server and back, on connections that stay open.

use alloc::vec::Vec;

use super::{
    Failure, Outcome, Plan,
    connection::{Condition, Connection, Pool, note_errors},
    connections::{ECHO_BYTES, echo_message},
};
use crate::{
    net::{Stack, Turn},
    platform::{Nic, Platform},
};

const BUFFER_BYTES: usize = 16 * 1024;

struct Session {
    connection: Connection,
    /// Time at which the message in flight was sent, ns; `None` before the first.
    sent_ns: Option<u64>,
    received: usize,
}

pub(super) fn work<P: Platform, N: Nic>(plan: &Plan, stack: &mut Stack<'_, P, N>) -> Outcome {
    let mut outcome = Outcome::default();
    let share = plan.share(stack.cpu);
    let mut pool = Pool::new(stack, share, BUFFER_BYTES, BUFFER_BYTES);
    let mut sessions = Vec::with_capacity(share);
    for _ in 0..share {
        match pool.open(stack, plan.server) {
            Ok(connection) => sessions.push(Session {
                connection,
                sent_ns: None,
                received: 0,
            }),
            Err(_) => outcome.fail(Failure::Unable),
        }
    }
    let message = echo_message();
    stack.drive(|stack| {
        let connections = sessions.iter_mut().map(|session| &mut session.connection);
        note_errors(stack, plan.server, connections);
        let mut at = 0;
        while let Some(session) = sessions.get_mut(at) {
            let Some(end) = session.advance(stack, plan, &message, &mut outcome) else {
                at += 1;
                continue;
            };
            let Session { connection, .. } = sessions.swap_remove(at);
            match end {
                Ok(()) => pool.close(stack, connection),
                Err(failure) => {
                    outcome.fail_on(stack, failure);
                    pool.abort(stack, connection);
                }
            }
        }
        match sessions.is_empty() {
            true => Turn::Done(()),
            false => Turn::Waiting(None),
        }
    });
    pool.remove(stack);
    outcome
}

impl Session {
    fn advance<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        plan: &Plan,
        message: &[u8; ECHO_BYTES],
        outcome: &mut Outcome,
    ) -> Option<Result<(), Failure>> {
        match self.connection.condition(stack, &mut outcome.connect) {
            Condition::Opening => return None,
            Condition::Failed(failure) => return Some(Err(failure)),
            Condition::Opened | Condition::Open => {}
        }
        if let Some(sent_ns) = self.sent_ns {
            let socket = stack.tcp(self.connection.handle);
            let mut wrong = false;
            while socket.can_recv() {
                let received = &mut self.received;
                let _ = socket.recv(|data| {
                    wrong |= message.get(*received..*received + data.len()) != Some(data);
                    *received += data.len();
                    (data.len(), ())
                });
            }
            if wrong {
                return Some(Err(Failure::Wrong));
            }
            if self.received < ECHO_BYTES {
                return (!socket.may_recv()).then_some(Err(Failure::Short));
            }
            let now_ns = stack.now_ns();
            outcome.latency.record(now_ns - sent_ns);
            outcome.done += 1;
            outcome.bytes += ECHO_BYTES as u64;
            outcome.ended_ns = now_ns;
        }
        if plan.draw(1) == 0 {
            return Some(Ok(()));
        }
        let now_ns = stack.now_ns();
        (self.sent_ns, self.received) = (Some(now_ns), 0);
        self.connection.moved_ns = now_ns;
        // All earlier messages have been answered, so there is room.
        let _ = stack.tcp(self.connection.handle).send_slice(message);
        None
    }
}
