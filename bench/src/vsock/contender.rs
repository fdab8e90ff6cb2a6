//! Machines with a vsock device, and how a program of the host connects to a port of their guests.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Error, Result, ensure};
use nix::sys::{
    socket::{self, AddressFamily, SockFlag, SockType, VsockAddr, setsockopt, sockopt},
    time::TimeVal,
};
use serde_json::Value;
use slipgate_testbed::{World, builtin_guest::Device, cpu_time, requirements};

use crate::{
    contender::{self, NatProcess, named, version_of},
    guest_machine::{GuestMachine, in_time, is_vcpu, number, place},
    machine::Pinning,
    process_tree,
    vsock::program::WRITE_BYTES,
};

/// Variable that names a vhost-device-vsock, which the distribution does not have.
const VHOST_DEVICE_VSOCK: &str = "SLIPGATE_VHOST_DEVICE_VSOCK";
/// The kernel's own device.
const KERNEL: &str = "/dev/vhost-vsock";
/// The guest's address: with the kernel's device it must be no other guest's of this machine.
const CID: u32 = 70_007;
const WAIT: Duration = Duration::from_secs(60);
/// Longest wait of the program for data, or for room.
const PATIENCE_S: i64 = 30;

/// A VMM, and who serves the device's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    Slipgate,
    /// slipgate, with socat between the program and the device's socket: a copy more each way, by a
    /// process of its own.
    Socat,
    VhostUser,
    Kernel,
}

/// All contenders, in the order in which they take turns.
pub(super) const ALL: [Contender; 4] = [
    Contender::Slipgate,
    Contender::Socat,
    Contender::VhostUser,
    Contender::Kernel,
];

impl Contender {
    /// Returns the contender's name, as in the tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Contender::Slipgate => super::SLIPGATE,
            Contender::Socat => "slipgate-vsock-socat",
            Contender::VhostUser => super::REFERENCE,
            Contender::Kernel => "qemu-vhost-vsock",
        }
    }

    /// Returns the contender's version.
    ///
    /// # Errors
    /// It cannot run on this machine.
    pub(super) fn version(self) -> Result<String> {
        requirements::kvm().map_err(Error::msg)?;
        let qemu = || contender::version("qemu-system-x86_64", "qemu-system-x86");
        match self {
            Contender::Slipgate => Ok("this commit".to_owned()),
            Contender::Socat => {
                let socat = contender::version("socat", "socat")?;
                Ok(format!("this commit, {socat}"))
            }
            Contender::VhostUser => {
                let back_end = version_of(&named(VHOST_DEVICE_VSOCK)?)?;
                Ok(format!("{}, {back_end}", qemu()?))
            }
            Contender::Kernel => {
                ensure!(Path::new(KERNEL).exists(), "there is no {KERNEL}");
                Ok(format!("{}, {KERNEL}", qemu()?))
            }
        }
    }
}

/// A running machine with its device.
pub(super) struct Stand {
    machine: GuestMachine,
    back_end: Option<NatProcess>,
    socket: Option<PathBuf>,
    world: World,
    _folder: tempfile::TempDir,
}

impl Stand {
    /// Boots the guest with a command line of workloads.
    pub(super) fn boot(contender: Contender, work: &str) -> Result<Stand> {
        let world = World::with(contender::world(false))?;
        let folder = tempfile::tempdir().context("make a folder for sockets")?;
        let (socket, rings) = (folder.path().join("vm"), folder.path().join("rings"));
        let mut back_end = None;
        let machine = match contender {
            Contender::Slipgate => {
                let vsock = format!("{CID},{}", socket.display());
                GuestMachine::slipgate(&world, work, &["--vsock", &vsock])?
            }
            Contender::Socat => {
                let behind = folder.path().join("behind");
                let process = NatProcess::start(
                    &world.host,
                    socat_between(&socket, &behind),
                    Pinning::none(),
                )?;
                let process = back_end.insert(process);
                in_time("socat's socket", || socket.exists().then_some(()))
                    .or_else(|why| process.check().and(Err(why)))?;
                let vsock = format!("{CID},{}", behind.display());
                GuestMachine::slipgate(&world, work, &["--vsock", &vsock])?
            }
            Contender::VhostUser => {
                let mut command = Command::new(named(VHOST_DEVICE_VSOCK)?);
                command
                    .args(["--guest-cid", &CID.to_string(), "--socket"])
                    .arg(&rings)
                    .arg("--uds-path")
                    .arg(&socket);
                let process = NatProcess::start(&world.host, command, Pinning::none())?;
                let process = back_end.insert(process);
                in_time("vhost-device-vsock's socket", || {
                    rings.exists().then_some(())
                })
                .or_else(|why| process.check().and(Err(why)))?;
                GuestMachine::qemu(&world, work, &[Device::VhostUserVsock(rings)])?
            }
            Contender::Kernel => GuestMachine::qemu(&world, work, &[Device::VhostVsock(CID)])?,
        };
        Ok(Stand {
            machine,
            back_end,
            socket: (contender != Contender::Kernel).then_some(socket),
            world,
            _folder: folder,
        })
    }

