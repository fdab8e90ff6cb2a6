//! The machine that `slipgate run` runs, and the NAT of its one VM.
use std::{
    fs::Metadata,
    io,
    os::unix::fs::MetadataExt as _,
    path::{self, Path, PathBuf},
};

use nix::{
    errno::Errno,
    unistd::{AccessFlags, access, geteuid},
};
use serde::{Deserialize, Deserializer, Serialize};
use slipgate_ipc::vmm::{CpuTemplate, DiskCache, NetRates, RateLimit};

use super::{Config, parse_mac};

/// Checked configuration of `slipgate run`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunConfig {
    /// The machine to create.
    pub machine: MachineSpec,
    /// NAT for one VM, whose TAP does not exist yet.
    pub nat: Config,
    /// File to which the report of the run is written.
    pub report: Option<PathBuf>,
    /// Bounds of the machine's process.
    pub bounds: VmmBounds,
    /// Whether the VM is one that a daemon keeps: its TAP may be there.
    pub is_kept: bool,
}

/// Bounds of a machine's process on the host, which are no part of the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VmmBounds {
    /// Whether to refuse to run where the host lacks a namespace of the jail.
    pub requires_jail: bool,
    /// Most bytes of the guest's that are written to its console, if that is a file.
    pub console_bytes: u64,
    /// Cgroup and its limits; `None`: the process stays in ours.
    pub cgroup: Option<CgroupSpec>,
    /// Whether the machine begins anew when its guest resets it.
    pub may_restart: bool,
    /// Whether the guest's memory is of the host's huge pages.
    pub huge_pages: bool,
}

/// Cgroup (v2) of a machine's process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CgroupSpec {
    /// Directory in which it is made, absolute or from the mount point.
    pub parent: PathBuf,
    /// Most CPU time, hundredths of a CPU.
    pub cpu_percent: Option<u32>,
    /// Largest memory use, bytes.
    pub memory_bytes: Option<u64>,
    /// Most of its memory that is swapped out, bytes.
    pub swap_bytes: Option<u64>,
    /// Largest number of threads.
    pub pids: Option<u32>,
}

/// Virtual machine that `slipgate run` creates.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSpec {
    /// Directory of the snapshot from which it goes on; `None`: it boots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<PathBuf>,
    /// The kernel's image; `None`: the built-in guest.
    pub kernel: Option<PathBuf>,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Disks, in the order in which the guest finds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskSpec>,
    /// Connections between guest and host; `None` without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockSpec>,
    /// Memory that the guest is asked to give back at the beginning, MiB; `None`: it has no balloon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon_mib: Option<u64>,
    /// The kernel's command line, or the built-in guest's work.
    pub cmdline: String,
    /// Number of virtual CPUs.
    pub cpus: u8,
    /// Memory of the guest, MiB.
    pub memory_mib: u64,
    /// CPU that the guest is told of.
    #[serde(default, skip_serializing_if = "CpuTemplate::is_host")]
    pub cpu_template: CpuTemplate,
    /// Number of queue pairs of its network card.
    pub queues: u16,
    /// Most that passes its network card.
    #[serde(default, skip_serializing_if = "NetRates::is_none")]
    pub net_rates: NetRates,
    /// The guest's MAC address.
    #[serde(serialize_with = "mac_as_text", deserialize_with = "mac_of_text")]
    pub mac: [u8; 6],
    /// MTU of its TAP when it was saved, L3 bytes; `None`: it had none, or was not saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The TAP's name, or a pattern with `%d` for the kernel to choose. Empty: there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tap: String,
    /// Whether the VM takes the name of its TAP.
    #[serde(skip)]
    pub named_by_tap: bool,
}

/// Most disks of a machine.
pub const MAX_DISKS: usize = 8;

/// Disk of a virtual machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// Raw image or block device.
    pub path: PathBuf,
    /// Whether the guest's writes are refused.
    pub read_only: bool,
    /// When the guest's writes become stable.
    #[serde(default, skip_serializing_if = "DiskCache::is_write_back")]
    pub cache: DiskCache,
    /// Most that its requests transfer.
    #[serde(default, skip_serializing_if = "RateLimit::is_none")]
    pub rate: RateLimit,
}

/// The vsock device of a virtual machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockSpec {
    /// Address of the guest (CID).
    pub cid: u32,
    /// Path of the Unix socket to which programs of the host connect.
    pub socket: PathBuf,
}

impl RunConfig {
    /// Sets the name that the kernel gave the TAP.
    pub fn set_tap(&mut self, name: &str) {
        self.machine.tap = name.to_owned();
        for vm in &mut self.nat.vms {
            vm.tap = name.to_owned();
            if self.machine.named_by_tap {
                vm.name = name.to_owned();
            }
        }
    }
}

/// Files of a snapshot's directory: the machine's state, its memory, and what it is made of. The last
/// one is written when the others are complete.
pub const SNAPSHOT_FILES: [&str; 3] = ["state", "memory", "machine.json"];
/// Longest description of a machine, bytes.
const MAX_DESCRIPTION: u64 = 64 << 10;

/// Description of a machine beside its snapshot: its devices, with absolute paths.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedMachine {
    /// Version of the description.
    version: u32,
    /// Specification of the machine.
    pub machine: MachineSpec,
    /// The snapshot that this one differs from; `None`: it is whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<SavedBase>,
}

