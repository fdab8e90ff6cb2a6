//! Workloads of the contenders. Each is bounded in time by [`Limits`].

pub(crate) mod bulk;
pub(crate) mod connect_close;
mod established;
pub(crate) mod new_flows;
mod request_response;
pub(crate) mod small_packets;

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use serde::{Deserialize, Serialize};

pub(crate) use crate::workload_names::{ADMISSION, ESTABLISHED, SMALL_PACKETS};
use crate::{contender::Stand, family::Family, generator::FirstPacket};

/// Name of a workload, and its metrics.
pub(crate) type Measured = (&'static str, &'static [Metric]);

/// Time limits of a workload on one contender.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Limits {
    /// Time limit of a bulk transfer.
    pub(crate) bulk: Duration,
    /// Time limit of every other measurement.
    pub(crate) short: Duration,
}

/// Unit of a measured value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    GigabitsPerSecond,
    Microseconds,
    ThousandPerSecond,
    Nanoseconds,
    Milliseconds,
    Mebibytes,
    Kibibytes,
    PercentOfACore,
    PercentOfTheRate,
}

impl Unit {
    /// Symbol printed after a value.
    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Unit::GigabitsPerSecond => "Gb/s",
            Unit::Microseconds => "µs",
            Unit::ThousandPerSecond => "k/s",
            Unit::Nanoseconds => "ns",
            Unit::Milliseconds => "ms",
            Unit::Mebibytes => "MiB",
            Unit::Kibibytes => "KiB",
            Unit::PercentOfACore => "% of a core",
            Unit::PercentOfTheRate => "% of the rate",
        }
    }

    /// The metric of this name that is measured in the unit.
    pub(crate) const fn of(self, name: &'static str) -> Metric {
        Metric { name, unit: self }
    }

    /// Whether a higher value is better.
    pub(crate) fn more_is_better(self) -> bool {
        matches!(
            self,
            Unit::GigabitsPerSecond | Unit::ThousandPerSecond | Unit::PercentOfTheRate
        )
    }
}

/// A value that a workload measures.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Metric {
    /// Name of the metric, unique among all workloads.
    pub(crate) name: &'static str,
    pub(crate) unit: Unit,
}

/// Returns two metrics of a rate in thousands per second: per second of time, and per second of CPU
/// time.
pub(crate) const fn rates(by_the_clock: &'static str, per_cpu_second: &'static str) -> [Metric; 2] {
    const UNIT: Unit = Unit::ThousandPerSecond;
    [UNIT.of(by_the_clock), UNIT.of(per_cpu_second)]
}

/// Result of one measurement: a value for each metric, and further details.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Sample {
    pub(crate) values: BTreeMap<&'static str, f64>,
    pub(crate) details: BTreeMap<&'static str, f64>,
}

impl Sample {
    pub(crate) fn of(values: &[(&'static str, f64)]) -> Sample {
        Sample {
            values: values.iter().copied().collect(),
            details: BTreeMap::new(),
        }
    }

    pub(crate) fn with(mut self, name: &'static str, value: f64) -> Sample {
        self.details.insert(name, value);
        self
    }
}

/// A measurement through a contender.
pub(crate) trait Workload {
    /// Name of the workload, as in `--only`.
    fn name(&self) -> &'static str;

    /// Metrics that the workload measures.
    fn metrics(&self) -> &'static [Metric];

    /// Returns the name and the metrics, for the tables.
    fn measured(&self) -> Measured {
        (self.name(), self.metrics())
    }

    /// Runs the workload and returns its sample.
    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample>;
}

/// All workloads, in the order in which they are run: each in IPv4 and in IPv6, one after the other.
pub(crate) fn all() -> Vec<Box<dyn Workload>> {
    use bulk::{Bulk, BulkStream};
    type Make = fn(Family) -> Box<dyn Workload>;
    const ALL: [Make; 8] = [
        |family| Box::new(BulkStream(Bulk::Up, family)),
        |family| Box::new(BulkStream(Bulk::Down, family)),
        |family| Box::new(connect_close::ConnectClose(family)),
        |family| Box::new(request_response::RequestResponse(family)),
        |family| Box::new(small_packets::SmallPackets(family)),
        |family| Box::new(established::Established::of(family)),
        |family| Box::new(new_flows::AdmitFlows(FirstPacket::Udp, family)),
        |family| Box::new(new_flows::AdmitFlows(FirstPacket::TcpSyn, family)),
    ];
    let of_both = |make: &Make| Family::ALL.map(make);
    ALL.iter().flat_map(of_both).collect()
}
