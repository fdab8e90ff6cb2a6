//! The Linux client as a nested guest: inside a machine that QEMU emulates, another VMM boots it
//! under KVM. The report has a line for the end of each such run, so that it shows which VMM was
//! running when the emulated machine itself ended.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::ClientReport;

/// A folder that, if it is there, has a kernel and an initramfs to boot as a nested guest instead
/// of the checks.
pub const NESTED: &str = "/nested";
/// A file in it that has the VMMs to boot it by, in order, a name each; without it, slipgate's
/// once.
pub const NESTED_ORDER: &str = "/nested/order";
/// A folder in it with QEMU's firmware.
pub const NESTED_FIRMWARE: &str = "/nested/firmware";
/// KVM, the datapath's devices, and the hooks of 6.1.
pub const NESTED_MODULES: [&str; 5] = ["kvm_amd", "tun", "veth", "sch_ingress", "cls_bpf"];

/// The outer kernel's ticks from timers that go on by themselves. By default each tick sets the
/// timer for the next. In runs that hung, one CPU had no more ticks while it was busy, and the vCPU
/// on the other spun in KVM for good (RCU stall, soft lockup): nothing came to wake up the first.
/// And notices on the console: a lockup says where each CPU was, an audit which system call was
/// forbidden to whom.
pub const NESTED_OUTER: &str = "nohz=off highres=off audit=1 loglevel=6";

/// The outer machine's CPUs. Without nested paging: with it this QEMU's translations go wrong now and
/// then while the inner guest sends, and the inner or the outer Debian ends in a triple fault.
pub const NESTED_CPU_MODEL: &str = "qemu64,+svm,-npt";

/// Their number. With two, whose threads run at the same time, this QEMU loses the state of a CPU that
/// enters the kernel now and then: of 11 inner Debians that wrote to their disk for a minute four ended
/// in a double fault on their user's stack, with one CPU none of 10.
pub const NESTED_CPUS: u8 = 1;

/// Prefix of the report's lines that hold a [`NestedRun`].
const LINE: &str = "nested ";

/// VMM that boots the nested guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NestedVmm {
    /// The VMM of `slipgate run`.
    Slipgate,
    /// QEMU with KVM, on a TAP that `slipgate attach` serves.
    Qemu,
}

/// Outcome of a nested guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NestedEnd {
    /// The guest powered itself off after all its checks had passed.
    Passed,
    /// A check of its failed.
    CheckFailed,
    /// The guest's CPU was reset without a request.
    TripleFault,
    /// KVM could not run it any further.
    KvmGaveUp,
    /// The guest's kernel panicked.
    Panicked,
    /// The VMM, or another process of slipgate's, made a system call that its sandbox forbids.
    ForbiddenCall,
    /// The guest printed nothing for too long.
    Stuck,
    /// Anything else, such as a VMM that did not start.
    Other,
}

/// Evidence about a nested guest that is visible from outside.
#[derive(Clone, Copy, Debug)]
pub struct NestedTraces<'a> {
    /// Text of its console.
    pub console: &'a str,
    /// Text that its VMM wrote to stderr.
    pub stderr: &'a str,
    /// The VMM's exit status, unless a signal ended it.
    pub status: Option<i32>,
    /// Whether it was ended for want of a sign of life.
    pub timed_out: bool,
}

impl NestedEnd {
    /// Determines the end from the traces. The most specific cause comes first: a VMM that was
    /// killed leaves a guest stuck.
    pub fn of(vmm: NestedVmm, traces: NestedTraces) -> Self {
        let NestedTraces {
            console, stderr, ..
        } = traces;
        let report = ClientReport::read(console);
        let succeeded = traces.status == Some(0);
        // QEMU ends alike when its guest powers off and when that is reset (`-no-reboot`).
        let was_reset = match vmm {
            NestedVmm::Slipgate => stderr.contains("a triple fault"),
            NestedVmm::Qemu => succeeded && !report.ended,
        };
        if stderr.contains("its sandbox forbids") {
            NestedEnd::ForbiddenCall
        } else if stderr.contains("KVM gave up") || stderr.contains("KVM internal error") {
            NestedEnd::KvmGaveUp
        } else if console.contains("Kernel panic") {
            NestedEnd::Panicked
        } else if traces.timed_out {
            NestedEnd::Stuck
        } else if was_reset {
            NestedEnd::TripleFault
        } else if !succeeded || !report.ended {
            NestedEnd::Other
        } else if !report.is_whole() {
            NestedEnd::CheckFailed
        } else {
            NestedEnd::Passed
        }
    }
}

/// A nested guest that was started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NestedRun {
    /// Number of the run, counted from 1 over all VMMs.
    pub number: u32,
    /// VMM that booted the guest.
    pub vmm: NestedVmm,
    /// Outcome of the run; `None` while it runs, and finally if the outer machine ended during it.
    pub end: Option<NestedEnd>,
    /// Duration of the run, seconds.
    pub seconds: f64,
}

impl NestedRun {
    /// Whether the machine may have broken down, emulated or nested: it ended, or a CPU of it.
    pub fn is_breakdown(&self) -> bool {
        use NestedEnd::{KvmGaveUp, Panicked, Stuck, TripleFault};
        matches!(
            self.end,
            None | Some(TripleFault | KvmGaveUp | Panicked | Stuck)
        )
    }

    /// Parses the runs in a report, in order. A run without an end is the one during which the
    /// outer machine ended.
    pub fn read(report: &str) -> Vec<Self> {
        let mut runs: Vec<NestedRun> = Vec::new();
        for line in report.lines() {
            let said = line.strip_prefix(LINE).map(serde_json::from_str::<Self>);
            let Some(Ok(run)) = said else { continue };
            match runs.last_mut() {
                Some(last) if last.number == run.number => *last = run,
                _ => runs.push(run),
            }
        }
        runs
    }
}

/// Judges slipgate's guests, taking into account that the machine, which QEMU emulates, fails
/// occasionally. A failed run of slipgate is excused only if QEMU's own guest had the same outcome
/// in the same kind of machine. A failed check, a forbidden system call or a VMM that does not
/// start is never excused, and at least one guest of slipgate must have passed.
///
/// # Errors
/// The runs are not acceptable; the text gives the reason for each.
pub fn judge(runs: &[NestedRun]) -> Result<(), String> {
    let of = |vmm| runs.iter().filter(move |run| run.vmm == vmm);
    let is_excused = |run: &&NestedRun| {
        run.is_breakdown() && of(NestedVmm::Qemu).any(|reference| reference.end == run.end)
    };
    let slipgate = || of(NestedVmm::Slipgate);
    let passed = |run: &&NestedRun| run.end == Some(NestedEnd::Passed);
    let failed: Vec<_> = slipgate()
        .filter(|run| !passed(run) && !is_excused(run))
        .map(ToString::to_string)
        .collect();
    match failed.is_empty() {
        true if slipgate().any(|run| passed(&run)) => Ok(()),
        true => Err("no guest of slipgate's passed".into()),
        false => Err(failed.join("\n")),
    }
}

/// The line of the report.
impl fmt::Display for NestedRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let json = serde_json::to_string(self).map_err(|_| fmt::Error)?;
        write!(f, "{LINE}{json}")
    }
}

#[cfg(test)]
#[path = "nested_test.rs"]
mod tests;
