//! `crr`: connect, exchange, close, repeatedly.

use alloc::vec::Vec;

use super::{
    Failure, Outcome, Plan,
    connection::{Condition, Connection, Pool, Wait, note_errors},
};
use crate::{
    command::{Exchange, Workload},
    net::{Stack, Turn},
    pattern::Pattern,
    platform::{Nic, Platform},
};

/// The HTTP request of `get`.
const HTTP_REQUEST: &[u8] = b"GET / HTTP/1.0\r\n\r\n";
/// Length of a message to an echo server, bytes.
pub(super) const ECHO_BYTES: usize = 64;
/// Longest time for the last connections to close, ns.
const CLOSING_NS: u64 = 1_000_000_000;
/// Time between attempts to allocate a port, ns.
const PORT_RETRY_NS: u64 = 1_000_000;

/// Returns the message to an echo server: the first bytes of [`Pattern`] 1.
pub(super) fn echo_message() -> [u8; ECHO_BYTES] {
    let mut message = [0; ECHO_BYTES];
    Pattern::new(1).fill(&mut message);
    message
}

pub(super) fn work<P: Platform, N: Nic>(plan: &Plan, stack: &mut Stack<'_, P, N>) -> Outcome {
    let Workload::Connections {
        at_once, exchange, ..
    } = plan.workload
    else {
        return Outcome::default();
    };
    let mut outcome = Outcome::default();
    let share = plan.share(stack.cpu);
    if share == 0 {
        return outcome;
    }
    let receive_bytes = if at_once <= 64 { 65_535 } else { 8192 };
    // While one connection closes, the next is open.
    let mut pool = Pool::new(stack, 2 * share + 2, receive_bytes, 1024);
    let script = Script {
        exchange,
        echo: echo_message(),
    };
    let mut active: Vec<Active> = Vec::with_capacity(share);
    let mut drawn = false;
    let mut closing_until_ns = None;
    stack.drive(|stack| {
        let connections = active.iter_mut().map(|active| &mut active.connection);
        note_errors(stack, plan.server, connections);
        let mut at = 0;
        while let Some(one) = active.get_mut(at) {
            let Some(end) = one.advance(stack, &script, &mut outcome) else {
                at += 1;
                continue;
            };
            let Active { connection, .. } = active.swap_remove(at);
            outcome.ended_ns = stack.now_ns();
            match end {
                Ok(()) => {
                    outcome.done += 1;
                    let took_ns = outcome.ended_ns - connection.opened_ns;
                    outcome.latency.record(took_ns);
                    pool.close(stack, connection);
                }
                Err(failure) => {
                    outcome.fail_on(stack, failure);
                    pool.abort(stack, connection);
                }
            }
        }
        pool.reap(stack);
        while active.len() < share {
            let waited = drawn;
            drawn = drawn || plan.draw(1) == 1;
            if !drawn {
                break;
            }
            match pool.open(stack, plan.server) {
                Ok(connection) => {
                    drawn = false;
                    active.push(Active {
                        connection,
                        received: 0,
                    });
                }
                Err(Wait::ForSocket) => break,
                Err(Wait::ForPort) => {
                    outcome.port_waits += u64::from(!waited);
                    return Turn::Waiting(Some(stack.now_ns() + PORT_RETRY_NS));
                }
            }
        }
        if !active.is_empty() || drawn {
            return Turn::Waiting(None);
        }
        let now_ns = stack.now_ns();
        let until_ns = *closing_until_ns.get_or_insert(now_ns + CLOSING_NS);
        if pool.is_quiet() || now_ns >= until_ns {
            return Turn::Done(());
        }
        Turn::Waiting(Some(until_ns))
    });
    pool.remove(stack);
    outcome
}

/// Exchange of each connection.
struct Script {
    exchange: Exchange,
    echo: [u8; ECHO_BYTES],
}

impl Script {
    fn request(&self) -> &[u8] {
        match self.exchange {
            Exchange::Close => &[],
            Exchange::Get => HTTP_REQUEST,
            Exchange::Echo => &self.echo,
        }
    }
}

struct Active {
    connection: Connection,
    received: usize,
}

impl Active {
    /// Does what is possible now. Returns the result once the connection is finished.
    fn advance<P: Platform, N: Nic>(
        &mut self,
        stack: &mut Stack<'_, P, N>,
        script: &Script,
        outcome: &mut Outcome,
    ) -> Option<Result<(), Failure>> {
        match self.connection.condition(stack, &mut outcome.connect) {
            Condition::Opening => return None,
            Condition::Failed(failure) => return Some(Err(failure)),
            Condition::Opened => {
                // The buffer is empty, and larger than the request. It takes nothing if the server
                // has closed already.
                let _ = stack
                    .tcp(self.connection.handle)
                    .send_slice(script.request());
            }
            Condition::Open => {}
        }
        let socket = stack.tcp(self.connection.handle);
        let before = self.received;
        let mut wrong = false;
        while socket.can_recv() {
            let received = &mut self.received;
            let _ = socket.recv(|data| {
                if script.exchange == Exchange::Echo {
                    wrong |= script.echo.get(*received..*received + data.len()) != Some(data);
                }
                *received += data.len();
                (data.len(), ())
            });
        }
        let ended = !socket.may_recv();
        if self.received > before {
            outcome.bytes += (self.received - before) as u64;
            self.connection.moved_ns = stack.now_ns();
        }
        match script.exchange {
            _ if wrong => Some(Err(Failure::Wrong)),
            Exchange::Echo if self.received == ECHO_BYTES => Some(Ok(())),
            Exchange::Close if ended => Some(Ok(())),
            Exchange::Get if ended && self.received > 0 => Some(Ok(())),
            _ if ended => Some(Err(Failure::Short)),
            _ => None,
        }
    }
}
