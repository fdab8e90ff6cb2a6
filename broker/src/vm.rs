//! The VM of `slipgate run`: its files, its process, its console, and how it ended.
mod cgroup;
mod console;
mod disk;
mod former_flows;
mod notices;
mod orders;
mod report;
mod resets;
mod terminal;
mod vmm_process;
mod vsock_connector;

use std::{
    collections::BTreeSet,
    fs::File,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::poll::{PollFd, PollFlags};
use slipgate_control::{Users, device::Device, guest_tap::GuestTap};
use slipgate_ipc::{
    channel::Received,
    vmm::{FromVmm, VmmEnd, VmmTimes},
};
use slipgate_policy::document::ConfigError;

use self::{
    cgroup::Cgroup, console::Console, disk::OpenDisk, orders::Orders, resets::Resets,
    vmm_process::VmmDescriptors,
};
pub(crate) use self::{
    console::Typed,
    former_flows::{ENDED_WITHIN, EndingFlows},
    report::{How, Inherits, Report, ReportFile, Stages, micros, printable},
    vmm_process::VmmProcess,
};
pub use self::{
    orders::{MachineRecord, check_machines_dir, machines_dir},
    report::{EXIT_USAGE, exit_status},
};
use crate::{
    config::{MachineSpec, RunConfig, VmmBounds},
    host::{ListeningSocket, kvm},
    snapshot_chain::SnapshotChain,
};

/// MTU of a TAP for which none is configured, L3 bytes.
const TAP_MTU: u16 = 1_500;

/// Time within which the VMM that had a VM's TAP before has to have closed it.
const TAP_FREE_WITHIN: Duration = Duration::from_secs(5);

/// The VM that this broker runs.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) vmm: VmmProcess,
    pub(crate) console: Console,
    pub(crate) orders: Orders,
    pub(crate) stages: Stages,
    pub(crate) resets: Resets,
    /// Whether its TAP stays when it ends.
    pub(crate) leaves_tap: bool,
    /// When its process was started.
    started: Instant,
    /// The socket for the guest's vsock; its file goes with it.
    _vsock: Option<ListeningSocket>,
    /// Goes when the VMM has ended.
    cgroup: Option<Cgroup>,
    /// The VMM's user is nobody else's until then.
    _users: Users,
}

/// Event of the VM.
#[derive(Debug)]
pub(crate) enum Heard {
    /// The guest ended by itself.
    Ended(Box<VmmEnd>),
    /// The VMM died or no longer responds.
    Gone,
    /// A client has asked for the end.
    Killed,
}

/// Kernel and initial RAM disk that the VMM boots, or the snapshot that it restores; its disks, and
/// its socket for vsock.
pub(crate) struct Images {
    snapshot: Option<SnapshotChain>,
    kernel: Option<File>,
    initrd: Option<File>,
    disks: Vec<OpenDisk>,
    vsock: Option<ListeningSocket>,
}

impl Images {
    pub(crate) fn open(machine: &MachineSpec) -> Result<Self, ConfigError> {
        let image = |flag, path: &Option<std::path::PathBuf>| {
            let path = path.as_deref();
            path.map(|path| vmm_process::open_image(flag, path))
                .transpose()
        };
        let saved = |dir: &std::path::PathBuf| {
            SnapshotChain::open(dir).map_err(|e| {
                let (problem, remedy) = e.parts();
                ConfigError::new("--restore", dir.display(), problem, remedy)
            })
        };
        let boots = machine.restore.is_none();
        let of_boot = |path: &Option<std::path::PathBuf>| path.clone().filter(|_| boots);
        Ok(Self {
            snapshot: machine.restore.as_ref().map(saved).transpose()?,
            kernel: image("--kernel", &of_boot(&machine.kernel))?,
            initrd: image("--initrd", &of_boot(&machine.initrd))?,
            disks: machine
                .disks
                .iter()
                .map(disk::open)
                .collect::<Result<_, _>>()?,
            vsock: machine
                .vsock
                .as_ref()
                .map(|vsock| ListeningSocket::listen("--vsock", vsock.socket.clone()))
                .transpose()?,
        })
    }

    /// The opened images, each with its flag.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &File)> {
        let all = [("--kernel", &self.kernel), ("--initrd", &self.initrd)];
        let disks = self.disks.iter().map(|disk| ("--disk", &disk.file));
        all.into_iter()
            .filter_map(|(flag, file)| Some((flag, file.as_ref()?)))
            .chain(disks)
    }
}

/// A VMM whose process starts and confines itself, while what it is handed is prepared.
#[derive(Debug)]
pub(crate) struct BegunVmm {
    vmm: VmmProcess,
    cgroup: Option<Cgroup>,
    users: Users,
    /// When the command began, and when this process was started.
    began: Instant,
    started: Instant,
    started_us: u64,
}

