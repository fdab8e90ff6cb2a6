//! The guest's workloads, one module each.
//!
//! A workload that can be shared runs on every CPU, each on its own stack. The CPUs draw their work
//! from one counter ([`Plan::draw`]) and add their results to one [`Outcome`].

pub mod balloon;
pub mod connection;
mod connections;
pub mod disk;
mod dns;
mod fill;
mod flood;
mod ping;
mod request_response;
mod serve;
mod stream;
pub mod vsock;

use alloc::{string::String, sync::Arc};
use core::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
};

use spin::mutex::SpinMutex;

pub use self::{
    dns::{Answer, DnsError},
    ping::Pinged,
    serve::Served,
};
use crate::{
    command::Workload,
    histogram::Histogram,
    net::Stack,
    platform::{Nic, NicCounters, Platform},
};

/// Workload with its name looked up, which all CPUs share.
pub struct Plan {
    /// Workload of the command line.
    pub workload: Workload,
    /// Address and port of the server.
    pub server: SocketAddr,
    /// Number of CPUs that share the work.
    pub cpus: usize,
    /// Start of the workload, ns.
    pub started_ns: u64,
    /// Connections of all CPUs at once.
    at_once: usize,
    left: AtomicU64,
    outcome: SpinMutex<Outcome>,
}

impl Plan {
    /// Returns the plan of a shared workload.
    pub fn new(workload: Workload, server: SocketAddr, cpus: usize, started_ns: u64) -> Self {
        let (left, at_once) = workload.shared().unwrap_or_default();
        Plan {
            workload,
            server,
            cpus,
            started_ns,
            at_once: at_once as usize,
            left: AtomicU64::new(left),
            outcome: SpinMutex::default(),
        }
    }

    /// Takes up to `most` units of the remaining work; 0 when none is left.
    pub fn draw(&self, most: u64) -> u64 {
        let take = |left: u64| Some(left.saturating_sub(most));
        match self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
        {
            Ok(left) | Err(left) => left.min(most),
        }
    }

    /// Returns how many connections CPU `cpu` has at once.
    fn share(&self, cpu: usize) -> usize {
        self.at_once / self.cpus + usize::from(cpu < self.at_once % self.cpus)
    }

    /// Returns the length of a flood's frames, bytes with the Ethernet header.
    pub fn frame_bytes(&self) -> u32 {
        flood::frame_bytes(self)
    }

    /// Returns the result so far.
    pub fn outcome(&self) -> Outcome {
        self.outcome.lock().clone()
    }

    /// Does this CPU's share.
    pub fn work<P: Platform, N: Nic>(self: &Arc<Self>, stack: &mut Stack<'_, P, N>) {
        let before = stack.device.nic.counters();
        let mut outcome = match &self.workload {
            Workload::Connections { .. } => connections::work(self, stack),
            Workload::RequestResponse { .. } => request_response::work(self, stack),
            Workload::Stream { .. } => stream::work(self, stack),
            Workload::Flood { .. } => flood::work(self, stack),
            Workload::Ipv6
            | Workload::Dns { .. }
            | Workload::Ping { .. }
            | Workload::Serve { .. }
            | Workload::Reset
            | Workload::Wait { .. }
            | Workload::Fill { .. }
            | Workload::Disk { .. }
            | Workload::Vsock(_)
            | Workload::Balloon(_)
            | Workload::SelfTest => return,
        };
        outcome.nic = difference(stack.device.nic.counters(), before);
        self.outcome.lock().merge(outcome);
    }
}

pub(crate) use self::{dns::resolve, fill::fill, ping::ping, serve::serve};

/// Reason why a connection failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The SYN was answered by RST.
    Refused,
    /// The SYN was answered by ICMP Destination Unreachable.
    Unreachable,
    /// The peer did not answer in time.
    TimedOut,
    /// The open connection was reset.
    Reset,
    /// The peer closed too early.
    Short,
    /// The peer sent wrong bytes.
    Wrong,
    /// The connection could not be opened, or the device can't send such frames.
    Unable,
}

