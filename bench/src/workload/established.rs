//! Cost of an established flow's packet in the programs of a running slipgate, under any policy:
//! its pinned programs are run by PROG_TEST_RUN on its maps.
//!
//! A policy is evaluated once, when a flow begins. Afterwards the kernel must run the same
//! instructions, and its look-ups must take the same time. Both are compared: the programs' tags,
//! which are hashes of their instructions, and the time.

use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};

use super::{ESTABLISHED, Limits, Metric, Sample, Unit, Workload};
use crate::{
    contender::Stand,
    family::Family,
    program_cost::{self, HIT_METRICS, HIT_METRICS6, Hits},
};

/// Workload that compares each contender's programs with those of the first.
pub(super) struct Established {
    family: Family,
    first: OnceLock<Vec<String>>,
}

impl Established {
    pub(super) fn of(family: Family) -> Self {
        Self {
            family,
            first: OnceLock::new(),
        }
    }
}

const fn metrics(names: [&'static str; 4]) -> [Metric; 4] {
    const UNIT: Unit = Unit::Nanoseconds;
    let [a, b, c, d] = names;
    [UNIT.of(a), UNIT.of(b), UNIT.of(c), UNIT.of(d)]
}

impl Workload for Established {
    fn name(&self) -> &'static str {
        self.family.of(ESTABLISHED, "established-ipv6")
    }

    fn metrics(&self) -> &'static [Metric] {
        const IPV4: [Metric; 4] = metrics(HIT_METRICS);
        const IPV6: [Metric; 4] = metrics(HIT_METRICS6);
        self.family.of(&IPV4, &IPV6)
    }

    fn run(&self, stand: &Stand, _: Limits) -> Result<Sample> {
        let pins = stand.pins()?.context("slipgate does not run here")?;
        let Hits { tags, costs } = stand
            .world
            .host
            .run(|| program_cost::of_running(&pins, self.family))?;
        let first = self.first.get_or_init(|| tags.clone());
        ensure!(
            *first == tags,
            "its programs have the tags {tags:?}, those measured first {first:?}"
        );
        Ok(Sample::of(&costs))
    }
}
