//! The machine that `slipgate run` runs, and the NAT of its one VM.
use std::path::PathBuf;

use serde::Serialize;

use super::Config;

/// Everything `run` was told, checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunConfig {
    /// The machine.
    pub machine: MachineSpec,
    /// Of one VM, whose TAP is not there yet.
    pub nat: Config,
    /// The file to write how it ended to.
    pub report: Option<PathBuf>,
}

/// The machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct MachineSpec {
    /// The kernel's image; `None`: the built-in guest.
    pub kernel: Option<PathBuf>,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line, or the built-in guest's work.
    pub cmdline: String,
    /// Virtual CPUs.
    pub cpus: u8,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Queue pairs of its network card.
    pub queues: u16,
    /// The guest's MAC address.
    #[serde(serialize_with = "mac_as_text")]
    pub mac: [u8; 6],
    /// The TAP's name, or a pattern with `%d` for the kernel to choose.
    pub tap: String,
    /// Whether the VM is called as its TAP.
    #[serde(skip)]
    pub named_by_tap: bool,
}

impl RunConfig {
    /// Takes in the name that the TAP has got.
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