    /// Pins everything, and returns the program's CPU.
    pub(super) fn place(&self) -> Option<usize> {
        place(&self.world)
    }

    /// Waits until the guest listens at its next port.
    pub(super) fn await_port(&mut self) -> Result<()> {
        self.said("\"listening\"").map(drop)
    }

    /// Waits until the guest has seen the end of the connection to its port.
    pub(super) fn await_end(&mut self) -> Result<()> {
        let said = self.said("\"workload\":\"vsock\"")?;
        number(&said, "connections").map(drop)
    }

    fn said(&mut self, part: &str) -> Result<Value> {
        self.machine.await_line(part, WAIT).map_err(|why| {
            let back_end = self.back_end.as_mut().map(NatProcess::check);
            match back_end {
                Some(Err(ended)) => ended.context(why),
                _ => why,
            }
        })
    }

    /// Returns what the program uses.
    pub(super) fn device(&self) -> Result<Served> {
        Ok(Served {
            vmm: self.machine.vmm_pid()?,
            back_end: self.back_end.as_ref().map(NatProcess::pid),
            socket: self.socket.clone(),
        })
    }
}

/// A device that is served: where the program connects, and which processes serve it.
pub(super) struct Served {
    vmm: u32,
    back_end: Option<u32>,
    /// Where the program connects; the kernel's device is reached by an address.
    socket: Option<PathBuf>,
}

impl Served {
    /// Connects to a port at which the guest listens.
    pub(super) fn connect(&self, port: u32) -> Result<File> {
        let stream = match &self.socket {
            Some(socket) => through(socket, port),
            None => by_address(port),
        };
        let stream = stream.with_context(|| format!("connect to the guest's port {port}"))?;
        let patience = TimeVal::new(PATIENCE_S, 0);
        setsockopt(&stream, sockopt::ReceiveTimeout, &patience)?;
        setsockopt(&stream, sockopt::SendTimeout, &patience)?;
        Ok(File::from(stream))
    }

    /// Returns the CPU time of all that serves the device: the VMM's threads but its vCPU, and the
    /// process or the kernel's thread that takes its rings, or passes its bytes on.
    pub(super) fn device_time(&self) -> Duration {
        let vmm = cpu_time::of_threads(self.vmm, |name| !is_vcpu(name));
        // socat serves a connection by a child, which ends with it.
        let back_end = self.back_end.map(process_tree::cpu_time);
        let kernel = match self.socket {
            Some(_) => Duration::ZERO,
            None => kernel_s_time(self.vmm),
        };
        vmm + back_end.unwrap_or_default() + kernel
    }
}

/// socat between a socket for programs and that of the device, with a buffer as long as the program's
/// writes: it has 8 KiB by itself.
fn socat_between(front: &Path, behind: &Path) -> Command {
    let mut command = Command::new("socat");
    command
        .args(["-b", &WRITE_BYTES.to_string()])
        .arg(format!("UNIX-LISTEN:{},fork", front.display()))
        .arg(format!("UNIX-CONNECT:{}", behind.display()));
    command
}

/// Connects by the socket of a VMM, which asks for the port in a line and answers by one.
fn through(socket: &Path, port: u32) -> Result<OwnedFd> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(WAIT))?;
    // By one write: vhost-device-vsock takes what it reads first for the whole line.
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let (mut line, mut byte) = (Vec::new(), [0]);
    while stream.read(&mut byte)? == 1 && byte != *b"\n" {
        line.push(byte[0]);
    }
    let said = String::from_utf8_lossy(&line);
    ensure!(said.starts_with("OK "), "it was refused: {said:?}");
    Ok(stream.into())
}

/// Connects by the guest's address.
fn by_address(port: u32) -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let stream = socket::socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
    let raw = std::os::fd::AsRawFd::as_raw_fd(&stream);
    socket::connect(raw, &VsockAddr::new(CID, port))?;
    Ok(stream)
}

/// CPU time of the kernel's thread for a VMM's rings, where it is a process of its own (before Linux
/// 6.4; later it is one of the VMM's threads).
fn kernel_s_time(vmm: u32) -> Duration {
    let name = format!("vhost-{vmm}");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|one| one.file_name().to_str()?.parse().ok());
    pids.filter(|pid| *pid != vmm)
        .map(|pid: u32| cpu_time::of_threads(pid, |thread| thread == name))
        .sum()
}
