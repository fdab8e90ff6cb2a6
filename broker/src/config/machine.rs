//! The machine that `slipgate run` runs, and the NAT of its one VM.
use std::path::PathBuf;

use serde::Serialize;

use super::Config;

/// Checked configuration of `slipgate run`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunConfig {
    /// The machine to create.
    pub machine: MachineSpec,
    /// NAT for one VM, whose TAP does not exist yet.
    pub nat: Config,
    /// File to which the report of the run is written.
    pub report: Option<PathBuf>,
}

/// Virtual machine that `slipgate run` creates.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct MachineSpec {
    /// The kernel's image; `None`: the built-in guest.
    pub kernel: Option<PathBuf>,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Disks, in the order in which the guest finds them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskSpec>,
    /// Connections between guest and host; `None` without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockSpec>,
    /// The kernel's command line, or the built-in guest's work.
    pub cmdline: String,
    /// Number of virtual CPUs.
    pub cpus: u8,
    /// Memory of the guest, MiB.
    pub memory_mib: u64,
    /// Number of queue pairs of its network card.
    pub queues: u16,
    /// The guest's MAC address.
    #[serde(serialize_with = "mac_as_text")]
    pub mac: [u8; 6],
    /// The TAP's name, or a pattern with `%d` for the kernel to choose. Empty: there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tap: String,
    /// Whether the VM takes the name of its TAP.
    #[serde(skip)]
    pub named_by_tap: bool,
}

/// Most disks of a machine.
pub const MAX_DISKS: usize = 8;

/// Disk of a virtual machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DiskSpec {
    /// Raw image or block device.
    pub path: PathBuf,
    /// Whether the guest's writes are refused.
    pub read_only: bool,
}

/// The vsock device of a virtual machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct VsockSpec {
    /// The guest's address.
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

fn mac_as_text<S: serde::Serializer>(mac: &[u8; 6], to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&mac.map(|byte| format!("{byte:02x}")).join(":"))
}
