//! Timestamps (RFC 7323): what is echoed, which segments are too old, and the guest's round-trip time.
//!
//! They are used if the guest's SYN has them. The value is the time in milliseconds since the
//! connection began, from a beginning that its random initial sequence number gives: it tells neither
//! the time nor how long the engine runs.
//!
//! A segment without the option on such a connection is taken all the same, as Linux does: RFC 7323
//! section 3.2 would drop it silently, so that a guest behind something that removes options waits for
//! ever. Its sequence numbers are checked as without timestamps.
use super::{Connection, RETRANSMISSION_NS, Segment};
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    tcp::{before, options::Timestamps},
};

/// Silence after which the guest's last value means nothing, since its clock may have wrapped (RFC 7323
/// section 5.5), ns. The fastest clock is one of microseconds, which Linux has on routes with
/// `tcp_usec_ts`; it takes the same time for any guest (`TCP_PAWS_WRAP`).
const OUTDATED_NS: u64 = 2_147 * SECOND_NS;
/// Longest round trip that is taken for one, ns. What takes longer is a pause of the VM, after which the
/// guest answers as before.
const MOST_ROUND_TRIP_NS: u64 = 3 * SECOND_NS;

/// State of a connection's timestamps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// The guest's newest value (TS.Recent), and when it came.
    recent: u32,
    recent_ns: u64,
    /// Time at which the connection began, and the value then.
    began_ns: u64,
    first: u32,
    /// The last number that was acknowledged to the guest (Last.ACK.sent).
    acknowledged: u32,
    /// Sequence number that ends the present measurement of the round trip: one for each.
    measured_to: u32,
    round_trip: Option<RoundTrip>,
}

/// Estimate of the time to the guest and back (RFC 6298 section 2).
#[derive(Clone, Copy, Debug)]
struct RoundTrip {
    smoothed_ns: u64,
    variation_ns: u64,
}

impl Times {
    /// Of a guest whose SYN has this value.
    pub(super) fn new(syn: &Segment, initial: u32, now_ns: u64) -> Option<Self> {
        let value = syn.timestamps?.value;
        Some(Self {
            recent: value,
            recent_ns: now_ns,
            began_ns: now_ns,
            first: first(initial),
            acknowledged: syn.sequence.wrapping_add(1),
            measured_to: initial,
            round_trip: None,
        })
    }

    fn value(&self, now_ns: u64) -> u32 {
        let since_ms = now_ns.saturating_sub(self.began_ns) / MILLISECOND_NS;
        self.first.wrapping_add(since_ms as u32)
    }

    fn measure(&mut self, echo: u32, now_ns: u64) {
        let since_ms = u64::from(self.value(now_ns).wrapping_sub(echo));
        // None of ours has been sent before the connection began.
        if since_ms * MILLISECOND_NS > now_ns.saturating_sub(self.began_ns) {
            return;
        }
        let sample_ns = (since_ms * MILLISECOND_NS).min(MOST_ROUND_TRIP_NS);
        self.round_trip = Some(match self.round_trip {
            None => RoundTrip {
                smoothed_ns: sample_ns,
                variation_ns: sample_ns / 2,
            },
            Some(before) => RoundTrip {
                variation_ns: (3 * before.variation_ns + before.smoothed_ns.abs_diff(sample_ns))
                    / 4,
                smoothed_ns: (7 * before.smoothed_ns + sample_ns) / 8,
            },
        });
    }
}

/// Whether a guest's timestamp is older than another (RFC 7323 section 5.3). Of two that are half of the
/// space apart neither is.
const fn is_older(a: u32, b: u32) -> bool {
    b.wrapping_sub(a).cast_signed() > 0
}

/// Value of a connection's first timestamp: as little of a clock as its sequence number is.
fn first(initial: u32) -> u32 {
    initial.rotate_left(16).wrapping_mul(0x9e37_79b1)
}

impl Connection {
    /// The connection begins now, by the guest's SYN.
    pub(super) fn begin_clock(&mut self) {
        let now_ns = self.now_ns;
        if let Some(times) = &mut self.times {
            times.began_ns = now_ns;
            times.recent_ns = now_ns;
        }
    }

    /// Takes the timestamps of the guest's SYN, or that it has none.
    pub(super) fn take_times_of_syn(&mut self, syn: &Segment, now_ns: u64) {
        let began_ns = self.times.map_or(now_ns, |times| times.began_ns);
        let initial = self.unacknowledged;
        self.times = Times::new(syn, initial, now_ns).map(|times| Times { began_ns, ..times });
    }

    /// Timestamps of our own SYN to the guest, which may have none.
    pub(super) fn offered_timestamps(&mut self) -> Timestamps {
        let (initial, now_ns) = (self.unacknowledged, self.now_ns);
        let times = self.times.get_or_insert(Times {
            recent: 0,
            recent_ns: now_ns,
            began_ns: now_ns,
            first: first(initial),
            acknowledged: 0,
            measured_to: initial,
            round_trip: None,
        });
        Timestamps {
            value: times.value(now_ns),
            echo: 0,
        }
    }

    /// Timestamps of a segment that acknowledges all so far.
    pub(super) fn timestamps(&mut self) -> Option<Timestamps> {
        let times = self.times.as_mut()?;
        times.acknowledged = self.next_from_guest;
        Some(Timestamps {
            value: times.value(self.now_ns),
            echo: times.recent,
        })
    }

    /// Whether a segment is an old one that was under way for long (PAWS, RFC 7323 section 5.3).
    pub(in crate::tcp) fn is_outdated(&self, segment: &Segment) -> bool {
        let (Some(times), Some(theirs)) = (&self.times, segment.timestamps) else {
            return false;
        };
        let silent_ns = self.now_ns.saturating_sub(times.recent_ns);
        is_older(theirs.value, times.recent) && silent_ns < OUTDATED_NS
    }

    /// Whether a SYN has a later time than all that its guest has sent (RFC 6191).
    pub(super) fn is_later(&self, syn: &Segment) -> bool {
        match (&self.times, syn.timestamps) {
            (Some(times), Some(theirs)) => is_older(times.recent, theirs.value),
            _ => false,
        }
    }

    /// Notes the time of a segment that is not outdated, to echo it (RFC 7323 section 4.3).
    pub(super) fn note_times(&mut self, segment: &Segment) {
        let now_ns = self.now_ns;
        let (Some(times), Some(theirs)) = (&mut self.times, segment.timestamps) else {
            return;
        };
        if !before(times.acknowledged, segment.sequence) {
            times.recent = theirs.value;
            times.recent_ns = now_ns;
        }
    }

    /// Measures the round trip by a segment that acknowledges something new, up to `to`.
    pub(super) fn measure_round_trip(&mut self, segment: &Segment, to: u32) {
        let (now_ns, sent) = (self.now_ns, self.sent);
        if let (Some(times), Some(theirs)) = (&mut self.times, segment.timestamps)
            && before(times.measured_to, to)
        {
            times.measured_to = sent;
            times.measure(theirs.echo, now_ns);
        }
    }

    /// Returns the first wait for an acknowledgement, ns (RFC 6298 section 2; of at least 200 ms).
    pub(super) fn first_wait_ns(&self) -> u64 {
        let round_trip = self.times.and_then(|times| times.round_trip);
        round_trip.map_or(RETRANSMISSION_NS, |it| {
            let spread_ns = (4 * it.variation_ns).max(MILLISECOND_NS);
            RETRANSMISSION_NS.max(it.smoothed_ns.saturating_add(spread_ns))
        })
    }
}

#[cfg(test)]
#[path = "times_test.rs"]
mod tests;
