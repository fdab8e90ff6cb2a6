//! Streams that keep to their VM's rates of bytes.
//!
//! # Theory of operation
//! The programs' functions charge each packet to the VM's limit and drop what comes while its debt is
//! 100 ms of the rate ([`slipgate_abi::rate`]). A stream need not be dropped: the engine is an end of
//! it. So streams stop long before that, at a debt of [`AHEAD_NS`], and go on as it is paid. What is
//! left of the 100 ms is for datagrams, which never wait.
//!
//! - **To the guest**: a stream is not read while the debt is larger. Its bytes stay in the socket's
//!   queue, which closes the window toward the server. Those that have something wait in a row, and
//!   each sends one frame in its turn, of [`QUANTUM_NS`] of the rate at most.
//! - **From the guest**: what a guest sends is acknowledged at once, but its window opens at the rate
//!   only, by a quantum in each stream's turn. So nothing is lost and no acknowledgement is late: the
//!   guest waits for its window. What windows were opened by counts as a debt of its own, since it
//!   may not have come yet; the larger of the two counts. What a stream has not sent when it ends is
//!   taken back. A window may be [`WINDOW_NS`] of the rate, divided by the VM's streams, so that a stream
//!   over a distance has its rate and many that were idle do not overrun the limit together.
//!
//! Datagrams above the rate may keep the debt too large for streams. So [`LATE_NS`] after what streams have
//! used is paid for, the next one has its turn all the same, as soon as a packet would pass.
//!
//! A stream that waits holds up nothing: its own direction goes on at its turn, acknowledgements are sent
//! at once, and other flows do not look at the row. There is one timer for a direction while somebody
//! waits, and none else. A VM without a limit is asked for it once in a turn in which a stream has
//! something to do.
use std::collections::VecDeque;

use nix::sys::epoll::Epoll;
use slipgate_abi::{
    Direction,
    rate::{BURST_NS, RateRef},
};

use super::{Endpoint, Kind, Sockets, ToGuest};

/// Debt from which on streams wait, ns. The timer is a millisecond, and a busy machine wakes late.
const AHEAD_NS: u64 = 20_000_000;
/// Time's worth of the rate that a stream sends in its turn, ns.
const QUANTUM_NS: u64 = 4_000_000;
/// Time's worth of the rate that a guest may send at once on its only stream, ns.
const WINDOW_NS: u64 = 40_000_000;
/// Bytes of a quantum at least: a segment.
const LEAST_QUANTUM: u32 = 1_460;
/// Bytes of a window at least, but no more of the rate than packets that come at once may use.
const LEAST_WINDOW: u32 = 4 * LEAST_QUANTUM;
const LEAST_WINDOW_NS: u64 = BURST_NS - AHEAD_NS;
/// Time after which a stream has its turn whatever the debt is, as long as packets pass, ns: from when what
/// streams have used before is paid for.
const LATE_NS: u64 = 40_000_000;
/// Longest time until the rate is looked at again, ns: it may be another one by then.
const LOOK_AGAIN_NS: u64 = 100_000_000;
/// Turns at once, so that others have theirs where the rate is large.
const TURNS_AT_ONCE: usize = 64;
const SECOND_NS: u128 = 1_000_000_000;

/// A limit of bytes of one direction.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByteRate {
    limits: RateRef,
    direction: Direction,
    per_second: u64,
}

impl ByteRate {
    fn new(limits: RateRef, direction: Direction) -> Option<Self> {
        let per_second = limits.bytes_per_second(direction);
        (per_second != 0).then_some(Self {
            limits,
            direction,
            per_second,
        })
    }

    fn debt_ns(&self, now_ns: u64) -> u64 {
        self.limits.byte_debt_ns(self.direction, now_ns)
    }

    /// Bytes that the rate carries in this time.
    fn bytes_in(&self, ns: u64) -> u32 {
        let bytes = u128::from(self.per_second) * u128::from(ns) / SECOND_NS;
        u32::try_from(bytes).unwrap_or(u32::MAX)
    }