impl BegunVmm {
    /// Starts the process. `began`: when the command did.
    ///
    /// # Errors
    /// The cgroup can't be made, or the process not started.
    pub(crate) fn begin(
        bounds: &VmmBounds,
        log: &str,
        users: &Users,
        began: Instant,
    ) -> anyhow::Result<Self> {
        let cgroup = bounds.cgroup.as_ref().map(Cgroup::make).transpose()?;
        let started = Instant::now();
        let vmm = VmmProcess::begin(bounds, cgroup.as_ref(), log, users)?;
        Ok(Self {
            vmm,
            cgroup,
            users: users.clone(),
            began,
            started,
            started_us: micros(started.elapsed()),
        })
    }
}

/// Gives a TAP that was made the MTU that is to be its: that which the guest of a snapshot knows. Returns
/// the MTU that the card tells the guest, L3 bytes: of `--mtu`, this command's or the daemon's, which the
/// TAP gets where it is served; else that of the TAP, as nobody changes it then.
fn settle_mtu(config: &RunConfig, tap: &GuestTap) -> anyhow::Result<u16> {
    if let Some(given) = config.nat.network.mtu {
        return Ok(of_card(given));
    }
    let device = Device::named(&tap.name)?;
    if let (false, Some(saved)) = (tap.is_persistent, config.machine.mtu) {
        device.set_mtu(saved)?;
    }
    Ok(of_card(device.mtu()?))
}

/// An MTU as a card has it.
fn of_card(mtu: u32) -> u16 {
    u16::try_from(mtu).unwrap_or(u16::MAX)
}

impl Vm {
    /// Opens what the VMM is handed, the TAP last; takes in its name; has the machine made, which
    /// [`Vm::await_made`] waits for. `link`: the network card's in the TAP's place, and the file for the
    /// guest's memory if the engine serves the card's rings. `taken`: names that no new TAP may have.
    /// `begun`: the VMM, or why there is none.
    pub(crate) fn prepare(
        config: &mut RunConfig,
        images: Images,
        taken: &BTreeSet<String>,
        link: Option<(OwnedFd, Option<OwnedFd>)>,
        log: &str,
        begun: anyhow::Result<BegunVmm>,
    ) -> anyhow::Result<Self> {
        let Images {
            snapshot,
            kernel,
            initrd,
            disks,
            vsock,
        } = images;
        let kvm = kvm::open()?;
        // The VMM last: it is dropped first, and leaves an empty cgroup and its users.
        let BegunVmm {
            users,
            cgroup,
            began,
            started,
            started_us,
            mut vmm,
        } = begun?;
        let (console, input) = Console::open(config.machine.kernel.is_some())?;
        let output = vmm_process::stdout()?;
        let (taps, leaves_tap, shared, mtu) = match link {
            Some((link, shared)) => {
                let mtu = config.nat.network.mtu.map_or(TAP_MTU, of_card);
                (vec![link], false, shared, mtu)
            }
            None => {
                let (name, queues) = (&config.machine.tap, config.machine.queues);
                let tap = match config.is_kept {
                    true => GuestTap::open_or_make(name, queues, TAP_FREE_WITHIN)
                        .context("opening the VM's TAP"),
                    false => {
                        GuestTap::make_beside(name, queues, taken).context("making the guest's TAP")
                    }
                }?;
                config.set_tap(&tap.name);
                let mtu = settle_mtu(config, &tap)?;
                (tap.queues, tap.is_persistent, None, mtu)
            }
        };
        let listener = vsock.as_ref().map(ListeningSocket::copy).transpose();
        let requests = vsock
            .as_ref()
            .map(|socket| vsock_connector::start(socket, &users))
            .transpose()?;
        let handed = VmmDescriptors {
            kvm,
            snapshot,
            kernel,
            initrd,
            disks,
            vsock: listener.context("giving the socket of --vsock to the VMM")?,
            vsock_requests: requests,
            input,
            output,
            taps,
            shared,
        };
        let bounds = (&config.bounds, cgroup.as_ref());
        vmm.make(&config.machine, bounds, handed, mtu, log, &users)?;
        let stages = Stages {
            opened_us: micros(began.elapsed()),
            started_us,
            ..Stages::default()
        };
        Ok(Vm {
            vmm,
            console,
            orders: Orders::listen(&config.nat.vms[0].name, &config.machine)?,
            stages,
            resets: Resets::new(config.bounds.may_restart),
            leaves_tap,
            started,
            _vsock: vsock,
            cgroup,
            _users: users,
        })
    }

