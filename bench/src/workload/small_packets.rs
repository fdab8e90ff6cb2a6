//! 64-byte UDP frames of one established flow, written to the TAP one by one at full speed, and
//! counted when they arrive in the world.
//!
//! Besides the rate, which depends on the whole machine, the CPU time of the two sides that do the
//! work is measured: the writer, in whose context the kernel translates, and the NAT's process.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{Limits, Metric, SMALL_PACKETS, Sample, Unit, Workload};
use crate::{
    contender::Stand,
    cpu_time::CpuTime,
    family::Family,
    generator::{Arrivals, EstablishedFlow},
    injector::Injector,
};

/// Number of frames between readings of the clock.
const CHUNK: usize = 512;

pub(super) struct SmallPackets(pub(super) Family);

impl Workload for SmallPackets {
    fn name(&self) -> &'static str {
        self.0.of(SMALL_PACKETS, "udp-64-ipv6")
    }

    fn metrics(&self) -> &'static [Metric] {
        const IPV4: [Metric; 2] = [
            Unit::ThousandPerSecond.of("udp-64 rate"),
            Unit::Nanoseconds.of("udp-64 CPU time per frame"),
        ];
        const IPV6: [Metric; 2] = [
            Unit::ThousandPerSecond.of("udp-64-ipv6 rate"),
            Unit::Nanoseconds.of("udp-64-ipv6 CPU time per frame"),
        ];
        self.0.of(&IPV4, &IPV6)
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let small = measure(stand, self.0, limits)?;
        let [rate, per_frame] = [0, 1].map(|at| self.metrics()[at].name);
        let sample = Sample::of(&[
            (rate, small.thousand_per_second),
            (per_frame, small.cpu_ns_per_frame),
        ]);
        Ok(sample
            .with("written", small.written as f64)
            .with("arrived", small.arrived as f64))
    }
}

/// Frames of one established flow, counted where they arrive.
pub(crate) struct Small {
    pub(crate) thousand_per_second: f64,
    cpu_ns_per_frame: f64,
    written: u64,
    arrived: u64,
}

/// Measures a flood of small frames.
pub(crate) fn measure(stand: &Stand, family: Family, limits: Limits) -> Result<Small> {
    let flow = EstablishedFlow::open(stand, family)?;
    let (injector, arrivals) = (stand.injector()?, Arrivals::at(&stand.world.net)?);
    flood(&injector, &flow.frame, limits.short / 10)?;
    let (before, cpu) = (arrivals.packets()?, CpuTime::now(stand)?);
    let (written, elapsed) = flood(&injector, &flow.frame, limits.short)?;
    let (arrived, cpu) = (arrivals.packets()? - before, cpu.since(stand)?);
    ensure!(arrived > 0, "none of {written} frames arrived");
    let seconds = elapsed.as_secs_f64();
    Ok(Small {
        thousand_per_second: arrived as f64 / seconds / 1e3,
        cpu_ns_per_frame: cpu.as_secs_f64() * 1e9 / arrived as f64,
        written,
        arrived,
    })
}

fn flood(injector: &Injector, frame: &[u8], time: Duration) -> Result<(u64, Duration)> {
    let (started, mut written) = (Instant::now(), 0);
    while started.elapsed() < time {
        for _ in 0..CHUNK {
            written += u64::from(injector.write(frame)?);
        }
    }
    Ok((written, started.elapsed()))
}
