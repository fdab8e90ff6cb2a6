//! QEMU, with everything emulated: slow, and the same on every x86 machine.

use std::{
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use super::{EXIT_PORT, Kernel, WELL};
use crate::{
    error::{Error, Result, Tried, checked},
    netns::NetNs,
};

/// Name of the QEMU program.
pub const QEMU: &str = "qemu-system-x86_64";
const LOOK: Duration = Duration::from_millis(5);

/// A machine to be started.
pub struct Machine<'a> {
    /// Kernel that the machine boots.
    pub kernel: &'a Kernel,
    /// Initramfs: one cpio archive, or several in sequence.
    pub initramfs: &'a [u8],
    /// Further parameters on the kernel's command line.
    pub parameters: &'a str,
    /// Time after which it is ended.
    pub timeout: Duration,
    /// Emulated hardware of the machine.
    pub hardware: Hardware<'a>,
}

/// Hardware of the emulated machine.
#[derive(Clone, Debug)]
pub struct Hardware<'a> {
    /// Virtual CPUs. With several, kernels of 6.12 and later now and then oops under TCG while code
    /// is patched; 6.1 does not.
    pub cpus: u8,
    /// QEMU's model of them.
    pub cpu_model: &'a str,
    /// Memory of the machine, MiB.
    pub memory_mib: u32,
    /// Further arguments of QEMU, for devices.
    pub devices: &'a [String],
    /// The network namespace that QEMU runs in.
    pub namespace: Option<&'a NetNs>,
}

impl Default for Hardware<'_> {
    fn default() -> Self {
        Hardware {
            cpus: 1,
            cpu_model: "max",
            memory_mib: 768,
            devices: &[],
            namespace: None,
        }
    }
}

/// Outcome of a machine's run.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Whether it reported success by [`WELL`].
    pub well: bool,
    /// Whether it turned itself off.
    pub powered_off: bool,
    /// QEMU's exit status, or that it was killed.
    pub how: String,
    /// Text written to the report.
    pub report: String,
    /// Text written to the console.
    pub console: String,
    /// Time from start to end.
    pub took: Duration,
}

impl Machine<'_> {
    /// Checks that QEMU is installed.
    ///
    /// # Errors
    /// It is not; the error says what to do.
    pub fn is_possible() -> Result<()> {
        if !cfg!(target_arch = "x86_64") {
            return Err(Error::Missing("the rig's kernels are for x86-64".into()));
        }
        let version = Command::new(QEMU)
            .arg("--version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        match version {
            Ok(status) if status.success() => Ok(()),
            _ => Err(Error::Missing(format!(
                "there is no {QEMU}: install QEMU (Debian: qemu-system-x86)"
            ))),
        }
    }

    /// Boots the machine and waits for its end.
    ///
    /// # Errors
    /// QEMU cannot be started or awaited.
    pub fn run(&self) -> Result<Ended> {
        let scratch = tempfile::tempdir().tried("make a folder for the machine's files")?;
        let at = |name: &str| scratch.path().join(name);
        let (initramfs, console, report) = (at("initramfs"), at("console"), at("report"));
        fs::write(&initramfs, self.initramfs).tried("write the initramfs")?;
        let started = Instant::now();
        let command = self.command(&initramfs, &console, &report);
        let mut qemu = match self.hardware.namespace {
            Some(namespace) => namespace.spawn(command)?,
            None => spawn(command).tried(format!("start {QEMU}"))?,
        };
        let status = wait(&mut qemu, started + self.timeout).tried(format!("wait for {QEMU}"))?;
        let status = status.and_then(|status| status.code());
        let took = started.elapsed();
        let read = |path: &PathBuf| {
            let bytes = fs::read(path).unwrap_or_default();
            String::from_utf8_lossy(&bytes).replace('\r', "")
        };
        Ok(Ended {
            well: status == Some(i32::from(WELL) * 2 + 1),
            powered_off: status == Some(0),
            how: match status {
                Some(status) => format!("QEMU ended with {status}"),
                None => format!("killed after {:.0} s", took.as_secs_f64()),
            },
            report: read(&report),
            console: read(&console),
            took,
        })
    }

    fn command(&self, initramfs: &Path, console: &Path, report: &Path) -> Command {
        let mut qemu = Command::new(QEMU);
        let hardware = &self.hardware;
        qemu.args(["-M", "q35", "-accel", "tcg,thread=multi", "-nodefaults"])
            .args(["-cpu", hardware.cpu_model])
            .args(["-smp", &hardware.cpus.to_string()])
            .args(["-m", &hardware.memory_mib.to_string()])
            .args(["-display", "none", "-no-reboot"])
            .args(hardware.devices)
            .arg("-kernel")
            .arg(self.kernel.image())
            .arg("-initrd")
            .arg(initramfs)
            // A line on the serial console costs milliseconds.
            .arg("-append")
            .arg(format!(
                "console=ttyS0 quiet panic=-1 mitigations=off {}",
                self.parameters
            ));
        for file in [console, report] {
            qemu.arg("-serial").arg(format!("file:{}", file.display()));
        }
        let exit = format!("isa-debug-exit,iobase={EXIT_PORT:#x},iosize=1");
        qemu.args(["-device", &exit])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit());
        qemu
    }
}

/// Starts QEMU so that it is killed when this process dies.
fn spawn(mut qemu: Command) -> io::Result<Child> {
    let die_with_us = || {
        // SAFETY: prctl with numbers only, allowed between fork and exec.
        checked(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) }).map(drop)
    };
    // SAFETY: the closure makes one system call: no allocation, no lock.
    unsafe { qemu.pre_exec(die_with_us) };
    qemu.spawn()
}

/// Waits for a VMM's end. Returns its status; `None` if it was killed at the deadline.
pub(crate) fn wait(vmm: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = vmm.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() > deadline {
            vmm.kill()?;
            vmm.wait()?;
            return Ok(None);
        }
        std::thread::sleep(LOOK);
    }
}
