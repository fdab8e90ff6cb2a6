//! QEMU as the VMM of the built-in guest: an independent device model, with QEMU's network back
//! ends set up as by its users.

use std::{
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use super::{Boot, GuestOutput, image, output};
use crate::{
    error::{Error, Result, Tried},
    netns::NetNs,
    rig::{EXIT_PORT, QEMU},
    slipgate::{READY, binary},
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
    /// A process that listens at this socket: passt, or slipgate. One queue pair.
    Socket(PathBuf),
    /// A process that listens at this socket and takes the card's rings, by vhost-user. One queue pair.
    VhostUser(PathBuf),
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
    pub fn run(&self) -> Result<GuestOutput> {
        self.run_by(self.command()?)
    }

    /// Boots the guest by a changed [`Qemu::command`], and waits for its end.
    pub fn run_by(&self, command: Command) -> Result<GuestOutput> {
        let child = self.boot.namespace.spawn(command)?;
        output::follow(child, self.boot.timeout)
    }

    /// Returns the command that boots the guest, with its console on stdout.
    pub fn command(&self) -> Result<Command> {
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
            Network::Socket(socket) => {
                let path = socket.display();
                let stream = format!("stream,id=n,server=off,addr.type=unix,addr.path={path}");
                (stream, 1)
            }
            Network::VhostUser(_) => ("vhost-user,id=n,chardev=vmm".to_owned(), 1),
        };
        let mut card = "virtio-net-pci,netdev=n".to_owned();
        if queues > 1 {
            card = format!("{card},mq=on,vectors={}", 2 * u32::from(queues) + 2);
        }
        if let Network::Tap(_, mtu) = self.network {
            card = format!("{card},host_mtu={mtu}");
        }
        // The other process maps the guest's memory.
        let memory = format!("memory-backend-memfd,id=memory,size={memory_mib}M,share=on");
        let mut more: Vec<String> = Vec::new();
        if let Network::VhostUser(socket) = &self.network {
            let socket = format!("socket,id=vmm,path={}", socket.display());
            let words = ["-object", &memory, "-machine", "memory-backend=memory"];
            more.extend(words.map(str::to_owned));
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

/// A running passt, with its socket in a folder of its own. Killed on drop.
pub struct Passt {
    process: Child,
    folder: tempfile::TempDir,
}

impl Passt {
    /// Starts passt in `namespace`: the guest is 10.0.2.15/24 behind 10.0.2.2, with this MTU.
    pub fn start(namespace: &NetNs, mtu: u32) -> Result<Passt> {
        let folder = tempfile::tempdir().tried("make a folder for passt's socket")?;
        let socket = folder.path().join("socket");
        let mut command = Command::new("passt");
        command
            .args(["--foreground", "--quiet", "--runas", "0", "--ipv4-only"])
            .args(["--address", "10.0.2.15", "--netmask", "24"])
            .args(["--gateway", "10.0.2.2", "--mtu", &mtu.to_string()])
            .args(["--tcp-ports", "none", "--udp-ports", "none"])
            .arg("--socket")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = namespace.spawn(command)?;
        let mut passt = Passt { process, folder };
        let until = Instant::now() + Duration::from_secs(5);
        while !socket.exists() {
            if let Some(status) = passt.process.try_wait().tried("wait for passt")? {
                return Err(Error::unexpected(format!("passt ended with {status}")));
            }
            if Instant::now() > until {
                return Err(Error::unexpected("passt made no socket in 5 s".to_owned()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(passt)
    }

    /// Returns how QEMU reaches the network.
    pub fn network(&self) -> Network {
        Network::Socket(self.folder.path().join("socket"))
    }
}

/// A running `slipgate attach --socket`, with its socket in a folder of its own. Killed on drop.
pub struct SlipgateSocket {
    process: Child,
    folder: tempfile::TempDir,
}

impl SlipgateSocket {
    /// Starts it in `namespace` by these further flags, and waits until it is ready.
    ///
    /// # Errors
    /// It can't be started, or ends before it is ready.
    pub fn start(namespace: &NetNs, flags: &[&str]) -> Result<SlipgateSocket> {
        let folder = tempfile::tempdir().tried("make a folder for slipgate's socket")?;
        let mut command = Command::new(binary()?);
        command
            .args(["attach", "--name", "vm", "--socket"])
            .arg(folder.path().join("socket"))
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut process = namespace.spawn(command)?;
        let stdout = process.stdout.take();
        let slipgate = SlipgateSocket { process, folder };
        let mut line = String::new();
        if let Some(stdout) = stdout {
            let read = BufReader::new(stdout).read_line(&mut line);
            read.tried("read what slipgate says")?;
        }
        match line.starts_with(READY) {
            true => Ok(slipgate),
            false => Err(Error::unexpected("slipgate ended before it was ready")),
        }
    }

    /// Returns how QEMU reaches the network.
    pub fn network(&self) -> Network {
        Network::Socket(self.folder.path().join("socket"))
    }
}

impl Drop for SlipgateSocket {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Passt {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
