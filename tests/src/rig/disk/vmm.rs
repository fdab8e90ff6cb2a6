//! VMMs that boot the guest, and the CPU time that they take while it works.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{DiskFigures, DiskLine, DiskWork};
use crate::{
    affinity, cpu_time,
    error::{Error, Result, Tried},
    followed::Followed,
    microvm::MicroVm,
    pins::PinDir,
    rig::QEMU,
    world::{UPLINK, World},
};

const MEMORY_MIB: &str = "256";
const PARAMETERS: &str = "console=ttyS0 quiet panic=-1 mitigations=off";
/// How much longer than its work a guest may take from one line to the next, on a machine that is
/// emulated, or has other load.
const PATIENCE: Duration = Duration::from_secs(90);

/// A VMM, and how it reads and writes the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskVmm {
    /// `slipgate run --disk`.
    Slipgate,
    /// QEMU's virtio-blk with an I/O thread, `aio=threads`.
    QemuThreads,
    /// QEMU's virtio-blk with an I/O thread, `aio=io_uring`.
    QemuIoUring,
}

/// What a guest is booted with. All VMMs have the same: one vCPU, the host's page cache, writes that are
/// stable with a flush.
#[derive(Clone, Copy, Debug)]
pub struct DiskStand<'a> {
    /// The guest's kernel.
    pub kernel: &'a Path,
    /// Its initramfs.
    pub initramfs: &'a Path,
    /// The image of its disk.
    pub image: &'a Path,
    /// Folder of QEMU's firmware, where QEMU does not find it by itself.
    pub firmware: Option<&'a Path>,
}

/// A case that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskMeasured {
    /// What the guest says of it.
    pub figures: DiskFigures,
    /// CPU time of the threads that carry its requests out, µs.
    pub device_cpu_us: f64,
    /// CPU time of all threads of the VMM, the vCPU's and so the guest's work included, µs.
    pub vmm_cpu_us: f64,
    /// The guest's clock. Two that differ are read at another cost.
    pub clock: String,
    /// Number of io_urings that the VMM has.
    pub rings: usize,
}

impl DiskVmm {
    /// All, in the order in which they take turns.
    pub const ALL: [DiskVmm; 3] = [
        DiskVmm::Slipgate,
        DiskVmm::QemuThreads,
        DiskVmm::QemuIoUring,
    ];

    /// Boots the guest and measures each case of its work.
    ///
    /// # Errors
    /// The VMM or the guest fails, or is not done in time.
    pub fn measure(self, stand: DiskStand, work: &DiskWork) -> Result<Vec<DiskMeasured>> {
        let world = World::new()?;
        let mut machine = self.start(&world, stand)?;
        let within = work.lasts() + PATIENCE;
        let mut measured = Vec::new();
        for case in 0..work.cases.len() {
            let clock = match machine.next_line(within)? {
                DiskLine::Ready { case: its, clock } if its == case => clock,
                other => return Err(unexpected(&other)),
            };
            let vmm = machine.pid()?;
            place(vmm);
            let before = self.cpu_times(vmm);
            let figures = match machine.next_line(within)? {
                DiskLine::Figures(figures) if figures.case == case => figures,
                other => return Err(unexpected(&other)),
            };
            let after = self.cpu_times(vmm);
            let spent = |at: usize| after[at].saturating_sub(before[at]).as_secs_f64() * 1e6;
            measured.push(DiskMeasured {
                figures,
                device_cpu_us: spent(0),
                vmm_cpu_us: spent(1),
                clock,
                rings: rings(vmm),
            });
        }
        Ok(measured)
    }

    /// Boots the guest; returns how long it took until it was ready for its first case.
    ///
    /// # Errors
    /// It was not ready in time, or a VMM or its guest failed.
    pub fn boots(self, stand: DiskStand, within: Duration) -> Result<Duration> {
        let world = World::new()?;
        let started = Instant::now();
        match self.start(&world, stand)?.next_line(within)? {
            DiskLine::Ready { .. } => Ok(started.elapsed()),
            other => Err(unexpected(&other)),
        }
    }

