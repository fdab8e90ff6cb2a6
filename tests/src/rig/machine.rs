//! QEMU, with everything emulated: slow, and the same on every x86 machine.

use std::{
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use super::{EXIT_PORT, Kernel, WELL};
use crate::error::{Error, Result, Tried, checked};

const QEMU: &str = "qemu-system-x86_64";
const MEMORY_MIB: &str = "768";
const LOOK: Duration = Duration::from_millis(20);

/// A machine to be started.
pub struct Machine<'a> {
    /// What it boots.
    pub kernel: &'a Kernel,
    /// Its initramfs: one cpio archive, or several one after another.
    pub initramfs: &'a [u8],
    /// More words for the kernel's command line.
    pub parameters: &'a str,
    /// How long it may run.
    pub timeout: Duration,
}

/// How it ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Whether it said [`WELL`].
    pub well: bool,
    /// QEMU's exit status, or that it was killed.
    pub how: String,
    /// What was written to the report.
    pub report: String,
    /// What was written to the console.
    pub console: String,
    /// From start to end.
    pub took: Duration,
}

impl Machine<'_> {
    /// Whether QEMU is here; else what to do.
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

    /// Boots it and waits for its end.
    pub fn run(&self) -> Result<Ended> {
        let scratch = tempfile::tempdir().tried("make a folder for the machine's files")?;
        let at = |name: &str| scratch.path().join(name);
        let (initramfs, console, report) = (at("initramfs"), at("console"), at("report"));
        fs::write(&initramfs, self.initramfs).tried("write the initramfs")?;
        let started = Instant::now();
        let mut qemu = self
            .command(&initramfs, &console, &report)
            .spawn()
            .tried(format!("start {QEMU}"))?;
        let status = wait(&mut qemu, started + self.timeout).tried(format!("wait for {QEMU}"))?;
        let took = started.elapsed();
        let read = |path: &PathBuf| {
            let bytes = fs::read(path).unwrap_or_default();
            String::from_utf8_lossy(&bytes).replace('\r', "")
        };
        Ok(Ended {
            well: status == Some(i32::from(WELL) * 2 + 1),
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
        // One CPU: with several, kernels of 6.12 and later now and then oops under TCG while code
        // is patched.
        qemu.args(["-M", "q35", "-accel", "tcg", "-cpu", "max", "-smp", "1"])
            .args([
                "-m",
                MEMORY_MIB,
                "-nodefaults",
                "-display",
                "none",
                "-no-reboot",
            ])
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
        let die_with_us = || {
            // SAFETY: prctl with numbers only, allowed between fork and exec.
            checked(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) }).map(drop)
        };
        // SAFETY: the closure makes one system call: no allocation, no lock.
        unsafe { qemu.pre_exec(die_with_us) };
        qemu
    }
}

/// Its exit status; `None` when it was killed at the deadline.
fn wait(qemu: &mut Child, deadline: Instant) -> io::Result<Option<i32>> {
    loop {
        if let Some(status) = qemu.try_wait()? {
            return Ok(status.code());
        }
        if Instant::now() > deadline {
            qemu.kill()?;
            qemu.wait()?;
            return Ok(None);
        }
        std::thread::sleep(LOOK);
    }
}
