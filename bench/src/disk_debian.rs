//! A disk under a stock Linux: random requests of 4 KiB by Debian's own kernel and driver, under
//! `slipgate run` and under QEMU with a thread for its virtio-blk, by `aio=threads` and `aio=io_uring`.
//!
//! The image is in the host's page cache, and the guest goes past its own. It waits for interrupts, as the
//! built-in guest of [`disk`](crate::disk) does not. Where KVM boots no Linux, all of it is in a machine
//! that QEMU emulates: there ratios mean something, times do not.

use std::{env, path::PathBuf, time::Duration};

use anyhow::{Context as _, Error, Result, bail, ensure};
use slipgate_testbed::{
    requirements,
    rig::{
        DiskCase, DiskMeasured, DiskRig, DiskRigPlan, DiskStand, DiskVmm, DiskWork, Kernel,
        Machine, disk_guest_initramfs, make_disk_of_blocks,
    },
    slipgate,
};

use crate::{
    conditions::Conditions,
    contender,
    results::{self, Cell, Table},
    workload::{Measured, Metric, Sample, Unit},
};

/// Name of the part, as in `--only`.
pub(crate) const DISK_DEBIAN: &str = "disk-debian";
/// Variable that names the program `slipgate-rig-init`; without it, the one beside this program.
const INIT: &str = "SLIPGATE_RIG_INIT";
/// Series of the kernel of the guest, and of the emulated machine.
const SERIES: &str = "6.1";
/// slipgate's contender, and the one that it is compared with.
pub(crate) const SLIPGATE: &str = name(DiskVmm::Slipgate);
pub(crate) const REFERENCE: &str = name(DiskVmm::QemuIoUring);
/// 64 MiB, which an emulated machine has room for.
const BLOCKS: u64 = 16_384;
/// Time for a boot under KVM, until it counts as one that will not succeed.
const BOOTS: Duration = Duration::from_secs(30);

/// Requests, and the names of what is measured: thousands a second, p50, p99, CPU time of the threads
/// that carry out a request, and of the whole VMM, the guest's own included.
const CASES: [(DiskCase, [&str; 5]); 3] = [
    (
        DiskCase::reads(1),
        [
            "Debian's disk, reads ×1",
            "Debian's disk, reads ×1 p50",
            "Debian's disk, reads ×1 p99",
            "Debian's disk, reads ×1, device's CPU",
            "Debian's disk, reads ×1, VMM's CPU",
        ],
    ),
    (
        DiskCase::reads(32),
        [
            "Debian's disk, reads ×32",
            "Debian's disk, reads ×32 p50",
            "Debian's disk, reads ×32 p99",
            "Debian's disk, reads ×32, device's CPU",
            "Debian's disk, reads ×32, VMM's CPU",
        ],
    ),
    (
        DiskCase::writes(32, 64),
        [
            "Debian's disk, writes ×32",
            "Debian's disk, writes ×32 p50",
            "Debian's disk, writes ×32 p99",
            "Debian's disk, writes ×32, device's CPU",
            "Debian's disk, writes ×32, VMM's CPU",
        ],
    ),
];
/// Metrics of requests a second, and of the CPU time of each in the device's threads.
pub(crate) const RATES: [&str; CASES.len()] = of_all_cases(0);
pub(crate) const COSTS: [&str; CASES.len()] = of_all_cases(3);

const fn of_all_cases(at: usize) -> [&'static str; CASES.len()] {
    let [a, b, c] = &CASES;
    [a.1[at], b.1[at], c.1[at]]
}

const METRICS: usize = CASES.len() * 5;
pub(crate) const MEASURED: Measured = (DISK_DEBIAN, &metrics());

const fn metrics() -> [Metric; METRICS] {
    let mut metrics = [Unit::Microseconds.of(""); METRICS];
    let mut at = 0;
    while at < METRICS {
        let unit = match at % 5 {
            0 => Unit::ThousandPerSecond,
            _ => Unit::Microseconds,
        };
        metrics[at] = unit.of(CASES[at / 5].1[at % 5]);
        at += 1;
    }
    metrics
}