    fn start(self, world: &World, stand: DiskStand) -> Result<Machine> {
        let DiskStand {
            kernel,
            initramfs,
            image,
            firmware,
        } = stand;
        let words = [kernel, initramfs, image].map(|path| path.display().to_string());
        let [kernel, initramfs, image] = &words;
        let engine = match self {
            DiskVmm::Slipgate => {
                let flags = [
                    ["--uplink", UPLINK],
                    ["--cpus", "1"],
                    ["--memory", MEMORY_MIB],
                    ["--disk", image],
                    ["--kernel", kernel],
                    ["--initrd", initramfs],
                    ["--cmdline", PARAMETERS],
                ];
                let vm = MicroVm::start(&world.host, &PinDir::new()?, flags.as_flattened())?;
                return Ok(Machine::Slipgate(Box::new(vm)));
            }
            DiskVmm::QemuThreads => "threads",
            DiskVmm::QemuIoUring => "io_uring",
        };
        let mut command = Command::new(QEMU);
        if let Some(firmware) = firmware {
            command.arg("-L").arg(firmware);
        }
        let drive = format!("file={image},format=raw,if=none,id=d,cache=writeback,aio={engine}");
        command
            .args(["-M", "q35", "-accel", "kvm", "-cpu", "host"])
            .args(["-smp", "1", "-m", MEMORY_MIB])
            // Threads by their names, for who counts their time.
            .args(["-name", "guest,debug-threads=on"])
            .args(["-nodefaults", "-display", "none", "-no-reboot"])
            .args(["-serial", "stdio", "-object", "iothread,id=io"])
            .args(["-drive", &drive])
            .args(["-device", "virtio-blk-pci,drive=d,iothread=io"])
            .args(["-kernel", kernel, "-initrd", initramfs])
            .args(["-append", PARAMETERS]);
        let followed = Followed::start(&world.host, command)?;
        Ok(Machine::Qemu(followed))
    }

    /// CPU times of the device's threads and of all.
    fn cpu_times(self, vmm: u32) -> [Duration; 2] {
        [
            cpu_time::of_threads(vmm, |name| self.is_device(name)),
            cpu_time::of_threads(vmm, |_| true),
        ]
    }

    /// Whether a thread of this name carries requests out.
    fn is_device(self, thread: &str) -> bool {
        // The kernel's own for a ring: they carry out what can't be done at once.
        let is_the_kernels = thread.starts_with("iou-");
        match self {
            DiskVmm::Slipgate => thread.starts_with("disk") || is_the_kernels,
            // The main loop has the start and the console; the others are the I/O thread and workers.
            _ => !is_vcpu(thread) && !thread.starts_with("qemu-system"),
        }
    }
}

/// A guest that runs. Killed on drop.
enum Machine {
    Slipgate(Box<MicroVm>),
    Qemu(Followed),
}

impl Machine {
    fn next_line(&mut self, within: Duration) -> Result<DiskLine> {
        let text = match self {
            Machine::Slipgate(vm) => vm.await_line(DiskLine::PART, within)?.text,
            Machine::Qemu(vm) => vm.await_text(DiskLine::PART, within)?,
        };
        let line = DiskLine::read(&text);
        line.ok_or_else(|| Error::unexpected(format!("the guest said {text:?}")))
    }

    fn pid(&self) -> Result<u32> {
        match self {
            Machine::Slipgate(vm) => vm
                .vmm_pid()
                .ok_or_else(|| Error::unexpected("the VMM has ended")),
            Machine::Qemu(vm) => Ok(vm.pid()),
        }
    }
}

fn unexpected(line: &DiskLine) -> Error {
    Error::unexpected(format!("the guest said {line}"))
}

/// Pins the vCPU to the first CPU, and the VMM's other threads to the last, where there are two.
fn place(vmm: u32) {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus < 2 {
        return;
    }
    let tasks = fs::read_dir(format!("/proc/{vmm}/task"));
    for task in tasks.into_iter().flatten().flatten() {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let cpu = if is_vcpu(name.trim()) { 0 } else { cpus - 1 };
        let number = task.file_name().to_str().and_then(|text| text.parse().ok());
        if let Some(number) = number {
            // A thread that has ended meanwhile, and one that the kernel places, are as they are.
            let _ = affinity::pin(number, cpu);
        }
    }
}

/// Whether a thread has the name of a vCPU's, in slipgate or in QEMU with `debug-threads=on`.
fn is_vcpu(name: &str) -> bool {
    name.starts_with("vcpu") || (name.starts_with("CPU ") && name.ends_with("/KVM"))
}

/// Number of a process's descriptors that are io_urings.
fn rings(pid: u32) -> usize {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"));
    let is_ring = |entry: &fs::DirEntry| {
        let link = fs::read_link(entry.path()).tried("look at a descriptor");
        link.is_ok_and(|link| link.as_os_str() == "anon_inode:[io_uring]")
    };
    let descriptors = descriptors.into_iter().flatten().flatten();
    descriptors.filter(is_ring).count()
}

#[cfg(test)]
#[path = "vmm_test.rs"]
mod tests;
