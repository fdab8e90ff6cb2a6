//! Names of the workloads that contenders and goals refer to.

/// Workloads that admit flows.
pub(crate) const ADMISSION: [&str; 2] = ["new-flows-udp", "new-flows-tcp"];
/// Workload of small frames.
pub(crate) const SMALL_PACKETS: &str = "udp-64";
/// Workload of the programs of a running slipgate.
pub(crate) const ESTABLISHED: &str = "established";
