//! QEMU as the VMM of the built-in guest: an independent device model, with QEMU's network back
//! ends set up as by its users.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use super::{Boot, GuestOutput, image, output};
use crate::{
    error::Result,
    rig::{EXIT_PORT, QEMU},
};

/// Executor of the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// KVM of the host.
    Kvm,
    /// TCG, the translator of QEMU.
    Tcg,
}

/// The other end of the guest's network card.
#[derive(Clone, Debug)]
pub enum Network {
    /// libslirp, in QEMU's process. One queue pair.
    User,
    /// A TAP that is there, of this MTU; a queue pair per CPU.
    Tap(String, u32),
    /// A process that listens at this socket, as passt does; of this MTU. One queue pair.
    Socket(PathBuf, u32),
    /// A process that listens at this socket and takes the card's rings, by vhost-user; of this MTU. One
    /// queue pair.
    VhostUser(PathBuf, u32),
}

/// A further device of the guest.
#[derive(Clone, Debug)]
pub enum Device {
    /// A virtio-blk disk of a raw image, with a thread of its own.
    Disk {
        /// The image.
        image: PathBuf,
        /// Whether the guest may not write it.
        read_only: bool,
        /// How QEMU reads and writes it: its `aio=`.
        aio: &'static str,
    },
    /// A vsock device whose rings a process at this socket takes, by vhost-user.
    VhostUserVsock(PathBuf),
    /// A vsock device of this address, whose rings the host's kernel takes.
    VhostVsock(u32),
}

impl Device {
    fn args(&self) -> Vec<String> {
        match self {
            Device::Disk {
                image,
                read_only,
                aio,
            } => {
                let read_only = if *read_only { "on" } else { "off" };
                let drive = format!(
                    "file={},format=raw,if=none,id=d,cache=writeback,readonly={read_only},aio={aio}",
                    image.display()
                );
                let device = "virtio-blk-pci,drive=d,iothread=io".to_owned();
                [
                    "-object",
                    "iothread,id=io",
                    "-drive",
                    &drive,
                    "-device",
                    &device,
                ]
                .map(str::to_owned)
                .to_vec()
            }
            Device::VhostUserVsock(socket) => {
                let socket = format!("socket,id=vsock,path={}", socket.display());
                let device = "vhost-user-vsock-pci-non-transitional,chardev=vsock";
                ["-chardev", &socket, "-device", device]
                    .map(str::to_owned)
                    .to_vec()
            }
            Device::VhostVsock(cid) => {
                let device = format!("vhost-vsock-pci-non-transitional,guest-cid={cid}");
                vec!["-device".to_owned(), device]
            }
        }
    }
}

/// A guest to be run by QEMU.
#[derive(Clone, Debug)]
pub struct Qemu<'a> {
    /// Guest to boot, and its namespace.
    pub boot: Boot<'a>,
    /// Accelerator that QEMU uses.
    pub accelerator: Accelerator,
    /// Peer of the guest's network card.
    pub network: Network,
}

impl Qemu<'_> {
    /// Boots the guest and waits for its end.
    ///
    /// # Errors
    /// The image is missing, or QEMU cannot be started or awaited.
    pub fn run(&self) -> Result<GuestOutput> {
        self.run_by(self.command()?)
    }

    /// Boots the guest by a changed [`Qemu::command`], and waits for its end.
    ///
    /// # Errors
    /// QEMU cannot be started or awaited.
    pub fn run_by(&self, command: Command) -> Result<GuestOutput> {
        let child = self.boot.namespace.spawn(command)?;
        output::follow(child, self.boot.timeout)
    }

    /// Returns the command that boots the guest, with its console on stdout.
    ///
    /// # Errors
    /// The guest's image does not exist.
    pub fn command(&self) -> Result<Command> {
        self.command_with(&[])
    }

    /// Returns the command that boots the guest with further devices.
    ///
    /// # Errors
    /// The guest's image does not exist.
    pub fn command_with(&self, devices: &[Device]) -> Result<Command> {
        let Boot {
            command_line,
            cpus,
            memory_mib,
            ..
        } = &self.boot;
        // A software KVM lets the guest see the host's own CPUID, whatever QEMU sets: the guest then
        // takes a TSC deadline timer, which KVM keeps silent unless QEMU has offered it too.
        let (accelerator, cpu) = match self.accelerator {
            Accelerator::Kvm => ("kvm", "qemu64,+tsc-deadline"),
            Accelerator::Tcg => ("tcg,thread=multi", "qemu64"),
        };
        let (back_end, queues) = match &self.network {
            Network::User => ("user,id=n".to_owned(), 1),
            Network::Tap(name, _) => {
                let tap = format!("tap,id=n,ifname={name},script=no,downscript=no,vhost=off");
                match cpus {
                    1 => (tap, 1),
                    queues => (format!("{tap},queues={queues}"), *queues),
                }
            }
            Network::Socket(socket, _) => {
                let path = socket.display();
                let stream = format!("stream,id=n,server=off,addr.type=unix,addr.path={path}");
                (stream, 1)
            }
            Network::VhostUser(..) => ("vhost-user,id=n,chardev=vmm".to_owned(), 1),
        };
        let mut card = "virtio-net-pci,netdev=n".to_owned();
        if queues > 1 {
            card = format!("{card},mq=on,vectors={}", 2 * u32::from(queues) + 2);
        }
        if let Network::Tap(_, mtu) | Network::Socket(_, mtu) | Network::VhostUser(_, mtu) =
            self.network
        {
            card = format!("{card},host_mtu={mtu}");
        }
        let mut more: Vec<String> = devices.iter().flat_map(Device::args).collect();
        let is_shared = |device: &Device| matches!(device, Device::VhostUserVsock(_));
        if matches!(self.network, Network::VhostUser(..)) || devices.iter().any(is_shared) {
            // The other process maps the guest's memory.
            let memory = format!("memory-backend-memfd,id=memory,size={memory_mib}M,share=on");
            let words = ["-object", &memory, "-machine", "memory-backend=memory"];
            more.extend(words.map(str::to_owned));
        }
        if let Network::VhostUser(socket, _) = &self.network {
            let socket = format!("socket,id=vmm,path={}", socket.display());
            more.extend(["-chardev".to_owned(), socket]);
        }
        let exit = format!("isa-debug-exit,iobase={EXIT_PORT:#x},iosize=1");
        let mut command = Command::new(QEMU);
        command
            .args(["-M", "q35", "-accel", accelerator, "-cpu", cpu])
            .args(["-smp", &cpus.to_string(), "-m", &memory_mib.to_string()])
            // Threads by their names, for who places them.
            .args(["-name", "guest,debug-threads=on"])
            .args(["-nodefaults", "-display", "none", "-no-reboot"])
            .args(["-serial", "stdio", "-device", &exit])
            .args(more)
            .args(["-netdev", &back_end, "-device", &card])
            .arg("-kernel")
            .arg(image()?)
            .args(["-append", command_line])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Ok(command)
    }
}