/// The contender's name, as in the tables.
const fn name(vmm: DiskVmm) -> &'static str {
    match vmm {
        DiskVmm::Slipgate => "slipgate-debian",
        DiskVmm::QemuThreads => "qemu-debian-threads",
        DiskVmm::QemuIoUring => "qemu-debian-io_uring",
    }
}

fn version(vmm: DiskVmm) -> Result<String> {
    let engine = match vmm {
        DiskVmm::Slipgate => return Ok("this commit".to_owned()),
        DiskVmm::QemuThreads => "threads",
        DiskVmm::QemuIoUring => "io_uring",
    };
    let qemu = contender::version("qemu-system-x86_64", "qemu-system-x86")?;
    Ok(format!("{qemu}, virtio-blk with a thread, aio={engine}"))
}

/// Runs all rounds. Contenders that this machine does not have are in the tables with the reason.
pub(crate) fn measure(
    rounds: usize,
    quick: bool,
    conditions: &mut Conditions,
) -> (Vec<Cell>, Vec<Table>) {
    let missing_before = conditions.missing.len();
    let mut present = DiskVmm::ALL.to_vec();
    present.retain(|vmm| conditions.note(name(*vmm), version(*vmm)));
    let work = DiskWork {
        cases: CASES.map(|(case, _)| case).to_vec(),
        blocks: BLOCKS,
        warm_up_ms: 300,
        measured_ms: if quick { 300 } else { 2_000 },
        rest_ms: 300,
    };
    let place = Place::find(&work);
    let told = place.as_ref().map(Place::told);
    conditions.note("debian", told.map_err(|why| Error::msg(format!("{why:#}"))));
    let mut cells = Vec::new();
    for round in 1..=rounds {
        // Another one is first in each round.
        let mut vmms = present.clone();
        vmms.rotate_left(round % present.len().max(1));
        let outcomes = match &place {
            Ok(place) => place.measure(&vmms, &work),
            Err(why) => Err(Error::msg(format!("{why:#}"))),
        };
        let outcomes = outcomes.unwrap_or_else(|why| {
            let failed = |vmm: &DiskVmm| (*vmm, Err(Error::msg(format!("{why:#}"))));
            vmms.iter().map(failed).collect()
        });
        let cell = |(vmm, outcome): (DiskVmm, Result<Vec<DiskMeasured>>)| {
            let sample = outcome.and_then(|measured| sample(&measured));
            Cell::of(round, name(vmm), DISK_DEBIAN, sample)
        };
        cells.extend(outcomes.into_iter().map(cell));
    }
    let names: Vec<_> = present.iter().copied().map(name).collect();
    let mut tables = results::tables(&[MEASURED], &names, REFERENCE, &cells);
    let missing = conditions.missing[missing_before..].iter();
    let missing: Vec<_> = missing.filter(|(of, _)| *of != "debian").cloned().collect();
    results::add_missing(&mut tables, &missing);
    (cells, tables)
}

/// Where the guests run, and with what.
struct Place {
    init: PathBuf,
    kernel: Kernel,
    /// Whether they are in a machine that is emulated, not on this machine's own KVM.
    is_emulated: bool,
}

/// What each VMM came to.
type Outcomes = Vec<(DiskVmm, Result<Vec<DiskMeasured>>)>;

impl Place {
    /// Tries whether a Linux boots under this machine's KVM.
    fn find(work: &DiskWork) -> Result<Self> {
        let kernel = Kernel::find(SERIES)?;
        let mut place = Place {
            init: init()?,
            kernel,
            is_emulated: false,
        };
        let boots = requirements::kvm().map_err(Error::msg).and_then(|()| {
            place.with_stand(work, |stand| Ok(DiskVmm::QemuThreads.boots(stand, BOOTS)?))
        });
        if let Err(why) = boots {
            eprintln!("no Linux boots under this machine's KVM, so one is emulated: {why:#}");
            Machine::is_possible()?;
            place.is_emulated = true;
        }
        Ok(place)
    }

    /// The guest's kernel and its place, for the conditions.
    fn told(&self) -> String {
        let release = self.kernel.release();
        match self.is_emulated {
            false => format!("Linux {release}, 1 vCPU"),
            true => format!(
                "Linux {release}, 1 vCPU, in a machine of 2 CPUs that QEMU emulates, on the same \
                 kernel, because none boots under this machine's own KVM"
            ),
        }
    }

