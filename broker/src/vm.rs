//! The VM of `slipgate run`: its files, its process, its console, and how it ended.
mod console;
mod disk;
mod report;
mod terminal;
mod vmm_process;

use std::{fs::File, os::fd::OwnedFd};

use anyhow::Context as _;
use slipgate_control::{Users, guest_tap::GuestTap};
use slipgate_policy::document::ConfigError;

pub use self::report::{EXIT_USAGE, exit_status};
use self::{console::Console, disk::OpenDisk, vmm_process::Handed};
pub(crate) use self::{
    console::Typed,
    report::{How, Report, ReportFile},
    vmm_process::VmmProcess,
};
use crate::{
    config::{MachineSpec, RunConfig},
    host::{ListeningSocket, kvm},
};

/// MTU of a TAP for which none is configured, L3 bytes.
const TAP_MTU: u16 = 1_500;

/// The VM that this broker runs.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) vmm: VmmProcess,
    pub(crate) console: Console,
    /// The socket for the guest's vsock; its file goes with it.
    _vsock: Option<ListeningSocket>,
}

/// Kernel and initial RAM disk that the VMM boots, its disks, and its socket for vsock.
pub(crate) struct Images {
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
        Ok(Self {
            kernel: image("--kernel", &machine.kernel)?,
            initrd: image("--initrd", &machine.initrd)?,
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

impl Vm {
    /// Opens what the VMM is handed, the TAP last; takes in its name; makes the machine. `link`: the
    /// network card's in the TAP's place.
    pub(crate) fn prepare(
        config: &mut RunConfig,
        images: Images,
        link: Option<OwnedFd>,
        log: &str,
        users: &Users,
    ) -> anyhow::Result<Self> {
        let machine = &config.machine;
        let Images {
            kernel,
            initrd,
            disks,
            vsock,
        } = images;
        let kvm = kvm::open()?;
        let (console, input) = Console::open(kernel.is_some())?;
        let output = vmm_process::stdout()?;
        let taps = match link {
            Some(link) => vec![link],
            None => {
                let tap = GuestTap::make(&machine.tap, machine.queues);
                let tap = tap.context("making the guest's TAP")?;
                config.set_tap(&tap.name);
                tap.queues
            }
        };
        let listener = vsock.as_ref().map(ListeningSocket::copy).transpose();
        let handed = Handed {
            kvm,
            kernel,
            initrd,
            disks,
            vsock: listener.context("giving the socket of --vsock to the VMM")?,
            input,
            output,
            taps,
        };
        let mtu = config.nat.network.mtu.map_or(TAP_MTU, |mtu| mtu as u16);
        let vmm = VmmProcess::start(&config.machine, handed, mtu, log, users)?;
        Ok(Vm {
            vmm,
            console,
            _vsock: vsock,
        })
    }

    /// An error before the guest ran, or the VMM's end where that is behind it: its TAP goes too.
    pub(crate) fn blame(&mut self, error: anyhow::Error) -> anyhow::Error {
        match self.vmm.end() {
            Some(end) => anyhow::anyhow!("the VMM {end} before its guest ran"),
            None => error,
        }
    }
}
