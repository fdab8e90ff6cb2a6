//! A Firecracker that is driven by its API: booted, paused, saved, restored on another TAP; and one
//! in its jailer.

use std::{
    env,
    fs::{self, File},
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    Boot, GuestOutput, OtherVmm, image,
    other_vmms::{firecracker_machine, piped},
    output,
};
use crate::{
    error::{Error, Result, Tried},
    netns::NetNs,
};

/// Variable that names the jailer's binary.
pub const JAILER: &str = "SLIPGATE_FIRECRACKER_JAILER";
/// Name of the guest's card.
const CARD: &str = "eth0";
/// Time within which the API answers after the start.
const STARTS_WITHIN: Duration = Duration::from_secs(10);

/// A running Firecracker; it is killed on drop.
#[derive(Debug)]
pub struct Firecracker {
    process: Child,
    folder: tempfile::TempDir,
}

/// A snapshot of a Firecracker's machine.
#[derive(Debug)]
pub struct FirecrackerSnapshot {
    folder: tempfile::TempDir,
}

impl Firecracker {
    /// Boots the guest on a TAP that is there.
    ///
    /// # Errors
    /// A binary is missing, or Firecracker refuses.
    pub fn boot(boot: &Boot<'_>, tap: &str) -> Result<Self> {
        let image = image()?;
        let vmm = Self::start(boot.namespace)?;
        let machine = firecracker_machine(boot, &image, tap);
        vmm.ask("PUT", "boot-source", &machine["boot-source"])?;
        vmm.ask("PUT", "machine-config", &machine["machine-config"])?;
        let card = &machine["network-interfaces"][0];
        vmm.ask("PUT", &format!("network-interfaces/{CARD}"), card)?;
        vmm.ask("PUT", "actions", &json!({"action_type": "InstanceStart"}))?;
        Ok(vmm)
    }

    /// Loads a snapshot, whose guest does not run yet. `tap`: in the place of the TAP that it was
    /// saved with.
    ///
    /// # Errors
    /// The binary is missing, or Firecracker refuses.
    pub fn load(
        snapshot: &FirecrackerSnapshot,
        namespace: &NetNs,
        tap: Option<&str>,
    ) -> Result<Self> {
        let vmm = Self::start(namespace)?;
        let mut load = json!({
            "snapshot_path": snapshot.file("state"),
            "mem_backend": {"backend_type": "File", "backend_path": snapshot.file("memory")},
        });
        if let Some(tap) = tap {
            load["network_overrides"] = json!([{"iface_id": CARD, "host_dev_name": tap}]);
        }
        vmm.ask("PUT", "snapshot/load", &load)?;
        Ok(vmm)
    }

    /// Pauses the guest and saves it.
    ///
    /// # Errors
    /// Firecracker refuses.
    pub fn save(&self) -> Result<FirecrackerSnapshot> {
        let folder = tempfile::tempdir().tried("make a folder for a snapshot")?;
        let snapshot = FirecrackerSnapshot { folder };
        self.ask("PATCH", "vm", &json!({"state": "Paused"}))?;
        let files = json!({
            "snapshot_path": snapshot.file("state"),
            "mem_file_path": snapshot.file("memory"),
        });
        self.ask("PUT", "snapshot/create", &files)?;
        Ok(snapshot)
    }

    /// Lets the guest run on.
    ///
    /// # Errors
    /// Firecracker refuses.
    pub fn resume(&self) -> Result<()> {
        self.ask("PATCH", "vm", &json!({"state": "Resumed"}))
    }

    /// Returns the output of the guest and Firecracker so far.
    pub fn console(&self) -> String {
        let text = fs::read(self.folder.path().join("console"));
        String::from_utf8_lossy(&text.unwrap_or_default()).into_owned()
    }

