//! Firecracker and Cloud Hypervisor as VMMs of the built-in guest, on a TAP with one queue. Neither
//! is in a distribution: a variable of the environment names the binary.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use super::{Boot, GuestOutput, image, output};
use crate::error::{Error, Result, Tried};

/// MAC of the guest's card. Cloud Hypervisor would choose a random one at each boot.
const MAC: &str = "02:00:00:00:00:15";
/// Mounts /sys anew, for the network namespace in which it runs: Cloud Hypervisor reads there whether
/// the TAP has several queues. Then it runs its arguments.
const WITH_SYS: &str = "mount -t sysfs sysfs /sys && exec \"$@\"";

/// A VMM of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherVmm {
    /// Firecracker, 1.13 or later: the guest needs its `--enable-pci`.
    Firecracker,
    /// Cloud Hypervisor, the pinned release.
    CloudHypervisor,
}

impl OtherVmm {
    /// Returns the variable that names the binary.
    pub fn variable(self) -> &'static str {
        match self {
            OtherVmm::Firecracker => "SLIPGATE_FIRECRACKER",
            OtherVmm::CloudHypervisor => "SLIPGATE_CLOUD_HYPERVISOR",
        }
    }

    /// Returns whether somebody has named the binary. Then one that can't be used is a failure.
    pub fn is_named(self) -> bool {
        env::var_os(self.variable()).is_some()
    }

    /// Returns the path of the binary.
    ///
    /// # Errors
    /// The variable is not set, or names no file.
    pub fn binary(self) -> Result<PathBuf> {
        let variable = self.variable();
        let Some(path) = env::var_os(variable).map(PathBuf::from) else {
            let name = format!("{self:?}: set {variable} to its binary");
            return Err(Error::Missing(name));
        };
        match path.is_file() {
            true => Ok(path),
            false => Err(Error::Missing(format!(
                "{variable}={}: there is no such file",
                path.display()
            ))),
        }
    }

    /// Boots the guest on a TAP that is there, and waits for its end.
    ///
    /// # Errors
    /// The binary or the guest's image is missing, or the VMM can't be started.
    pub fn run(self, boot: &Boot<'_>, tap: &str) -> Result<GuestOutput> {
        let folder = tempfile::tempdir().tried("make a folder for the VMM's configuration")?;
        let (binary, image) = (self.binary()?, image()?);
        let config = folder.path().join("machine.json");
        let machine = firecracker_machine(boot, &image, tap).to_string();
        fs::write(&config, machine).tried(format!("write {}", config.display()))?;
        let command = match self {
            OtherVmm::Firecracker => firecracker(&binary, &config),
            OtherVmm::CloudHypervisor => cloud_hypervisor(&binary, boot, &image, tap),
        };
        let child = boot.namespace.spawn(command)?;
        output::follow(child, boot.timeout)
    }
}

fn firecracker(binary: &Path, config: &Path) -> Command {
    let mut command = piped(binary);
    command
        .args(["--no-api", "--enable-pci", "--config-file"])
        .arg(config);
    command
}

/// Returns the content of Firecracker's configuration file.
pub(super) fn firecracker_machine(boot: &Boot<'_>, image: &Path, tap: &str) -> Value {
    json!({
        "boot-source": {"kernel_image_path": image, "boot_args": boot.command_line},
        "drives": [],
        "machine-config": {"vcpu_count": boot.cpus, "mem_size_mib": boot.memory_mib},
        "network-interfaces": [{"iface_id": "eth0", "host_dev_name": tap, "guest_mac": MAC}],
    })
}

fn cloud_hypervisor(binary: &Path, boot: &Boot<'_>, image: &Path, tap: &str) -> Command {
    let mut command = piped("unshare".as_ref());
    command
        .args(["--mount", "sh", "-c", WITH_SYS, "sh"])
        .arg(binary)
        .arg("--kernel")
        .arg(image)
        .args(["--cmdline", boot.command_line])
        .args(["--cpus", &format!("boot={}", boot.cpus)])
        .args(["--memory", &format!("size={}M", boot.memory_mib)])
        .args(["--net", &format!("tap={tap},mac={MAC}")])
        .args(["--serial", "tty", "--console", "off"]);
    command
}

/// A command whose output [`output::follow`] reads.
pub(super) fn piped(program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[cfg(test)]
#[path = "other_vmms_test.rs"]
mod tests;
