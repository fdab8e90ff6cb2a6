//! A daemon with many live flows is started again, and its engine is killed: the time until new
//! flows are admitted, and how long first packets take afterwards.
//!
//! A VM of its own sends a first packet every 2 ms throughout. The flows are datagrams' of 64 other
//! VMs, admitted by the engine like any. After the restart new flows are observed for some seconds,
//! in which the engine may still be adopting, and then for as long under link events.
use std::{
    net::SocketAddrV4,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use slipgate_testbed::{signal, world::SERVER};

use super::{
    KILLED, KILLED_FULL, RESTART, WORST_AFTER_RESTART, WORST_UNDER_EVENTS,
    crowd::{Crowd, datagram, now},
    probes::{Probe, Probes, between, end_of_outage, lost, times_us},
};
use crate::{
    generator::{Arrivals, drop_on_arrival},
    machine::Pinning,
    workload::{Sample, new_flows::offer},
};

/// VMs that have flows.
const VMS: usize = 64;
/// Flows of each: 1,048,576 in all.
const FLOWS: u16 = 16_384;
/// The same in a quick run: 65,536.
const FEW_FLOWS: u16 = 1_024;
const FIRST_PORT: u16 = 10_000;
/// Time between two probes.
const PACE: Duration = Duration::from_millis(2);
/// Time for which new flows are observed in each state.
const OBSERVED: Duration = Duration::from_secs(4);
const LINK_EVENTS_PER_SECOND: u32 = 20;

/// Moments of a run.
struct Moments {
    killed: Duration,
    filled: Duration,
    stopped: Duration,
    /// The link events begin.
    events: Duration,
    events_end: Duration,
    killed_full: Duration,
}

pub(super) fn measure(quick: bool, pinning: Pinning) -> Result<Sample> {
    let each = if quick { FEW_FLOWS } else { FLOWS };
    // With room to spare: a part of the table is kept for others.
    let table = (VMS * usize::from(each) * 2).next_multiple_of(1 << 16);
    let table = table.to_string();
    let quotas = "{\"max_flows\": 100000, \"new_flows_per_second\": 1000000}";
    let mut crowd = Crowd::new(VMS + 1, &["--flow-table", &table], quotas, pinning)?;
    let last = FIRST_PORT + each - 1;
    drop_on_arrival(&crowd.world.net, &format!("udp dport {FIRST_PORT}-{last}"))?;
    let probes = Probes::start(&crowd, VMS..VMS + 1, PACE)?;
    std::thread::sleep(Duration::from_millis(500));

    let killed = kill(&crowd)?;
    std::thread::sleep(OBSERVED / 2);
    let flows = fill(&crowd, each)?;
    std::thread::sleep(Duration::from_millis(200));
    let filled = now()?;
    std::thread::sleep(OBSERVED);
    let stopped = now()?;
    crowd.daemon.restart()?;
    let started = now()?;
    std::thread::sleep(OBSERVED);
    let events = now()?;
    link_events(&crowd)?;
    let events_end = now()?;
    let killed_full = kill(&crowd)?;
    std::thread::sleep(OBSERVED * 2);
    let moments = Moments {
        killed,
        filled,
        stopped,
        events,
        events_end,
        killed_full,
    };
    let sample = evaluate(&probes.finish()?, &moments)?;
    Ok(sample
        .with("flows", flows as f64)
        .with("ready_ms", (started - stopped).as_secs_f64() * 1e3))
}

/// Kills the engine. Returns the time.
fn kill(crowd: &Crowd) -> Result<Duration> {
    let engines = crowd.daemon.engines();
    ensure!(engines.len() == 1, "there is not one engine: {engines:?}");
    signal(engines[0], libc::SIGKILL);
    now()
}

/// Makes all flows. Returns their number.
fn fill(crowd: &Crowd, each: u16) -> Result<u64> {
    let arrivals = Arrivals::at(&crowd.world.net)?;
    let frame = |number| {
        let port = FIRST_PORT + number;
        datagram(port, SocketAddrV4::new(SERVER, port), &[])
    };
    let frames: Vec<_> = (0..each).map(frame).collect();
    for vm in 0..VMS {
        let injector = crowd.injector(vm);
        // On a busy machine some frames are lost.
        for _ in 0..2 {
            let limit = Duration::from_secs(30);
            offer(&arrivals, frames.len(), limit, |at| {
                injector.write(&frames[at])
            })?;
        }
    }
    let stats = crowd.daemon.stats()?;
    let flows = stats["total"]["admitted"].as_u64().unwrap_or_default();
    ensure!(
        flows * 100 > 99 * u64::from(each) * VMS as u64,
        "only {flows} flows were made: {:#}",
        stats["total"]
    );
    Ok(flows)
}

fn link_events(crowd: &Crowd) -> Result<()> {
    // Two each: it comes, and goes.
    let pace = Duration::from_secs(2) / LINK_EVENTS_PER_SECOND;
    let began = Instant::now();
    for number in 0.. {
        let due = pace * number;
        if due > OBSERVED {
            break;
        }
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        let lines = format!("tuntap add other{number} mode tap\nlink del other{number}\n");
        crowd.world.host.batch("ip", &lines)?;
    }
    Ok(())
}

fn evaluate(probes: &[Probe], moments: &Moments) -> Result<Sample> {
    let Moments {
        killed,
        filled,
        stopped,
        events,
        events_end,
        killed_full,
    } = *moments;
    let all_until = |until| &probes[..probes.partition_point(|probe| probe.sent < until)];
    let outage = |from: Duration, until| -> Result<Duration> {
        Ok(end_of_outage(all_until(until), from)? - from)
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let of_restart = outage(stopped, events)?;
    let worst = |from, until| {
        let times = times_us(between(probes, from, until));
        times.into_iter().fold(f64::NAN, f64::max) / 1e3
    };
    let after = stopped + of_restart;
    let end = killed_full + OBSERVED * 2;
    let sample = Sample::of(&[
        (KILLED, ms(outage(killed, killed + OBSERVED / 2)?)),
        (RESTART, ms(of_restart)),
        (WORST_AFTER_RESTART, worst(after, events)),
        (WORST_UNDER_EVENTS, worst(events, events_end)),
        (KILLED_FULL, ms(outage(killed_full, end)?)),
    ]);
    Ok(sample
        .with("worst_before_ms", worst(filled, stopped))
        .with(
            "lost_by_restart",
            lost(between(probes, stopped, after)) as f64,
        )
        .with(
            "lost_after_restart",
            lost(between(probes, after, events_end)) as f64,
        )
        .with(
            "lost_by_kill",
            lost(between(probes, killed_full, end)) as f64,
        ))
}
