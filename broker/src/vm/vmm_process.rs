//! A running VMM process: it gets descriptors at its start, and orders to run and to stop.
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
use slipgate_ipc::{
    channel::{Channel, Received},
    vmm::{FromVmm, ToVmm, VmmDisk, VmmEnd, VmmJail, VmmOrder, VmmStart, VmmTimes},
};
use slipgate_policy::document::ConfigError;

use super::{cgroup::Cgroup, disk::OpenDisk};
use crate::{
    config::{MachineSpec, VmmBounds},
    process::{ChildProcess, spawn::Namespaces},
    role::Role,
    snapshot_chain::SnapshotChain,
};

/// Time within which the VMM has to create a machine, which includes reading kernel and initrd.
const MADE_WITHIN: Duration = Duration::from_secs(60);
/// Time within which it has to stop one, which includes writing the guest's remaining output.
const STOPPED_WITHIN: Duration = Duration::from_secs(5);

/// What to do about a host that refuses a part of the jail.
const WITHOUT_JAIL: &str =
    "see `slipgate doctor`, or leave it out: the VMM has its other confinement";

/// A running VMM. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct VmmProcess {
    process: ChildProcess,
    /// Whether it is in a PID namespace of its own.
    in_namespaces: bool,
    /// Dropped behind the process.
    disks: DiskLocks,
}

/// The files of a machine's disks. When this is dropped, they are unlocked at once: an io_uring of the
/// VMM's keeps its file open for a moment after the process's end.
#[derive(Debug, Default)]
struct DiskLocks(Vec<File>);

impl Drop for DiskLocks {
    fn drop(&mut self) {
        for file in &self.0 {
            // A file that is not locked is no error.
            let _ = file.unlock();
        }
    }
}

/// Descriptors that a VMM is given.
#[derive(Debug)]
pub(crate) struct VmmDescriptors {
    pub(crate) kvm: File,
    /// The snapshot to go on from.
    pub(crate) snapshot: Option<SnapshotChain>,
    pub(crate) kernel: Option<File>,
    pub(crate) initrd: Option<File>,
    pub(crate) disks: Vec<OpenDisk>,
    /// Listening socket of the vsock device.
    pub(crate) vsock: Option<OwnedFd>,
    /// Its end of the socket for the guest's own requests.
    pub(crate) vsock_requests: Option<OwnedFd>,
    /// Input of the guest's console.
    pub(crate) input: OwnedFd,
    pub(crate) output: OwnedFd,
    /// Queues of the TAP, one per pair.
    pub(crate) taps: Vec<OwnedFd>,
    /// The file for the guest's memory, if the engine serves the card's rings.
    pub(crate) shared: Option<OwnedFd>,
}

impl VmmProcess {
    /// Starts the VMM, in a PID namespace of its own where the host has one. It confines itself and
    /// waits for its machine, while what that needs is prepared here ([`VmmProcess::make`]).
    pub(crate) fn begin(
        bounds: &VmmBounds,
        cgroup: Option<&Cgroup>,
        log: &str,
        users: &Users,
    ) -> anyhow::Result<Self> {
        let vmm = match ChildProcess::begin_in(Role::Vmm, users, Namespaces::Own) {
            Ok(process) => Self {
                process,
                in_namespaces: true,
                disks: DiskLocks::default(),
            },
            Err(e) => Self::without_namespaces(bounds, users, &e)?,
        };
        vmm.confine(bounds, cgroup, log)?;
        Ok(vmm)
    }

    /// Starts a VMM in the place of one that the host refuses its namespaces.
    fn without_namespaces(
        bounds: &VmmBounds,
        users: &Users,
        refused: &anyhow::Error,
    ) -> anyhow::Result<Self> {
        if bounds.requires_jail {
            let why = format!("the VMM can't have namespaces of its own: {refused:#}");
            return Err(ConfigError::new("--jail", "required", why, WITHOUT_JAIL).into());
        }
        tracing::warn!(
            "the VMM has no namespaces of its own ({refused:#}); `slipgate doctor` says why, --jail \
             required refuses to run so"
        );
        Ok(Self {
            process: ChildProcess::start(Role::Vmm, users)?,
            in_namespaces: false,
            disks: DiskLocks::default(),
        })
    }

