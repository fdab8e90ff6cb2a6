//! New flows of two VMs at once, with one engine and with one for each VM: how many each engine
//! admits per second of its CPU time.
use std::{net::SocketAddrV4, time::Duration};

use anyhow::{Result, ensure};
use slipgate_testbed::{affinity, world::SERVER};

use super::{
    PER_ENGINE,
    crowd::{Crowd, datagram},
};
use crate::{
    contender::scheduled,
    generator::{Arrivals, drop_on_arrival},
    machine::Pinning,
    workload::{Sample, new_flows::offer},
};

const VMS: usize = 2;
/// Flows of each VM.
const FLOWS: u16 = 40_000;
const FIRST_PORT: u16 = 10_000;

/// Measures so many engines. Returns the rate of the one that admits the fewest.
pub(super) fn measure(workers: usize, limit: Duration) -> Result<Sample> {
    // The engines are to work at the same time: the scheduler places them, and the writer.
    affinity::unpinned(|| admitted(workers, limit))
}

fn admitted(workers: usize, limit: Duration) -> Result<Sample> {
    let number = workers.to_string();
    let flags = ["--workers", &number, "--flow-table", "262144"];
    let quotas = "{\"max_flows\": 100000, \"new_flows_per_second\": 1000000}";
    let crowd = Crowd::new(VMS, &flags, quotas, Pinning::none())?;
    let last = FIRST_PORT + FLOWS - 1;
    drop_on_arrival(&crowd.world.net, &format!("udp dport {FIRST_PORT}-{last}"))?;
    let frame = |number: u16| {
        let to = SocketAddrV4::new(SERVER, FIRST_PORT + number);
        datagram(20_000 + number % 20_000, to, &[])
    };
    let frames: Vec<_> = (0..FLOWS).map(frame).collect();
    let injectors: Vec<_> = (0..VMS).map(|vm| crowd.injector(vm)).collect();
    let engines = crowd.daemon.engines();
    ensure!(engines.len() == workers, "the engines are {engines:?}");
    let arrivals = Arrivals::at(&crowd.world.net)?;
    let ran = || -> Result<Vec<Duration>> {
        let each = engines.iter().map(|pid| Ok(scheduled(*pid)?.ran));
        each.collect()
    };
    let before = ran()?;
    // The VMs take turns.
    let offered = offer(&arrivals, VMS * frames.len(), limit, |at| {
        injectors[at % VMS].write(&frames[at / VMS])
    })?;
    let after = ran()?;
    let each = offered.arrived as f64 / workers as f64;
    let rates = before.iter().zip(&after);
    let rates = rates.map(|(before, after)| each / (*after - *before).as_secs_f64() / 1e3);
    let rates: Vec<f64> = rates.collect();
    let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let most = rates.iter().copied().fold(0.0, f64::max);
    let seconds = offered.took.as_secs_f64();
    Ok(Sample::of(&[(PER_ENGINE, least)])
        .with("of_the_other", most)
        .with("lost", (offered.written - offered.arrived) as f64)
        .with("rate", offered.arrived as f64 / seconds / 1e3))
}
