//! Networks of QEMU's guest that are a process without privileges at a Unix socket: passt, gvproxy, and
//! `slipgate attach --socket`.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use super::Network;
use crate::{
    error::{Error, Result, Tried},
    netns::NetNs,
    slipgate::{READY, binary},
};

/// Time in which a process makes its socket.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether QEMU passes frames by the socket, or the process takes the card's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passage {
    /// QEMU's `-netdev stream`.
    Stream,
    /// vhost-user.
    VhostUser,
}

/// A running process that is the network of a guest, with its socket in a folder of its own. Killed on
/// drop.
pub struct SocketNetwork {
    process: Child,
    folder: tempfile::TempDir,
    passage: Passage,
    mtu: u32,
}

impl SocketNetwork {
    /// Starts a passt in `namespace`: the guest is 10.0.2.15/24 behind 10.0.2.2, with this MTU.
    ///
    /// # Errors
    /// passt cannot be started, or does not listen in time.
    pub fn passt(namespace: &NetNs, program: &Path, mtu: u32, passage: Passage) -> Result<Self> {
        let mut command = Command::new(program);
        command
            .args(["--foreground", "--quiet", "--ipv4-only"])
            .args(["--address", "10.0.2.15", "--netmask", "24"])
            .args(["--gateway", "10.0.2.2", "--mtu", &mtu.to_string()])
            .args(["--tcp-ports", "none", "--udp-ports", "none"]);
        if passage == Passage::VhostUser {
            command.arg("--vhost-user");
        }
        Self::start(namespace, command, (passage, mtu), |command, socket| {
            command.arg("--socket").arg(socket);
        })
    }

    /// Starts a gvproxy in `namespace`: the guest has a lease of 192.168.127.0/24, and this MTU.
    ///
    /// # Errors
    /// gvproxy cannot be started, or does not listen in time.
    pub fn gvproxy(namespace: &NetNs, program: &Path, mtu: u32) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(["-mtu", &mtu.to_string(), "-ssh-port", "-1"]);
        Self::start(
            namespace,
            command,
            (Passage::Stream, mtu),
            |command, socket| {
                let address = format!("unix://{}", socket.display());
                command.args(["-listen-qemu", &address]);
            },
        )
    }

    /// Starts `slipgate attach --socket`, or `--vhost-user`, in `namespace` with this MTU and these further
    /// flags, and waits until it is ready.
    ///
    /// # Errors
    /// It can't be started, or ends before it is ready.
    pub fn slipgate(namespace: &NetNs, mtu: u32, passage: Passage, flags: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir().tried("make a folder for slipgate's socket")?;
        let mut command = Command::new(binary()?);
        command
            .args(["attach", "--name", "vm", "--mtu", &mtu.to_string()])
            .arg(match passage {
                Passage::Stream => "--socket",
                Passage::VhostUser => "--vhost-user",
            })
            .arg(folder.path().join("socket"))
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut process = namespace.spawn(command)?;
        let stdout = process.stdout.take();
        let network = SocketNetwork {
            process,
            folder,
            passage,
            mtu,
        };
        let mut line = String::new();
        if let Some(stdout) = stdout {
            let read = BufReader::new(stdout).read_line(&mut line);
            read.tried("read what slipgate says")?;
        }
        match line.starts_with(READY) {
            true => Ok(network),
            false => Err(Error::unexpected("slipgate ended before it was ready")),
        }
    }

    /// Starts a process that says nothing, and waits for its socket.
    fn start(
        namespace: &NetNs,
        mut command: Command,
        (passage, mtu): (Passage, u32),
        listen_at: impl FnOnce(&mut Command, &Path),
    ) -> Result<Self> {
        let name = command.get_program().display().to_string();
        let folder = tempfile::tempdir().tried("make a folder for a socket")?;
        // passt becomes nobody before or after it makes its socket, depending on its version.
        let for_all = fs::Permissions::from_mode(0o1777);
        fs::set_permissions(folder.path(), for_all).tried("open a socket's folder to nobody")?;
        let socket = folder.path().join("socket");
        listen_at(&mut command, &socket);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut network = SocketNetwork {
            process: namespace.spawn(command)?,
            folder,
            passage,
            mtu,
        };
        let until = Instant::now() + START_TIMEOUT;
        while !socket.exists() {
            let ended = network.process.try_wait();
            if let Some(status) = ended.tried("wait for a process")? {
                return Err(Error::unexpected(format!("{name} ended with {status}")));
            }
            if Instant::now() > until {
                let why = format!("{name} made no socket in {START_TIMEOUT:?}");
                return Err(Error::unexpected(why));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(network)
    }

    /// Returns how QEMU reaches the network.
    pub fn network(&self) -> Network {
        let socket: PathBuf = self.folder.path().join("socket");
        match self.passage {
            Passage::Stream => Network::Socket(socket, self.mtu),
            Passage::VhostUser => Network::VhostUser(socket, self.mtu),
        }
    }
}

impl Drop for SocketNetwork {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
