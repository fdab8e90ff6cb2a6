//! The VMM process as the broker has it: handed descriptors, told when to run and when to stop.
use std::{
    fs::{File, OpenOptions},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use slipgate_control::Users;

use super::child::{ChildProcess, Role};
use crate::{
    channel::{Channel, FromVmm, Received, ToVmm, VmmEnd, VmmStart},
    config::MachineSpec,
};
use slipgate_policy::document::ConfigError;

/// How long the VMM may take to make a machine: it reads kernel and initrd.
const MADE_WITHIN: Duration = Duration::from_secs(60);
/// How long it may take to stop one. It writes out what the guest printed.
const STOPPED_WITHIN: Duration = Duration::from_secs(5);

/// A running VMM. It is killed when this is dropped.
#[derive(Debug)]
pub(super) struct VmmProcess {
    process: ChildProcess,
}

/// What a VMM works with.
#[derive(Debug)]
pub(super) struct Handed {
    pub(super) kvm: File,
    pub(super) kernel: Option<File>,
    pub(super) initrd: Option<File>,
    /// The console's.
    pub(super) input: OwnedFd,
    pub(super) output: OwnedFd,
    /// One queue of the TAP per pair.
    pub(super) taps: Vec<OwnedFd>,
}

impl VmmProcess {
    /// Starts the VMM and waits until the machine is made. Our copies of the descriptors are
    /// closed: the TAP goes with the VMM.
    pub(super) fn start(
        spec: &MachineSpec,
        handed: Handed,
        mtu: u16,
        log: &str,
        users: &Users,
    ) -> anyhow::Result<Self> {
        let mut vmm = Self {
            process: ChildProcess::start(Role::Vmm, users)?,
        };
        let start = VmmStart {
            cpus: spec.cpus,
            memory_bytes: spec.memory_mib << 20,
            kernel: handed.kernel.is_some(),
            initrd: handed.initrd.is_some(),
            cmdline: spec.cmdline.clone(),
            mac: spec.mac,
            mtu,
            log: log.to_owned(),
        };
        let mut fds = vec![
            handed.kvm.as_fd(),
            handed.input.as_fd(),
            handed.output.as_fd(),
        ];
        fds.extend(handed.kernel.iter().map(AsFd::as_fd));
        fds.extend(handed.initrd.iter().map(AsFd::as_fd));
        fds.extend(handed.taps.iter().map(AsFd::as_fd));
        vmm.channel().send(&ToVmm::Start(Box::new(start)), &fds)?;
        drop(handed);
        loop {
            match vmm.process.next(MADE_WITHIN)? {
                Some(FromVmm::Ready) => return Ok(vmm),
                Some(FromVmm::Failed { flag, why }) => {
                    let given = flag.and_then(|flag| given(spec, &flag));
                    let Some((flag, value)) = given else {
                        bail!("the machine can't be made: {why}");
                    };
                    let remedy = "the machine can't be made with it";
                    return Err(ConfigError::new(flag, value, why, remedy).into());
                }
                Some(FromVmm::Counters { .. } | FromVmm::Ended(_)) => {}
                None => return Err(vmm.process.ended_before("the machine was made")),
            }
        }
    }

    /// Lets the guest run.
    pub(super) fn go(&self) -> anyhow::Result<()> {
        Ok(self.channel().send(&ToVmm::Go, &[])?)
    }

    /// Asks for the counters; answered by [`FromVmm::Counters`]. `false` when it does not listen:
    /// it is not waited for, and one that has ended is heard of in its turn.
    pub(super) fn ask_counters(&self, request: u64) -> bool {
        let asked = self.channel().try_send(&ToVmm::Counters { request });
        asked.unwrap_or(false)
    }

    /// Readable when the VMM has ended.
    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd()
    }

    pub(super) fn channel(&self) -> &Channel {
        self.process.channel()
    }

    /// What it has said.
    pub(super) fn heard(&self) -> anyhow::Result<Received<FromVmm>> {
        Ok(self.process.heard()?)
    }

    /// Stops the guest; how that ended. `None`: the VMM had to be killed, or was.
    pub(super) fn stop(&mut self) -> Option<VmmEnd> {
        // An error means that it has ended; what it said last may still be there.
        let _ = self.channel().try_send(&ToVmm::Stop);
        let until = Instant::now() + STOPPED_WITHIN;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.process.next(left) {
                Ok(Some(FromVmm::Ended(end))) => return Some(*end),
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return None,
            }
        }
    }

    /// How the process ended, in words; `None` while it runs.
    pub(super) fn end(&mut self) -> Option<String> {
        self.process.end()
    }
}

/// A flag, and what was given by it.
fn given(spec: &MachineSpec, flag: &str) -> Option<(&'static str, String)> {
    let shown = |path: &std::path::PathBuf| path.display().to_string();
    Some(match flag {
        "--kernel" => ("--kernel", shown(spec.kernel.as_ref()?)),
        "--initrd" => ("--initrd", shown(spec.initrd.as_ref()?)),
        "--cmdline" => ("--cmdline", spec.cmdline.chars().take(40).collect()),
        _ => return None,
    })
}

/// Opens a file that the user named.
pub(super) fn open_image(flag: &'static str, path: &Path) -> Result<File, ConfigError> {
    let refused = |problem: String, remedy| ConfigError::new(flag, path.display(), problem, remedy);
    let file = OpenOptions::new()
        .read(true)
        // A FIFO without a writer is not waited for.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| {
            refused(
                format!("it can't be read ({e})"),
                "give a file that is there",
            )
        })?;
    match file.metadata() {
        Ok(data) if !data.is_file() => Err(refused(
            "it is no regular file".into(),
            "give an image's file",
        )),
        Ok(data) if data.len() == 0 => Err(refused("it is empty".into(), "give an image's file")),
        Ok(_) => Ok(file),
        Err(e) => Err(refused(
            format!("it can't be looked at ({e})"),
            "give another one",
        )),
    }
}

/// Where the guest prints: our stdout, by a descriptor of its own.
pub(super) fn stdout() -> anyhow::Result<OwnedFd> {
    std::io::stdout()
        .as_fd()
        .try_clone_to_owned()
        .context("giving stdout to the VMM")
}

#[cfg(test)]
#[path = "vmm_process_test.rs"]
mod tests;