    /// Time that the rate takes for these bytes, ns.
    fn ns_of(&self, bytes: u32) -> u64 {
        let ns = (u128::from(bytes) * SECOND_NS).div_ceil(u128::from(self.per_second));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    fn quantum(&self) -> u32 {
        self.bytes_in(QUANTUM_NS).max(LEAST_QUANTUM)
    }

    /// Bytes that a guest may be allowed to send on one of so many streams.
    fn window(&self, streams: usize) -> u32 {
        let streams = u32::try_from(streams).unwrap_or(u32::MAX).max(1);
        let least = LEAST_WINDOW.min(self.bytes_in(LEAST_WINDOW_NS)).max(1);
        (self.bytes_in(WINDOW_NS) / streams).max(least)
    }

    /// Most payload of a frame: full segments within the quantum, one at least.
    pub(super) fn most_payload(&self, mss: u16) -> u32 {
        let mss = u32::from(mss).max(1);
        (self.quantum() / mss).max(1) * mss
    }
}

/// The limits of bytes of a VM; `None` where there is none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ByteRates {
    pub(super) from_guest: Option<ByteRate>,
    pub(super) to_guest: Option<ByteRate>,
}

impl ByteRates {
    pub(super) fn of(guest: &impl ToGuest) -> Self {
        let Some(limits) = guest.limits() else {
            return Self::default();
        };
        Self {
            from_guest: ByteRate::new(limits, Direction::Tx),
            to_guest: ByteRate::new(limits, Direction::Rx),
        }
    }
}

/// Streams that wait for their turn.
#[derive(Debug, Default)]
struct Row {
    /// Keys. Some may be of sockets that are gone: half of them at most.
    keys: VecDeque<u32>,
    /// Number of those.
    gone: usize,
    /// Time until which what the turns so far have used is paid for, ns.
    used_until_ns: u64,
    /// Time at which the row began, ns.
    began_ns: u64,
    /// Time of the next turn, if somebody waits for it; `None`: an event tells of it.
    due_ns: Option<u64>,
    /// Rate at which it went so far.
    per_second: u64,
}

impl Row {
    /// Forgets what turns have used if the rate is another one than before.
    fn goes_at(&mut self, rate: &ByteRate) {
        if std::mem::replace(&mut self.per_second, rate.per_second) != rate.per_second {
            self.used_until_ns = 0;
        }
    }

    fn push(&mut self, key: u32, now_ns: u64) {
        if self.keys.is_empty() {
            self.began_ns = now_ns;
        }
        self.keys.push_back(key);
    }

    /// One that waited is gone. `waits`: whether the socket of a key waits in this row.
    fn forget_one(&mut self, waits: impl Fn(u32) -> bool) {
        self.gone += 1;
        if self.gone * 2 > self.keys.len() {
            self.keys.retain(|key| waits(*key));
            self.gone = 0;
        }
    }

    /// One that had its turn was gone.
    fn was_gone(&mut self) {
        self.gone = self.gone.saturating_sub(1);
    }

    /// Debt of what passed, or of what turns have used if that is more, ns: what a guest was allowed to
    /// send may not have come yet.
    fn debt_ns(&self, rate: &ByteRate, now_ns: u64) -> u64 {
        let used_ns = self.used_until_ns.saturating_sub(now_ns);
        used_ns.max(rate.debt_ns(now_ns))
    }

    /// Time from which on the next one is late, ns.
    fn late_ns(&self) -> u64 {
        self.used_until_ns
            .max(self.began_ns)
            .saturating_add(LATE_NS)
    }

    /// Whether the next one has its turn.
    fn has_turn(&self, rate: &ByteRate, now_ns: u64) -> bool {
        self.debt_ns(rate, now_ns) < AHEAD_NS
            || now_ns >= self.late_ns() && rate.debt_ns(now_ns) < BURST_NS
    }

    /// One had its turn, and used so much time of the rate.
    fn has_used(&mut self, ns: u64, now_ns: u64) {
        self.used_until_ns = self.used_until_ns.max(now_ns).saturating_add(ns);
    }

    /// So many bytes that turns have used were not sent, and will not be.
    fn has_not_used(&mut self, bytes: u32) {
        let ns = u128::from(bytes) * SECOND_NS / u128::from(self.per_second.max(1));
        let ns = u64::try_from(ns).unwrap_or(u64::MAX);
        self.used_until_ns = self.used_until_ns.saturating_sub(ns);
    }

    /// Time of the next turn; `None` while nobody waits.
    fn due_ns(&self) -> Option<u64> {
        self.due_ns.filter(|_| !self.keys.is_empty())
    }

