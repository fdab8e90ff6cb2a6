//! Questions of the workload: names that are cached already, or new names.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};

use crate::{
    contender::Stand,
    cpu_time::CpuTime,
    dns_exchange::{Client, Upstream},
    workload::{Limits, Metric, Sample, Workload, rates},
};

/// Number of names that are asked for repeatedly.
const KNOWN: u32 = 256;
const ANSWER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 20);

pub(super) fn all() -> Vec<Box<dyn Workload>> {
    vec![Box::new(Questions::Known), Box::new(Questions::New)]
}

enum Questions {
    Known,
    New,
}

const KNOWN_METRICS: [Metric; 2] = rates("dns-known", "dns-known per CPU second");
const NEW_METRICS: [Metric; 2] = rates("dns-new", "dns-new per CPU second");

impl Workload for Questions {
    fn name(&self) -> &'static str {
        self.metrics()[0].name
    }

    fn metrics(&self) -> &'static [Metric] {
        match self {
            Self::Known => &KNOWN_METRICS,
            Self::New => &NEW_METRICS,
        }
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let upstream = Upstream::start(&stand.world.net, |_| Some(ANSWER))?;
        let client = stand.in_guest(Client::new)?;
        // Known from here on; and the resolver is up.
        client.ask_each((0..KNOWN).map(|name| format!("n{name}.bench.test")))?;
        let asked_before = upstream.asked();
        let cpu = CpuTime::now(stand)?;
        let done = client.ask(limits.short, |count| match self {
            Self::Known => format!("n{}.bench.test", count % KNOWN),
            // Of this run only: a cache lives on between them.
            Self::New => format!("x{count}-{}.bench.test", std::process::id()),
        })?;
        let decider = cpu.decider_since(stand)?;
        let asked = upstream.asked() - asked_before;
        match self {
            Self::Known => ensure!(asked < done.answered / 100, "{asked} were asked upstream"),
            Self::New => ensure!(asked >= done.answered, "only {asked} were asked upstream"),
        }
        let rate = done.answered as f64 / done.took.as_secs_f64() / 1e3;
        let per_core = done.answered as f64 / decider.ran.as_secs_f64() / 1e3;
        let [first, second] = self.metrics() else {
            unreachable!("two metrics each")
        };
        Ok(Sample::of(&[(first.name, rate), (second.name, per_core)])
            .with("answered", done.answered as f64)
            .with("lost", done.lost as f64))
    }
}
