//! A thousand VMs, each with a paced flow, one of which floods: the time that the others' first
//! packets take, beside that without a flood.
//!
//! The states take turns on one daemon. A flood costs its sender's CPU time whoever serves it, and a
//! guest's vCPU is not slipgate's; here it shares the first CPU with the others' traffic. So there
//! is a third state, in which the same frames are written to a TAP that nobody serves.
use std::{
    net::SocketAddrV4,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use anyhow::Result;
use slipgate_testbed::{tap::TapQueue, world::SERVER};

use super::{
    NEW_FLOW_P50, NEW_FLOW_P99, NO_FLOOD, UNSERVED_FLOOD,
    crowd::{Crowd, datagram, now, precede_others},
    daemon::NAME,
    probes::{Probes, between, lost, times_us},
};
use crate::{
    generator::drop_on_arrival, injector::Injector, run::Settings, statistics::percentile,
    workload::Sample,
};

const VMS: usize = 1_000;
const FEW_VMS: usize = 100;
/// The VM that floods; the others have probes.
const FLOODER: usize = 0;
/// Time between two first packets of the others.
const PACE: Duration = Duration::from_millis(1);
/// Packets a second of each VM's established flow.
const PACKETS_PER_SECOND: usize = 10;
/// Time between two portions of these packets.
const TICK: Duration = Duration::from_millis(5);
/// Ports of the world that drop what comes.
const SINKS: (u16, u16) = (10_000, 50_000);
/// Times that each state is observed, alternately.
const TURNS: u32 = 5;
const SETTLE: Duration = Duration::from_millis(200);

/// Measures the three states. Returns the sample of each with its name.
pub(super) fn measure(quick: bool, settings: &Settings) -> Result<[(&'static str, Sample); 3]> {
    let vms = if quick { FEW_VMS } else { VMS };
    let crowd = Crowd::new(vms, &[], "{}", settings.pinning)?;
    let bystander = TapQueue::alone(&crowd.world.host, "bystander")?;
    crowd.world.host.ip("link set bystander up")?;
    drop_on_arrival(
        &crowd.world.net,
        &format!("udp dport {}-{}", SINKS.0, SINKS.1),
    )?;
    let floods = [
        (NO_FLOOD, None),
        (NAME, Some(crowd.injector(FLOODER))),
        (UNSERVED_FLOOD, Some(Injector::Tap(bystander))),
    ];
    let flood_frames: Vec<_> = (SINKS.0 + 1..SINKS.1)
        .map(|port| datagram(30_000 + port % 20_000, SocketAddrV4::new(SERVER, port), &[]))
        .collect();
    let stop = AtomicBool::new(false);
    let probes = Probes::start(&crowd, FLOODER + 1..vms, PACE)?;
    let spans = std::thread::scope(|scope| {
        let paced = scope.spawn(|| pace_flows(&crowd, &stop));
        std::thread::sleep(Duration::from_secs(1));
        let mut spans = vec![Vec::new(); floods.len()];
        let mut observe = || -> Result<()> {
            for _ in 0..TURNS {
                for ((_, flooded), spans) in floods.iter().zip(&mut spans) {
                    std::thread::sleep(SETTLE);
                    spans.push(flood(
                        flooded.as_ref(),
                        &flood_frames,
                        settings.limits.short,
                    )?);
                }
            }
            Ok(())
        };
        let observed = observe();
        stop.store(true, Relaxed);
        let paced = paced.join();
        paced.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        observed.map(|()| spans)
    })?;
    let probes = probes.finish()?;
    let sample = |spans: &[(Duration, Duration, u64)]| {
        let mut times = Vec::new();
        let (mut gone, mut frames) = (0, 0);
        for (from, until, written) in spans {
            let observed = between(&probes, *from, *until);
            times.extend(times_us(observed));
            gone += lost(observed);
            frames += written;
        }
        Sample::of(&[
            (NEW_FLOW_P50, percentile(&times, 50.0)),
            (NEW_FLOW_P99, percentile(&times, 99.0)),
        ])
        .with("probes", times.len() as f64)
        .with("lost", gone as f64)
        .with("flood_frames", frames as f64)
    };
    let names = floods.map(|(name, _)| name);
    Ok(std::array::from_fn(|at| (names[at], sample(&spans[at]))))
}

/// Floods for so long, or waits. Returns the beginning, the end, and the number of frames.
fn flood(
    injector: Option<&Injector>,
    frames: &[Vec<u8>],
    span: Duration,
) -> Result<(Duration, Duration, u64)> {
    let from = now()?;
    let mut written = 0;
    match injector {
        None => std::thread::sleep(span),
        Some(injector) => {
            for frame in frames.iter().cycle() {
                injector.write(frame)?;
                written += 1;
                if written % 64 == 0 && now()? - from > span {
                    break;
                }
            }
        }
    }
    Ok((from, now()?, written))
}

/// Sends the datagrams of each VM's own flow, until it is stopped.
fn pace_flows(crowd: &Crowd, stop: &AtomicBool) -> Result<()> {
    precede_others();
    let frame = datagram(9_000, SocketAddrV4::new(SERVER, SINKS.0), &[]);
    let injectors: Vec<_> = (0..crowd.taps.len()).map(|vm| crowd.injector(vm)).collect();
    let per_second = PACKETS_PER_SECOND * injectors.len();
    let portion = (per_second as f64 * TICK.as_secs_f64()).ceil() as usize;
    let mut turn = injectors.iter().cycle();
    let mut due = now()?;
    while !stop.load(Relaxed) {
        for injector in turn.by_ref().take(portion) {
            injector.write(&frame)?;
        }
        due += TICK;
        std::thread::sleep(due.saturating_sub(now()?));
    }
    Ok(())
}
