//! The look for work before a device's thread sleeps.
//!
//! A thread that has no more work polls its rings for a while, and the driver does not notify
//! meanwhile: that spares the driver's notification, the sleep, and the time that a wakeup takes.
//! [`Patience`] is how long a look pays off; a [`Look`] is one of them, which yields the core
//! between polls and ends when another thread has used it.
//!
//! A yield to a thread that wants the core costs its whole slice, some milliseconds, where a
//! notification would wake this thread at once. So a device whose requests wait for their answers
//! tells its patience of it ([`Patience::looked`]), which gives up looking for a multiple of that time.
use std::{
    hint,
    ops::RangeInclusive,
    thread,
    time::{Duration, Instant},
};

/// Polls of the rings between system calls: a pause instruction each, some 40 ns.
const RING_POLLS: u32 = 16;

/// Duration of a yield from which on another thread has used the core. Then it is time to sleep:
/// the scheduler moves a thread that wakes up to an idle core, but not one that only yields.
const CONTENDED: Duration = Duration::from_micros(20);

/// Time to look before sleeping, by the rule of KVM's `halt_poll_ns`: longer when the event that
/// ended a sleep came so soon that looking would have found it, none when it came later.
#[derive(Debug)]
pub(super) struct Patience {
    window: Duration,
    most: Duration,
    /// [`CONTENDED`], but for tests.
    contended: Duration,
    /// The last rest: its end, until which the core is taken as wanted by other threads, and its length
    /// as a multiple of the yield's.
    last_rest: Option<(Instant, u32)>,
}

impl Patience {
    const LEAST: Duration = Duration::from_micros(10);
    /// Time without looks after a yield that another thread used, as a multiple of the yield's. A
    /// thread that sleeps wakes on an idle core if there is one, so the first rest is short. If
    /// another thread uses the core again soon, there is none, and rests become longer: at most a
    /// twentieth of the time is lost in yields as long as those then.
    const REST: RangeInclusive<u32> = 1..=20;
    /// Time after a rest, as a multiple of the yield's, within which the next yield that another
    /// thread uses is of the same cause.
    const SOON: u32 = 20;
    /// Shortest yield that is counted: a shorter one went to an interrupt, or to a thread that had
    /// little to do. It ends its look and none after it.
    const LEAST_LOST: Duration = Duration::from_micros(200);
    /// Longest yield that is counted: a longer one is a stop of the whole process.
    const MOST_LOST: Duration = Duration::from_millis(100);

    /// Returns the patience of a thread that does not look yet, and never for longer than `most`.
    pub(super) fn new(most: Duration) -> Patience {
        Patience {
            window: Duration::ZERO,
            most,
            contended: CONTENDED,
            last_rest: None,
        }
    }

    /// Returns a patience that no other thread's use of the core ends.
    #[cfg(test)]
    pub(super) fn undisturbed(most: Duration) -> Patience {
        Patience {
            contended: Duration::MAX,
            ..Patience::new(most)
        }
    }

    /// Begins a look: the thread has just run out of work.
    pub(super) fn look(&self) -> Look {
        Look {
            since: Instant::now(),
            window: self.window,
            contended: self.contended,
            lost: None,
        }
    }

    /// Learns from a sleep: `idle` is the time from the begin of the look before it to the event
    /// that ended it.
    pub(super) fn slept(&mut self, idle: Duration) {
        self.window = if idle > self.most || self.is_core_wanted() {
            Duration::ZERO
        } else {
            (self.window * 2).clamp(Self::LEAST, self.most)
        };
    }

    /// Learns from a look, whether it found something or not. If another thread used the core, there
    /// are no looks for a while.
    pub(super) fn looked(&mut self, look: &Look) {
        if let Some(lost) = look.lost.filter(|lost| *lost >= Self::LEAST_LOST) {
            self.window = Duration::ZERO;
            let (lost, now) = (lost.min(Self::MOST_LOST), Instant::now());
            let longer = |(end, rest)| (now < end + lost * Self::SOON).then_some(2 * rest);
            let rest = self
                .last_rest
                .and_then(longer)
                .unwrap_or(*Self::REST.start());
            let rest = rest.min(*Self::REST.end());
            self.last_rest = Some((now + lost * rest, rest));
        }
    }

    fn is_core_wanted(&self) -> bool {
        self.last_rest
            .is_some_and(|(until, _)| Instant::now() < until)
    }
}

/// One look: poll the rings, ask whether it goes on, look at what takes a system call, and so on.
#[derive(Debug)]
pub(super) struct Look {
    since: Instant,
    window: Duration,
    contended: Duration,
    /// Time that another thread had the core in a yield.
    lost: Option<Duration>,
}

impl Look {
    /// Polls the rings some times by `has_work`. Returns whether there is work. To be called after
    /// each yield, so that what came meanwhile is found even when the look then ends.
    ///
    /// # Errors
    /// `has_work` fails.
    pub(super) fn rings<E>(
        &self,
        mut has_work: impl FnMut() -> Result<bool, E>,
    ) -> Result<bool, E> {
        for _ in 0..RING_POLLS {
            hint::spin_loop();
            if has_work()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns whether the look goes on. If so, other threads have had the core: one of them may
    /// produce the work that is looked for.
    pub(super) fn goes_on(&mut self) -> bool {
        let now = Instant::now();
        if self.lost.is_some() || now - self.since >= self.window {
            return false;
        }
        thread::yield_now();
        self.lost = Some(now.elapsed()).filter(|lost| *lost >= self.contended);
        true
    }

    /// Returns when the thread ran out of work.
    pub(super) fn since(&self) -> Instant {
        self.since
    }
}

#[cfg(test)]
#[path = "look_test.rs"]
mod tests;