    /// Measures each VMM once.
    fn measure(&self, vmms: &[DiskVmm], work: &DiskWork) -> Result<Outcomes> {
        if self.is_emulated {
            return self.measure_emulated(vmms, work);
        }
        let one = |vmm: &DiskVmm| {
            let measured = self.with_stand(work, |stand| Ok(vmm.measure(stand, work)?));
            (*vmm, measured)
        };
        Ok(vmms.iter().map(one).collect())
    }

    /// Measures all of them in one boot of the emulated machine.
    fn measure_emulated(&self, vmms: &[DiskVmm], work: &DiskWork) -> Result<Outcomes> {
        let rig = DiskRig {
            init: &self.init,
            slipgate: &slipgate::binary()?,
            outer: &self.kernel,
            guest: &self.kernel,
        };
        let plan = DiskRigPlan {
            work: work.clone(),
            vmms: vmms.to_vec(),
        };
        let (mut results, ended) = rig.run(&plan)?;
        let outcome = |vmm: &DiskVmm| {
            let at = results.iter().position(|result| result.vmm == *vmm);
            let outcome = match at.map(|at| results.swap_remove(at).outcome) {
                Some(outcome) => outcome.map_err(Error::msg),
                None => Err(Error::msg(format!("not measured: {}", ended.how))),
            };
            (*vmm, outcome)
        };
        Ok(vmms.iter().map(outcome).collect())
    }

    /// Makes an image and the guest's initramfs, for as long as `f` runs.
    fn with_stand<T>(&self, work: &DiskWork, f: impl FnOnce(DiskStand) -> Result<T>) -> Result<T> {
        let folder = tempfile::tempdir().context("make a folder for a disk")?;
        let (image, initramfs) = (folder.path().join("disk"), folder.path().join("initramfs"));
        make_disk_of_blocks(&image, work.blocks)?;
        let bytes = disk_guest_initramfs(&self.init, &self.kernel, work)?;
        std::fs::write(&initramfs, bytes).context("write the guest's initramfs")?;
        f(DiskStand {
            kernel: self.kernel.image(),
            initramfs: &initramfs,
            image: &image,
            firmware: None,
        })
    }
}

/// Finds the program that is the guest's init.
fn init() -> Result<PathBuf> {
    let beside = || {
        let ours = env::current_exe().context("find this program")?;
        Ok::<_, Error>(ours.with_file_name("slipgate-rig-init"))
    };
    let init = env::var_os(INIT).map_or_else(beside, |path| Ok(PathBuf::from(path)))?;
    if !init.is_file() {
        bail!(
            "there is no {}: `cargo xtask bench -- --only {DISK_DEBIAN}` builds it, or set {INIT}",
            init.display()
        );
    }
    Ok(init)
}

/// Returns the values of all cases.
fn sample(measured: &[DiskMeasured]) -> Result<Sample> {
    let mut sample = Sample::default();
    for (case, names) in CASES {
        let one = measured.iter().find(|one| one.figures.what == case);
        let one = one.with_context(|| format!("{case:?} was not measured"))?;
        sample.values.extend(names.into_iter().zip(figures(one)?));
        sample = sample.with("io_urings", one.rings as f64);
    }
    Ok(sample)
}

/// Returns thousands of requests a second, p50 and p99, µs, and CPU time of the device's threads and of
/// all, µs a request.
fn figures(one: &DiskMeasured) -> Result<[f64; 5]> {
    let figures = &one.figures;
    ensure!(figures.requests > 0, "nothing was done: {one:?}");
    ensure!(
        one.device_cpu_us > 0.0,
        "no thread of the disk is seen: {one:?}"
    );
    let requests = figures.requests as f64;
    Ok([
        requests / figures.took_us * 1e3,
        figures.p50_us,
        figures.p99_us,
        one.device_cpu_us / requests,
        one.vmm_cpu_us / requests,
    ])
}

#[cfg(test)]
#[path = "disk_debian_test.rs"]
mod tests;
