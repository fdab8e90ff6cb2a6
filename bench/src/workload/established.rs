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
    program_cost::{self, HIT_METRICS, Hits},
};

/// Workload that compares each contender's programs with those of the first.
#[derive(Default)]
pub(super) struct Established {
    first: OnceLock<Vec<String>>,
}

const METRICS: [Metric; 4] = [
    Unit::Nanoseconds.of(HIT_METRICS[0]),
    Unit::Nanoseconds.of(HIT_METRICS[1]),
    Unit::Nanoseconds.of(HIT_METRICS[2]),
    Unit::Nanoseconds.of(HIT_METRICS[3]),
];

impl Workload for Established {
    fn name(&self) -> &'static str {
        ESTABLISHED
    }

    fn metrics(&self) -> &'static [Metric] {
        &METRICS
    }

    fn run(&self, stand: &Stand, _: Limits) -> Result<Sample> {
        let pins = stand.pins()?.context("slipgate does not run here")?;
        let Hits { tags, costs } = stand.world.host.run(|| program_cost::of_running(&pins))?;
        let first = self.first.get_or_init(|| tags.clone());
        ensure!(
            *first == tags,
            "its programs have the tags {tags:?}, those measured first {first:?}"
        );
        Ok(Sample::of(&costs))
    }
}