    fn start(namespace: &NetNs) -> Result<Self> {
        let folder = tempfile::tempdir().tried("make a folder for Firecracker")?;
        let console = folder.path().join("console");
        let console = File::create(&console).tried("make a file for the console")?;
        let both = console.try_clone().tried("copy a descriptor")?;
        let mut command = Command::new(OtherVmm::Firecracker.binary()?);
        command
            .arg("--enable-pci")
            .arg("--api-sock")
            .arg(folder.path().join("api"))
            .stdin(Stdio::null())
            .stdout(console)
            .stderr(both);
        let process = namespace.spawn(command)?;
        let vmm = Self { process, folder };
        let until = Instant::now() + STARTS_WITHIN;
        loop {
            match vmm.ask("GET", "", &Value::Null) {
                Err(error) if Instant::now() >= until => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
                Ok(()) => return Ok(vmm),
            }
        }
    }

    /// Sends a request, by curl. An answer that is no success is an error.
    fn ask(&self, method: &str, path: &str, body: &Value) -> Result<()> {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--fail-with-body"])
            .args(["--max-time", "30", "--request", method, "--unix-socket"])
            .arg(self.folder.path().join("api"))
            .arg(format!("http://localhost/{path}"));
        if !body.is_null() {
            curl.args(["--header", "content-type: application/json", "--data"])
                .arg(body.to_string());
        }
        let answer = curl.output().tried("run curl")?;
        match answer.status.success() {
            true => Ok(()),
            false => Err(Error::unexpected(format!(
                "{method} /{path}: {}{}; console: {}",
                String::from_utf8_lossy(&answer.stdout),
                String::from_utf8_lossy(&answer.stderr),
                self.console()
            ))),
        }
    }
}

impl Drop for Firecracker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl FirecrackerSnapshot {
    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Returns the jailer's path, if Firecracker can be started by it.
///
/// # Errors
/// The variable is not set or names no file, or Firecracker needs libraries, which the jail lacks.
pub fn jailer() -> Result<PathBuf> {
    let Some(path) = env::var_os(JAILER).map(PathBuf::from) else {
        let why = format!("the jailer: set {JAILER} to its binary");
        return Err(Error::Missing(why));
    };
    let binary = OtherVmm::Firecracker.binary()?;
    let bytes = fs::read(&binary).tried(format!("read {}", binary.display()))?;
    let loader: &[u8] = b"/ld-linux";
    // In the first page, where the program's interpreter is named.
    let first = &bytes[..bytes.len().min(4096)];
    match (
        path.is_file(),
        first.windows(loader.len()).any(|w| w == loader),
    ) {
        (false, _) => Err(Error::Missing(format!("{JAILER}: there is no such file"))),
        (true, true) => Err(Error::Missing(
            "a Firecracker that is linked statically: the jail has no libraries".to_owned(),
        )),
        (true, false) => Ok(path),
    }
}

/// Boots the guest in the jailer, as this user, and waits for its end. The TAP is in the namespace,
/// and is that user's.
///
/// # Errors
/// A binary or the guest's image is missing, or the jailer can't be started.
pub fn run_jailed(boot: &Boot<'_>, tap: &str, user: u32) -> Result<GuestOutput> {
    let (jailer, binary) = (jailer()?, OtherVmm::Firecracker.binary()?);
    let base = tempfile::tempdir().tried("make a folder for the jail")?;
    let name = binary.file_name().unwrap_or_default();
    let root = base.path().join(name).join("guest/root");
    fs::create_dir_all(&root).tried("make the jail's root")?;
    let machine = firecracker_machine(boot, Path::new("/kernel"), tap);
    let copied = fs::copy(image()?, root.join("kernel")).map(drop);
    copied.tried("copy the guest into the jail")?;
    fs::write(root.join("machine.json"), machine.to_string()).tried("write into the jail")?;
    for file in ["kernel", "machine.json"] {
        chown(root.join(file), Some(user), Some(user)).tried("give a file to the jail's user")?;
    }
    let mut command = piped(&jailer);
    command
        .args(["--id", "guest", "--exec-file"])
        .arg(&binary)
        .args(["--uid", &user.to_string(), "--gid", &user.to_string()])
        .arg("--chroot-base-dir")
        .arg(base.path())
        .arg("--netns")
        .arg(boot.namespace.path())
        .args(["--", "--no-api", "--enable-pci"])
        .args(["--config-file", "machine.json"]);
    let child = command.spawn().tried("start the jailer")?;
    output::follow(child, boot.timeout)
}
