//! Traffic of a guest during a test: long streams, short connections, paced datagrams.

use std::{
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Guest, Result,
    clients::{tcp, tcp::EchoSession, udp, udp::PacedReport},
};

use super::{WAIT, eventually};

/// One connection over which checked bytes go both ways until it is told to end.
pub(crate) struct Stream {
    pub(crate) local: SocketAddr,
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<Result<()>>,
}

impl Stream {
    /// Starts one, to an echo server; `size` bytes there and back at a time, and a pause.
    pub(crate) fn start(guest: &Guest, to: SocketAddr, size: usize, pause: Duration) -> Stream {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (told, local) = mpsc::channel();
        let (their_stop, their_rounds): (_, Arc<AtomicU64>) = (stop.clone(), Arc::clone(&rounds));
        let thread = guest.ns.thread("stream", move || {
            let mut stream = tcp::connect(to, WAIT)?;
            let _ = told.send(local_address(&stream));
            let mut session = EchoSession::new(&mut stream);
            while !their_stop.load(SeqCst) {
                session.round(size)?;
                their_rounds.fetch_add(1, SeqCst);
                std::thread::sleep(pause);
            }
            Ok(())
        });
        let local = local.recv_timeout(WAIT).expect("the stream connects");
        Stream {
            local,
            stop,
            rounds,
            thread,
        }
    }

    /// Waits until more bytes went there and back.
    pub(crate) fn expect_progress(&self) {
        // One more round may have been under way already, whole.
        let beyond = self.rounds.load(SeqCst) + 1;
        eventually("the progress of a stream", || {
            self.rounds.load(SeqCst) > beyond
        });
    }

    /// Ends it. Not a byte was wrong.
    pub(crate) fn finish(self) {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap().unwrap();
    }
}

pub(crate) fn local_address(stream: &TcpStream) -> SocketAddr {
    stream.local_addr().expect("a connection's own address")
}

/// When something was tried, and what it came to.
pub(crate) struct Attempt {
    began: Instant,
    ended: Instant,
    result: Result<Duration>,
}

/// Connections that come and go, one after another.
pub(crate) struct Churn {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Attempt>>,
}

impl Churn {
    /// Starts; `to` closes at once.
    pub(crate) fn start(guest: &Guest, to: SocketAddr, pause: Duration) -> Churn {
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = stop.clone();
        let thread = guest.ns.thread("churn", move || {
            let mut attempts = Vec::new();
            while !theirs.load(SeqCst) {
                let began = Instant::now();
                let result = tcp::connect_close(to, Duration::from_secs(20));
                let ended = Instant::now();
                attempts.push(Attempt {
                    began,
                    ended,
                    result,
                });
                std::thread::sleep(pause);
            }
            attempts
        });
        Churn { stop, thread }
    }

    /// Ends it. Only those that were under way in an outage may have failed. How many went well.
    pub(crate) fn finish(self, outages: &[(Instant, Instant)]) -> usize {
        self.stop.store(true, SeqCst);
        let attempts = self.thread.join().unwrap();
        let in_outage = |attempt: &Attempt| {
            let meets =
                |(from, to): &(Instant, Instant)| attempt.began <= *to && attempt.ended >= *from;
            outages.iter().any(meets)
        };
        for attempt in &attempts {
            if let Err(error) = &attempt.result {
                let took = attempt.ended - attempt.began;
                assert!(
                    in_outage(attempt),
                    "outside of any outage: {error} after {took:?}"
                );
            }
        }
        let fine = attempts.iter().filter(|attempt| attempt.result.is_ok());
        fine.count()
    }
}

/// A series of numbered datagrams on one flow, one each `interval` for `span`, echoed.
pub(crate) fn paced(
    guest: &Guest,
    to: SocketAddr,
    span: Duration,
    interval: Duration,
) -> JoinHandle<PacedReport> {
    let count = (span.as_micros() / interval.as_micros()) as u64;
    guest.ns.thread("paced", move || {
        udp::paced(to, count, 400, interval, WAIT).unwrap()
    })
}

/// Every one came back, once, whole.
pub(crate) fn expect_whole(report: &PacedReport) {
    assert_eq!(
        (report.lost(), report.duplicated, report.corrupt),
        (0, 0, 0),
        "lost, duplicated, corrupt of {report:?}"
    );
}