    /// Sets the time of the next turn.
    fn wait(&mut self, rate: &ByteRate, now_ns: u64) {
        let debt_ns = self.debt_ns(rate, now_ns);
        let paid_ns = now_ns + debt_ns.saturating_sub(AHEAD_NS - QUANTUM_NS);
        let passes_ns = now_ns + (rate.debt_ns(now_ns) + 1).saturating_sub(BURST_NS);
        let late_ns = passes_ns.max(self.late_ns());
        self.due_ns = Some(paid_ns.min(late_ns).min(now_ns + LOOK_AGAIN_NS));
    }
}

/// Streams that wait for the VM's rates.
#[derive(Debug, Default)]
pub(super) struct Pace {
    to_guest: Row,
    from_guest: Row,
    /// Streams that there are.
    pub(super) streams: usize,
}

impl Pace {
    pub(super) fn is_idle(&self) -> bool {
        self.to_guest.keys.is_empty() && self.from_guest.keys.is_empty()
    }

    /// Takes back what a stream was allowed and has not sent, once.
    pub(super) fn give_back(&mut self, endpoint: &mut Endpoint) {
        if let Kind::Stream(stream) = &endpoint.socket {
            // Its first window comes first, and no turn has used that.
            let left = stream.connection().allowed_left().min(endpoint.allowed);
            self.from_guest.has_not_used(left);
            endpoint.allowed = 0;
        }
    }

    pub(super) fn due_ns(&self) -> Option<u64> {
        let both = [self.to_guest.due_ns(), self.from_guest.due_ns()];
        both.into_iter().flatten().min()
    }
}

impl Sockets {
    /// Whether streams wait to send to the guest.
    pub fn has_waiting(&self) -> bool {
        !self.pace.to_guest.keys.is_empty()
    }

    /// Has a stream wait for its turn to send to the guest, if it has something.
    pub(super) fn wait_to_send(&mut self, key: u32, now_ns: u64) {
        if let Some(endpoint) = self.endpoints.get_mut(&key)
            && let Kind::Stream(stream) = &mut endpoint.socket
            && !endpoint.waits_to_send
            && stream.sendable(now_ns).is_some()
        {
            endpoint.waits_to_send = true;
            self.pace.to_guest.push(key, now_ns);
        }
    }

    /// Has streams send whose turn it is. Returns whether more have theirs at once.
    pub fn send_in_turns(&mut self, epoll: &Epoll, guest: &mut impl ToGuest, now_ns: u64) -> bool {
        let Some(rate) = ByteRates::of(guest).to_guest else {
            // The limit is gone.
            while let Some(key) = self.pace.to_guest.keys.pop_front() {
                if self.takes_turn(key) {
                    self.queue(key);
                }
            }
            self.pace.to_guest = Row::default();
            return !self.queued.is_empty();
        };
        self.pace.to_guest.goes_at(&rate);
        for _ in 0..TURNS_AT_ONCE {
            let row = &mut self.pace.to_guest;
            if row.keys.is_empty() || !row.has_turn(&rate, now_ns) {
                row.wait(&rate, now_ns);
                return false;
            }
            if !guest.has_room() {
                // An event comes once there is.
                row.due_ns = None;
                return false;
            }
            if let Some(key) = row.keys.pop_front()
                && self.takes_turn(key)
            {
                let debt_ns = rate.debt_ns(now_ns);
                self.stream_sends_one(key, &rate, epoll, guest, now_ns);
                let used_ns = rate.debt_ns(now_ns).saturating_sub(debt_ns);
                self.pace.to_guest.has_used(used_ns, now_ns);
            }
        }
        self.has_waiting()
    }

    /// Whether a stream that is taken from the row is there and has waited.
    fn takes_turn(&mut self, key: u32) -> bool {
        let endpoint = self.endpoints.get_mut(&key);
        let waited = endpoint.is_some_and(|endpoint| std::mem::take(&mut endpoint.waits_to_send));
        if !waited {
            self.pace.to_guest.was_gone();
        }
        waited
    }

    /// The rows forget a socket that was removed.
    pub(super) fn wait_no_more(&mut self, endpoint: &Endpoint) {
        let endpoints = &self.endpoints;
        if endpoint.waits_to_send {
            let waits = |key| endpoints.get(&key).is_some_and(|it| it.waits_to_send);
            self.pace.to_guest.forget_one(waits);
        }
        if endpoint.waits_for_window {
            let waits = |key| endpoints.get(&key).is_some_and(|it| it.waits_for_window);
            self.pace.from_guest.forget_one(waits);
        }
    }