    /// Has it enter its jail, in the cgroup.
    fn confine(
        &self,
        bounds: &VmmBounds,
        cgroup: Option<&Cgroup>,
        log: &str,
    ) -> anyhow::Result<()> {
        if let Some(cgroup) = cgroup {
            // Before its first message: nothing of a machine is outside of the cgroup.
            cgroup.take(self.process.pid())?;
        }
        let jail = VmmJail {
            log: log.to_owned(),
            in_namespaces: self.in_namespaces,
            required: bounds.requires_jail,
        };
        self.tell(ToVmm::Confine(jail))
    }

    /// Has a VMM that was begun make the machine. Our copies of the descriptors are closed: the TAP goes
    /// with the VMM. The other arguments are as of [`VmmProcess::begin`].
    pub(crate) fn make(
        &mut self,
        spec: &MachineSpec,
        (bounds, cgroup): (&VmmBounds, Option<&Cgroup>),
        handed: VmmDescriptors,
        mtu: u16,
        log: &str,
        users: &Users,
    ) -> anyhow::Result<()> {
        match self.process.await_execve() {
            // Who is not root has its namespaces refused between clone and execve.
            Err(e) if self.in_namespaces => {
                *self = Self::without_namespaces(bounds, users, &e)?;
                self.confine(bounds, cgroup, log)?;
            }
            executed => executed?,
        }
        let locked = handed.disks.iter().map(|disk| disk.file.try_clone());
        self.disks = DiskLocks(
            locked
                .collect::<Result<_, _>>()
                .context("keeping the disks")?,
        );
        let disks = handed.disks.into_iter().map(VmmDisk::from).collect();
        let start = VmmStart {
            kvm: handed.kvm.into(),
            input: handed.input,
            output: handed.output,
            snapshot: handed.snapshot.map(SnapshotChain::into_files),
            kernel: handed.kernel.map(OwnedFd::from),
            initrd: handed.initrd.map(OwnedFd::from),
            disks,
            vsock: handed.vsock,
            vsock_requests: handed.vsock_requests,
            vsock_cid: spec.vsock.as_ref().map_or(0, |vsock| vsock.cid),
            balloon_mib: spec.balloon_mib,
            net_rates: spec.net_rates,
            taps: handed.taps,
            shared: handed.shared,
            may_restart: bounds.may_restart,
            cpus: spec.cpus,
            memory_bytes: spec.memory_mib << 20,
            huge_pages: bounds.huge_pages,
            cpu_template: spec.cpu_template,
            cmdline: spec.cmdline.clone(),
            mac: spec.mac,
            mtu,
            console_bytes: bounds.console_bytes,
        };
        self.tell(ToVmm::Start(Box::new(start)))
    }

    /// Sends a message of its beginning. Why a VMM has ended is said where its machine is waited for.
    fn tell(&self, message: ToVmm) -> anyhow::Result<()> {
        match self.channel().send(message) {
            Err(e) if !e.is_peer_gone() => Err(e.into()),
            _ => Ok(()),
        }
    }

    /// Waits until the machine is made. Returns what that took the VMM.
    pub(crate) fn await_made(&mut self, spec: &MachineSpec) -> anyhow::Result<VmmTimes> {
        loop {
            match self.process.next(MADE_WITHIN)? {
                Some(FromVmm::Ready(times)) => return Ok(times),
                Some(FromVmm::Failed { flag, why }) => {
                    let given = flag.and_then(|flag| given(spec, &flag));
                    let Some((flag, value)) = given else {
                        bail!("the machine can't be made: {why}");
                    };
                    let remedy = match flag {
                        "--jail" => WITHOUT_JAIL,
                        _ => "the machine can't be made with it",
                    };
                    return Err(ConfigError::new(flag, value, why, remedy).into());
                }
                Some(
                    FromVmm::Counters { .. }
                    | FromVmm::Carried { .. }
                    | FromVmm::Reset { .. }
                    | FromVmm::Ended(_),
                ) => {}
                None => return Err(self.process.ended_before("the machine was made")),
            }
        }
    }

