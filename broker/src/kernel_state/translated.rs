//! Ports of connections that the host's own NAT translates, as last read.
//!
//! The kernel lists all of its connections for it, in two microseconds for each: half a second for
//! 250,000. So a thread of its own reads the list, and the broker answers requests meanwhile. There is
//! one such thread at a time. It ends when it has read the list, or with the broker, and the next one
//! begins so late that reading takes no more than a twentieth of the time.
use std::{
    collections::BTreeSet,
    fmt, io,
    ops::RangeInclusive,
    os::fd::{AsFd as _, BorrowedFd},
    sync::{
        Arc,
        mpsc::{Receiver, TryRecvError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use slipgate_abi::Protocol;
use slipgate_control::host::translated_ports;

/// IP protocol and port of each connection that the host translates.
pub(super) type Ports = BTreeSet<(u8, u16)>;
/// Reads those in some ranges.
type Read = dyn Fn(&[RangeInclusive<u16>]) -> io::Result<Ports> + Send + Sync;

/// Least time from a reading to the next, in times of what it took.
const APART_IN_READINGS: u32 = 20;
/// Time to the next attempt when no thread could be started.
const AGAIN_AFTER: Duration = Duration::from_secs(10);

/// The ports, and how they are read.
pub(super) struct TranslatedPorts {
    read: Arc<Read>,
    taken: Ports,
    under_way: Option<Reading>,
    /// Before that time no reading begins.
    not_before: Instant,
    /// Whether a reading was asked for that has not begun.
    is_owed: bool,
}

/// A reading that a thread does.
struct Reading {
    begun: Instant,
    done: Receiver<(Duration, io::Result<Ports>)>,
    /// Closed at the other end when the thread ends.
    end: io::PipeReader,
    /// Whether the result is still of use.
    is_wanted: bool,
}

impl fmt::Debug for TranslatedPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("TranslatedPorts");
        shown.field("taken", &self.taken.len());
        shown.field("is_under_way", &self.under_way.is_some());
        shown.finish_non_exhaustive()
    }
}

impl Default for TranslatedPorts {
    /// None yet, to be read from the kernel.
    fn default() -> Self {
        Self::by(|ranges| {
            let is_guests = |port: u16| ranges.iter().any(|range| range.contains(&port));
            translated_ports(is_guests)
        })
    }
}

impl TranslatedPorts {
    fn by(
        read: impl Fn(&[RangeInclusive<u16>]) -> io::Result<Ports> + Send + Sync + 'static,
    ) -> Self {
        Self {
            read: Arc::new(read),
            taken: BTreeSet::new(),
            under_way: None,
            not_before: Instant::now(),
            is_owed: false,
        }
    }

    /// The ports in guests' ranges, as last read.
    pub(super) fn taken(&self) -> &Ports {
        &self.taken
    }

    /// Forgets them: they do not matter now.
    pub(super) fn forget(&mut self) {
        self.taken.clear();
        self.is_owed = false;
        if let Some(reading) = &mut self.under_way {
            reading.is_wanted = false;
        }
    }

    /// Reads those of guests' ranges at once, in the calling thread.
    pub(super) fn read_now(&mut self, ranges: &[RangeInclusive<u16>]) {
        let begun = Instant::now();
        let read = (self.read)(ranges).map(|taken| at_most_half(taken, ranges));
        self.take_in(begun, begun.elapsed(), read);
    }

    /// Has those of guests' ranges read, now or as soon as it may be.
    pub(super) fn ask(&mut self, ranges: &[RangeInclusive<u16>]) {
        self.is_owed = true;
        if self.under_way.is_some() || Instant::now() < self.not_before {
            return;
        }
        match self.begin(ranges.to_vec()) {
            Ok(reading) => {
                self.under_way = Some(reading);
                self.is_owed = false;
            }
            Err(e) => {
                tracing::debug!("looking at the host's translated connections: {e}");
                self.not_before = Instant::now() + AGAIN_AFTER;
            }
        }
    }

    fn begin(&self, ranges: Vec<RangeInclusive<u16>>) -> io::Result<Reading> {
        let (end, closed_with_thread) = io::pipe()?;
        let (told, done) = sync_channel(1);
        let (begun, read) = (Instant::now(), Arc::clone(&self.read));
        let thread = thread::Builder::new().name("host-nat".into());
        thread.spawn(move || {
            let _closed_with_thread = closed_with_thread;
            // Dropped before the pipe, also by a panic: whoever sees its end finds the result, or none.
            let told = told;
            let ports = read(&ranges).map(|taken| at_most_half(taken, &ranges));
            // Nobody may want it any more.
            let _ = told.send((begun.elapsed(), ports));
        })?;
        Ok(Reading {
            begun,
            done,
            end,
            is_wanted: true,
        })
    }

    /// Takes in what a thread has read. Returns whether the ports are others than before.
    pub(super) fn follow(&mut self) -> bool {
        let Some(reading) = &self.under_way else {
            return false;
        };
        let (took, read) = match reading.done.try_recv() {
            Ok(done) => done,
            Err(TryRecvError::Empty) => return false,
            Err(TryRecvError::Disconnected) => {
                let error = io::Error::other("the thread that read them died");
                (reading.begun.elapsed(), Err(error))
            }
        };
        let (begun, is_wanted) = (reading.begun, reading.is_wanted);
        self.under_way = None;
        let read = match is_wanted {
            true => read,
            false => Ok(BTreeSet::new()),
        };
        self.take_in(begun, took, read)
    }

    fn take_in(&mut self, begun: Instant, took: Duration, read: io::Result<Ports>) -> bool {
        self.not_before = begun + took * APART_IN_READINGS;
        match read {
            Ok(now) => std::mem::replace(&mut self.taken, now) != self.taken,
            Err(e) => {
                tracing::debug!("looking at the host's translated connections: {e}");
                false
            }
        }
    }

    /// Descriptor to poll for input while a thread reads.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.under_way.as_ref().map(|reading| reading.end.as_fd())
    }

    /// Time at which a reading that is owed may begin.
    pub(super) fn due(&self) -> Option<Instant> {
        (self.is_owed && self.under_way.is_none()).then_some(self.not_before)
    }
}

/// Leaves guests one half of the ports of each range at least, whatever the clients of the host's NAT
/// do.
fn at_most_half(taken: Ports, ranges: &[RangeInclusive<u16>]) -> Ports {
    let mut kept = BTreeSet::new();
    for protocol in [Protocol::Tcp, Protocol::Udp].map(|protocol| protocol as u8) {
        for range in ranges {
            let own = taken.range((protocol, *range.start())..=(protocol, *range.end()));
            kept.extend(own.take(range.len() / 2));
        }
    }
    kept
}

#[cfg(test)]
#[path = "translated_test.rs"]
mod tests;