    /// Whether a stream waits for its turn to send to the guest, and the turn for the rate.
    pub(super) fn is_held_by_rate(&self, key: u32) -> bool {
        let endpoint = self.endpoints.get(&key);
        endpoint.is_some_and(|it| it.waits_to_send) && self.pace.to_guest.due_ns().is_some()
    }

    /// Before a connection of the guest stands: holds its first window, if the VM's rate is limited.
    pub(super) fn hold_first_window(&mut self, key: u32, guest: &impl ToGuest) {
        if let Some(rate) = ByteRates::of(guest).from_guest {
            // Many that begin together are to pass without a loss.
            let window = rate.window(self.pace.streams);
            let bytes = window.min(rate.quantum().max(LEAST_WINDOW));
            if let Some(stream) = self.stream(key) {
                stream.connection_mut().hold_window(bytes);
            }
        }
    }

    /// Before a stream's acknowledgement: has its window open as far as the rate allows, and the stream
    /// wait in the row if that is not far. `rate`: `None` if it is not limited (any more).
    pub(super) fn open_window_of(&mut self, key: u32, rate: Option<&ByteRate>, now_ns: u64) {
        let streams = self.pace.streams;
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        let Kind::Stream(stream) = &mut endpoint.socket else {
            return;
        };
        let connection = stream.connection_mut();
        let Some(rate) = rate else {
            connection.release_window();
            return;
        };
        if !connection.is_window_held() {
            connection.hold_window(0);
        }
        if connection.lacks(rate.window(streams)) > 0 && !endpoint.waits_for_window {
            endpoint.waits_for_window = true;
            self.pace.from_guest.push(key, now_ns);
        }
        self.open_windows(rate, now_ns);
    }

    /// Opens the windows of streams whose turn it is.
    fn open_windows(&mut self, rate: &ByteRate, now_ns: u64) {
        let window = rate.window(self.pace.streams);
        self.pace.from_guest.goes_at(rate);
        loop {
            let row = &mut self.pace.from_guest;
            if row.keys.is_empty() || !row.has_turn(rate, now_ns) {
                return row.wait(rate, now_ns);
            }
            let Some(key) = row.keys.pop_front() else {
                return;
            };
            // It may be gone, and its key another's.
            let Some(endpoint) = self.endpoints.get_mut(&key) else {
                row.was_gone();
                continue;
            };
            if !std::mem::take(&mut endpoint.waits_for_window) {
                row.was_gone();
                continue;
            }
            let Kind::Stream(stream) = &mut endpoint.socket else {
                continue;
            };
            let bytes = stream.connection().lacks(window).min(rate.quantum());
            if bytes == 0 {
                continue;
            }
            stream.widen_queue(window);
            stream.allow(bytes);
            endpoint.allowed = endpoint.allowed.saturating_add(bytes);
            row.has_used(rate.ns_of(bytes), now_ns);
            if stream.connection().lacks(window) > 0 {
                endpoint.waits_for_window = true;
                self.pace.from_guest.push(key, now_ns);
            }
            if stream_owes(endpoint) {
                self.queue(key);
            }
        }
    }

    /// Opens the windows that are due, before what is queued is sent.
    pub(super) fn open_due_windows(&mut self, rate: Option<&ByteRate>, now_ns: u64) {
        if self.pace.from_guest.keys.is_empty() {
            return;
        }
        let Some(rate) = rate else {
            // The limit is gone.
            while let Some(key) = self.pace.from_guest.keys.pop_front() {
                if let Some(endpoint) = self.endpoints.get_mut(&key)
                    && std::mem::take(&mut endpoint.waits_for_window)
                    && let Kind::Stream(stream) = &mut endpoint.socket
                {
                    stream.connection_mut().release_window();
                    stream.reopen_window();
                    if stream_owes(endpoint) {
                        self.queue(key);
                    }
                }
            }
            self.pace.from_guest = Row::default();
            return;
        };
        self.open_windows(rate, now_ns);
    }
}

fn stream_owes(endpoint: &Endpoint) -> bool {
    match &endpoint.socket {
        Kind::Stream(stream) => stream.connection().owes_acknowledgement(),
        Kind::Datagrams(_) => false,
    }
}

#[cfg(test)]
#[path = "pace_test.rs"]
mod tests;
