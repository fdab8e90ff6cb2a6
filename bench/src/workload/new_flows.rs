//! Number of flows admitted per second: first packets of different flows are written to the TAP,
//! and counted when they arrive in the world.
//!
//! At most [`WINDOW`] frames are in flight, so that no queue on the path overflows. A contender
//! that decides in the kernel does so on the writer's core; one that decides in a process does so
//! on that process's core, while the writer waits. The flows per second of the decider's CPU time
//! are the capacity of one core that runs nothing else.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use super::{ADMISSION, Limits, Metric, Sample, Workload, rates};
use crate::{
    contender::Stand,
    cpu_time::CpuTime,
    family::Family,
    generator::{Arrivals, FirstPacket, NewFlows},
};

/// Number of frames in flight: below the length of every queue (TAPs have 1,000).
const WINDOW: u64 = 512;
/// Number of frames written between readings of the counter, so that neither side runs idle.
const PORTION: u64 = 64;
const FLOWS: u16 = 40_000;
/// Time after which a frame that has not arrived counts as lost.
const LOST_AFTER: Duration = Duration::from_millis(50);

pub(super) struct AdmitFlows(pub(super) FirstPacket, pub(super) Family);

impl AdmitFlows {
    fn both(&self) -> &'static [Metric; 2] {
        match self.0 {
            FirstPacket::Udp => self.1.of(&UDP, &UDP6),
            FirstPacket::TcpSyn => self.1.of(&TCP, &TCP6),
        }
    }
}

const UDP: [Metric; 2] = rates(ADMISSION[0], "new-flows-udp per CPU second");
const TCP: [Metric; 2] = rates(ADMISSION[1], "new-flows-tcp per CPU second");
const UDP6: [Metric; 2] = rates("new-flows-udp-ipv6", "new-flows-udp-ipv6 per CPU second");
const TCP6: [Metric; 2] = rates("new-flows-tcp-ipv6", "new-flows-tcp-ipv6 per CPU second");

impl Workload for AdmitFlows {
    fn name(&self) -> &'static str {
        self.metrics()[0].name
    }

    fn metrics(&self) -> &'static [Metric] {
        self.both()
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let flows = NewFlows::prepare(stand, self.1, self.0, FLOWS)?;
        let (injector, arrivals) = (stand.injector()?, Arrivals::at(&stand.world.net)?);
        let (admitted, cpu) = (admitted(stand)?, CpuTime::now(stand)?);
        let offered = offer(&arrivals, flows.frames.len(), limits.short, |at| {
            injector.write(&flows.frames[at])
        })?;
        ensure!(
            offered.arrived > 0,
            "none of {} first packets arrived",
            offered.written
        );
        let seconds = offered.took.as_secs_f64();
        let rate = offered.arrived as f64 / seconds / 1e3;
        // What decides: the process, or the kernel in the writer's context.
        let decider = cpu.decider_since(stand)?;
        let cpu = decider.ran.as_secs_f64();
        let per_core = offered.arrived as f64 / cpu / 1e3;
        let [flows, core] = self.both();
        let mut sample = Sample::of(&[(flows.name, rate), (core.name, per_core)])
            .with("written", offered.written as f64)
            .with("arrived", offered.arrived as f64)
            .with("decider_cpu_share", cpu / seconds)
            // Others had its CPU meanwhile: the rate by the clock is theirs too.
            .with(
                "decider_waited_share",
                decider.waited.as_secs_f64() / seconds,
            );
        if let (Some(before), Some(after)) = (admitted, self::admitted(stand)?) {
            sample = sample.with("admitted", (after - before) as f64);
        }
        Ok(sample)
    }
}

/// Returns slipgate's own count of admitted flows.
fn admitted(stand: &Stand) -> Result<Option<u64>> {
    let stats = stand.slipgate_stats()?;
    Ok(stats
        .as_ref()
        .and_then(|stats| stats.pointer("/total/admitted"))
        .and_then(Value::as_u64))
}

/// Frames that were written, and those of them that arrived in the world.
pub(crate) struct Offered {
    pub(crate) written: u64,
    pub(crate) arrived: u64,
    /// Time until the last arrival.
    pub(crate) took: Duration,
}

/// Writes `frames` frames by number, with at most [`WINDOW`] in flight, until the time limit.
/// `write` returns whether the frame was accepted.
pub(crate) fn offer(
    arrivals: &Arrivals,
    frames: usize,
    limit: Duration,
    mut write: impl FnMut(usize) -> Result<bool>,
) -> Result<Offered> {
    let before = arrivals.packets()?;
    let started = Instant::now();
    let mut frames = 0..frames;
    let (mut written, mut lost) = (0, 0);
    let (mut arrived, mut last_arrival, mut quiet_since) = (0, started, started);
    loop {
        let now_arrived = arrivals.packets()? - before;
        let now = Instant::now();
        if now_arrived > arrived {
            (arrived, last_arrival, quiet_since) = (now_arrived, now, now);
        } else if now - quiet_since > LOST_AFTER {
            lost = u64::saturating_sub(written, arrived);
            quiet_since = now;
        }
        let done = frames.is_empty() && arrived + lost >= written;
        if done || now - started > limit {
            break;
        }
        if written + PORTION <= arrived + lost + WINDOW {
            for frame in frames.by_ref().take(PORTION as usize) {
                written += u64::from(write(frame)?);
            }
        }
    }
    Ok(Offered {
        written,
        arrived,
        took: last_arrival - started,
    })
}