    /// Lets the guest run.
    pub(crate) fn go(&self) -> anyhow::Result<()> {
        Ok(self.channel().send(ToVmm::<OwnedFd>::Go)?)
    }

    /// Requests the counters; answered by [`FromVmm::Counters`]. Returns `false` when the channel
    /// is full or closed; the call never waits, and the end of a VMM is reported elsewhere.
    pub(crate) fn ask_counters(&self, id: u64) -> bool {
        let asked = self.channel().try_send(ToVmm::<OwnedFd>::Counters { id });
        asked.unwrap_or(false)
    }

    /// Passes an order on; answered by [`FromVmm::Carried`]. Returns as [`VmmProcess::ask_counters`].
    pub(crate) fn order(&self, id: u64, order: VmmOrder) -> bool {
        let sent = self.channel().try_send(ToVmm::Order { id, order });
        sent.unwrap_or(false)
    }

    /// Says that nobody waits for an order any more. Returns as [`VmmProcess::ask_counters`].
    pub(crate) fn cancel(&self, id: u64) -> bool {
        let sent = self.channel().try_send(ToVmm::<OwnedFd>::Cancel { id });
        sent.unwrap_or(false)
    }

    /// Says whether a machine that was reset begins anew. Returns as [`VmmProcess::ask_counters`].
    pub(crate) fn after_reset(&self, begins: bool) -> bool {
        let said = self
            .channel()
            .try_send(ToVmm::<OwnedFd>::AfterReset { begins });
        said.unwrap_or(false)
    }

    /// Readable when the VMM has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd()
    }

    pub(crate) fn channel(&self) -> &Channel {
        self.process.channel()
    }

    /// Receives the next message of the VMM, if there is one.
    pub(crate) fn try_receive(&self) -> anyhow::Result<Received<FromVmm>> {
        Ok(self.process.try_receive()?)
    }

    /// Stops the guest; how that ended. `None`: the VMM had to be killed, or was.
    pub(crate) fn stop(&mut self) -> Option<VmmEnd> {
        // An error means that it has ended; what it said last may still be there.
        let _ = self.channel().try_send(ToVmm::<OwnedFd>::Stop);
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
    pub(crate) fn end(&mut self) -> Option<String> {
        self.process.end()
    }
}

impl From<OpenDisk> for VmmDisk {
    fn from(disk: OpenDisk) -> Self {
        let OpenDisk {
            file,
            read_only,
            cache,
            rate,
        } = disk;
        Self {
            file: file.into(),
            read_only,
            cache,
            rate,
        }
    }
}

/// A flag, and what was given by it.
fn given(spec: &MachineSpec, flag: &str) -> Option<(&'static str, String)> {
    let shown = |path: &std::path::PathBuf| path.display().to_string();
    Some(match flag {
        "--jail" => ("--jail", "required".to_owned()),
        "--huge-pages" => {
            let mib = spec.memory_mib;
            ("--huge-pages", format!("(and --memory {mib})"))
        }
        "--cpu-template" => ("--cpu-template", spec.cpu_template.name().to_owned()),
        "--restore" => ("--restore", shown(spec.restore.as_ref()?)),
        "--kernel" => ("--kernel", shown(spec.kernel.as_ref()?)),
        "--initrd" => ("--initrd", shown(spec.initrd.as_ref()?)),
        "--cmdline" => ("--cmdline", spec.cmdline.chars().take(40).collect()),
        _ => return None,
    })
}

/// Opens a file that the user named.
pub(crate) fn open_image(flag: &'static str, path: &Path) -> Result<File, ConfigError> {
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
pub(crate) fn stdout() -> anyhow::Result<OwnedFd> {
    std::io::stdout()
        .as_fd()
        .try_clone_to_owned()
        .context("giving stdout to the VMM")
}

#[cfg(test)]
#[path = "vmm_process_test.rs"]
mod tests;