impl Failure {
    /// All failures, with their names in the output.
    pub const ALL: [(Failure, &str); 7] = [
        (Failure::Refused, "refused"),
        (Failure::Unreachable, "unreachable"),
        (Failure::TimedOut, "timed_out"),
        (Failure::Reset, "reset"),
        (Failure::Short, "short"),
        (Failure::Wrong, "wrong"),
        (Failure::Unable, "unable"),
    ];
}

/// Result of a workload, on one CPU or on all.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Duration of each connection or message, from its beginning to its end.
    pub latency: Histogram,
    /// Time from SYN to SYN-ACK of each connection.
    pub connect: Histogram,
    /// Time of each reset of a connection since the machine was restored, if it was.
    pub reset_after_restore: Histogram,
    /// Number of connections, messages, streams or frames that passed.
    pub done: u64,
    /// Number of failures, in the order of [`Failure::ALL`].
    pub failures: [u64; Failure::ALL.len()],
    /// Payload bytes: received, or acknowledged by the receiver.
    pub bytes: u64,
    /// Times that a connection had to wait for a port out of TIME-WAIT.
    pub port_waits: u64,
    /// End of the last connection, message, stream or frame, ns.
    pub ended_ns: u64,
    /// Counters of the queue pairs for the workload's time.
    pub nic: NicCounters,
    /// Description of the first failure.
    pub note: Option<String>,
}

impl Outcome {
    /// Counts one failure of a kind.
    pub fn fail(&mut self, failure: Failure) {
        self.fail_many(failure, 1);
    }

    /// Counts the failure of a connection, and when it was if it is a reset after a restore.
    pub fn fail_on<P: Platform, N: Nic>(&mut self, stack: &Stack<'_, P, N>, failure: Failure) {
        self.fail(failure);
        if let (Failure::Reset, Some(ns)) = (failure, stack.since_restore_ns()) {
            self.reset_after_restore.record(ns);
        }
    }

    /// Counts several failures of one kind.
    pub fn fail_many(&mut self, failure: Failure, count: u64) {
        let index = Failure::ALL.iter().position(|(kind, _)| *kind == failure);
        if let Some(index) = index {
            self.failures[index] += count;
        }
    }

    /// Returns the number of failures.
    pub fn failed(&self) -> u64 {
        self.failures.iter().sum()
    }

    fn merge(&mut self, other: Outcome) {
        self.latency.merge(&other.latency);
        self.connect.merge(&other.connect);
        self.reset_after_restore.merge(&other.reset_after_restore);
        self.done += other.done;
        for (ours, theirs) in self.failures.iter_mut().zip(other.failures) {
            *ours += theirs;
        }
        self.bytes += other.bytes;
        self.port_waits += other.port_waits;
        self.ended_ns = self.ended_ns.max(other.ended_ns);
        self.nic = sum(self.nic, other.nic);
        self.note = self.note.take().or(other.note);
    }
}

fn sum(a: NicCounters, b: NicCounters) -> NicCounters {
    combine(a, b, u64::wrapping_add)
}

fn difference(a: NicCounters, b: NicCounters) -> NicCounters {
    combine(a, b, u64::wrapping_sub)
}

fn combine(a: NicCounters, b: NicCounters, each: fn(u64, u64) -> u64) -> NicCounters {
    NicCounters {
        rx_frames: each(a.rx_frames, b.rx_frames),
        rx_bytes: each(a.rx_bytes, b.rx_bytes),
        rx_merged: each(a.rx_merged, b.rx_merged),
        rx_checksum_offloaded: each(a.rx_checksum_offloaded, b.rx_checksum_offloaded),
        rx_dropped: each(a.rx_dropped, b.rx_dropped),
        tx_frames: each(a.tx_frames, b.tx_frames),
        tx_bytes: each(a.tx_bytes, b.tx_bytes),
        tx_segmented: each(a.tx_segmented, b.tx_segmented),
        tx_full: each(a.tx_full, b.tx_full),
        kicks: each(a.kicks, b.kicks),
        interrupts: each(a.interrupts, b.interrupts),
    }
}