    /// Waits until the machine is made.
    ///
    /// # Errors
    /// It can't be made; the error blames the flag whose value is at fault.
    pub(crate) fn await_made(&mut self, machine: &MachineSpec) -> anyhow::Result<()> {
        let made = self.vmm.await_made(machine);
        let VmmTimes {
            confined_us,
            made_us,
        } = made.map_err(|e| match self.limit_reached() {
            Some(why) => anyhow::anyhow!("{e:#}, {why}"),
            None => e,
        })?;
        self.stages.confined_us = confined_us;
        self.stages.made_us = made_us;
        self.stages.ready_us = micros(self.started.elapsed());
        Ok(())
    }

    /// Lets the guest run.
    pub(crate) fn go(&mut self) -> anyhow::Result<()> {
        self.console.begin();
        self.orders.begin();
        self.vmm.go()
    }

    /// Descriptors of which one has an event when [`Vm::hear`] has something to do.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let vmm = [self.vmm.pidfd(), self.vmm.channel().as_fd()];
        let vmm = vmm.into_iter().chain(self.resets.fd());
        vmm.chain(self.orders.fds())
    }

    /// As [`Vm::fds`], for poll(2).
    pub(crate) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.fds().map(|fd| PollFd::new(fd, PollFlags::POLLIN))
    }

    /// Answers clients and reads what the VMM has sent, at most `most` messages. `counted` gets
    /// counters that were asked for. Returns how the VM ended or is to end.
    pub(crate) fn hear(
        &mut self,
        most: usize,
        mut counted: impl FnMut(u64, serde_json::Value),
    ) -> Option<Heard> {
        if let Some(begins) = self.resets.done()
            && !self.vmm.after_reset(begins)
        {
            return Some(Heard::Gone);
        }
        for _ in 0..most {
            match self.vmm.try_receive() {
                Ok(Received::Nothing) => break,
                Ok(Received::Message(FromVmm::Ended(end))) => return Some(Heard::Ended(end)),
                Ok(Received::Message(FromVmm::Counters { id, counters })) => counted(id, counters),
                Ok(Received::Message(FromVmm::Carried { id, error })) => {
                    self.orders.carried(id, error);
                }
                Ok(Received::Message(FromVmm::Reset { report })) => {
                    if let Err(e) = self.begin_again(report) {
                        tracing::warn!("the VMM {e:#}");
                        return Some(Heard::Gone);
                    }
                }
                Ok(Received::Message(FromVmm::Ready(_) | FromVmm::Failed { .. })) => {}
                Ok(Received::End) => return Some(Heard::Gone),
                Err(e) => {
                    tracing::warn!("the VMM: {e:#}");
                    return Some(Heard::Gone);
                }
            }
        }
        // Behind the answers, after which a client's next request is taken.
        self.orders.serve(&self.vmm).then_some(Heard::Killed)
    }

    /// Has the flows of a guest that was reset ended, after which it goes on.
    fn begin_again(&mut self, report: Option<String>) -> anyhow::Result<()> {
        if !self.resets.begin(report)? && !self.vmm.after_reset(false) {
            anyhow::bail!("takes no messages");
        }
        Ok(())
    }

    fn out_of_memory(&self) -> Option<&'static str> {
        self.cgroup.as_ref().and_then(Cgroup::out_of_memory)
    }

    /// The limit of its cgroup for which a machine could not be made.
    fn limit_reached(&self) -> Option<&'static str> {
        let threads = || self.cgroup.as_ref().and_then(Cgroup::out_of_threads);
        self.out_of_memory().or_else(threads)
    }

    /// Says that the machine, which has ended, was held back by its limit of CPU time.
    pub(crate) fn tell_of_throttling(&self) {
        if let Some(throttled) = self.cgroup.as_ref().and_then(Cgroup::throttled) {
            let waited_ms = throttled.as_millis();
            tracing::info!(
                "--cpu-max has held the VMM's threads back for {waited_ms} ms in sum; `cpu.stat` of \
                 its cgroup counts that while it runs"
            );
        }
    }

    /// How the VMM's process ended, in words; `None` while it runs.
    pub(crate) fn end(&mut self) -> Option<String> {
        let how = self.vmm.end()?;
        Some(match self.out_of_memory() {
            Some(why) => format!("{how}, {why}"),
            None => how,
        })
    }

    /// An error before the guest ran, or the VMM's end where that is behind it: its TAP goes too.
    pub(crate) fn blame(&mut self, error: anyhow::Error) -> anyhow::Error {
        match self.end() {
            Some(end) => anyhow::anyhow!("the VMM {end} before its guest ran"),
            None => error,
        }
    }
}