/// The snapshot that another one differs from.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedBase {
    /// Its id: what the state of the other one says, too.
    pub id: String,
    /// Directory of the snapshot.
    pub path: PathBuf,
}

impl SavedMachine {
    const VERSION: u32 = 1;

    /// Describes a machine of this process.
    pub fn of(machine: &MachineSpec) -> Self {
        let absolute = |path: &PathBuf| path::absolute(path).unwrap_or_else(|_| path.clone());
        let mut machine = machine.clone();
        machine.restore = None;
        machine.tap = String::new();
        machine.kernel = machine.kernel.as_ref().map(absolute);
        machine.initrd = machine.initrd.as_ref().map(absolute);
        for disk in &mut machine.disks {
            disk.path = absolute(&disk.path);
        }
        if let Some(vsock) = &mut machine.vsock {
            vsock.socket = absolute(&vsock.socket);
        }
        Self {
            version: Self::VERSION,
            machine,
            base: None,
        }
    }

    /// Checks that only root or this user can have written a snapshot. Its description names files of
    /// the host, which are opened with the rights of whoever restores it. Files that are not there are
    /// found by who opens them.
    ///
    /// # Errors
    /// What others can write, and why they can.
    pub fn check_writers(dir: &Path) -> Result<(), String> {
        let files = SNAPSHOT_FILES.map(|name| dir.join(name));
        for path in [dir].into_iter().chain(files.iter().map(PathBuf::as_path)) {
            let Ok(metadata) = path.metadata() else {
                continue;
            };
            if let Some(why) = other_writers(&metadata) {
                return Err(format!("{} {why}", path.display()));
            }
        }
        Ok(())
    }

    /// Reads the description in a snapshot's directory.
    ///
    /// # Errors
    /// The file can't be read, can be written by others, is too long, of another version, or no
    /// description.
    pub fn read(dir: &Path) -> io::Result<Self> {
        use std::io::Read as _;
        let [.., name] = SNAPSHOT_FILES;
        let mut text = Vec::new();
        let file = std::fs::File::open(dir.join(name))?;
        // What is opened may be another one than what was looked at by its path.
        if let Some(why) = other_writers(&file.metadata()?) {
            return Err(io::Error::other(format!("it {why}")));
        }
        file.take(MAX_DESCRIPTION + 1).read_to_end(&mut text)?;
        if text.len() as u64 > MAX_DESCRIPTION {
            return Err(io::Error::other("it is longer than any description"));
        }
        let value: serde_json::Value = serde_json::from_slice(&text)?;
        let version = value.get("version").and_then(serde_json::Value::as_u64);
        if let Some(found) = version.filter(|found| *found != u64::from(Self::VERSION)) {
            let ours = Self::VERSION;
            let why = format!("it is of version {found}, and this slipgate reads version {ours}");
            return Err(io::Error::other(why));
        }
        Ok(serde_json::from_value(value)?)
    }
}

/// Checks that a directory is one in which a daemon may make snapshots: it can write there, and nobody
/// else can put anything in the place of what it makes there. The directories above are not looked at:
/// who can rename in them can put another one in its place, and the operator has named it.
///
/// # Errors
/// What is wrong with it.
pub fn check_snapshot_dir(dir: &Path) -> Result<(), String> {
    let found = dir
        .symlink_metadata()
        .map_err(|e| format!("it can't be used ({e})"))?;
    match other_writers(&found) {
        _ if !found.is_dir() => return Err("it is no directory".into()),
        Some(why) => return Err(format!("it {why}")),
        None => {}
    }
    match access(dir, AccessFlags::W_OK) {
        Ok(()) => Ok(()),
        Err(Errno::EROFS) => Err(
            "its file system is read-only for this process; in a service of systemd, ReadWritePaths= \
             of the unit has to name it"
                .into(),
        ),
        Err(e) => Err(format!("this process can't write to it ({})", e.desc())),
    }
}

/// Why others than root and this user can have written a file of a snapshot; `None`: they can't.
pub(crate) fn other_writers(metadata: &Metadata) -> Option<String> {
    writers(metadata.uid(), metadata.mode(), geteuid().as_raw())
}

fn writers(owner: u32, mode: u32, we: u32) -> Option<String> {
    let mode = mode & 0o7777;
    match owner == 0 || owner == we {
        false => Some(format!("belongs to the user {owner}")),
        true if mode & 0o022 != 0 => Some(format!("can be written by others (mode {mode:04o})")),
        true => None,
    }
}

/// Remedy for a snapshot that others can have written.
pub const OWN_SNAPSHOT: &str = "if you trust what is in it, make it yours: chown -R to you and chmod -R go-w; or restore it as the user who made it";

fn mac_of_text<'de, D: Deserializer<'de>>(from: D) -> Result<[u8; 6], D::Error> {
    let text = String::deserialize(from)?;
    parse_mac("mac", &text, &text).map_err(serde::de::Error::custom)
}

fn mac_as_text<S: serde::Serializer>(mac: &[u8; 6], to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&mac_text(*mac))
}

/// A MAC address as text.
pub(crate) fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
#[path = "machine_test.rs"]
mod tests;
