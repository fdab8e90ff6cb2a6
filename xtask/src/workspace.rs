//! Where things are, and how other programs are run.

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use anyhow::{Context, Result, bail};

/// The checkout that this xtask belongs to.
pub(crate) struct Workspace {
    /// The folder of the workspace's `Cargo.toml`.
    pub(crate) root: PathBuf,
    /// Where the outer cargo puts what it builds: `CARGO_TARGET_DIR`, or `target`.
    pub(crate) target: PathBuf,
}

impl Workspace {
    /// Finds the checkout from cargo's word at run time, or else from where xtask was compiled.
    pub(crate) fn find() -> Result<Self> {
        let manifest = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest
            .parent()
            .filter(|root| root.join("ebpf/programs/Cargo.toml").is_file())
            .with_context(|| {
                format!(
                    "no workspace above {}: run `cargo xtask` inside a checkout",
                    manifest.display()
                )
            })?
            .to_path_buf();
        let target = match env::var_os("CARGO_TARGET_DIR") {
            Some(given) => env::current_dir()?.join(given),
            None => root.join("target"),
        };
        Ok(Self { root, target })
    }

    /// The BPF objects' folder. Always in the checkout: `ebpf/control` embeds them from there.
    pub(crate) fn bpf(&self) -> PathBuf {
        self.root.join("target/bpf")
    }

    /// The built-in guest's folder. Always in the checkout: `cli` embeds it from there.
    pub(crate) fn guest(&self) -> PathBuf {
        self.root.join("target/guest")
    }

    /// Tools that xtask builds for itself.
    pub(crate) fn tools(&self) -> PathBuf {
        self.root.join("target/tools")
    }

    /// Kernels that tests boot, unpacked. Always in the checkout: the tests look there.
    pub(crate) fn kernels(&self) -> PathBuf {
        self.root.join("target/kernels")
    }

    /// The cargo that runs us, in the checkout, without what `cargo run` told xtask about itself.
    pub(crate) fn cargo(&self) -> Command {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // What is embedded has been built before, or the build is to fail.
        cargo.current_dir(&self.root).env("SLIPGATE_NO_STUBS", "1");
        for (name, _) in env::vars_os() {
            let told_to_xtask = [
                "CARGO_PKG_",
                "CARGO_MANIFEST_",
                "CARGO_BIN_",
                "CARGO_CRATE_",
            ];
            if told_to_xtask
                .iter()
                .any(|p| name.to_string_lossy().starts_with(p))
            {
                cargo.env_remove(name);
            }
        }
        cargo
    }
}

/// A folder that goes with its owner.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// A new one in `folder`, which is made if it is not there.
    pub(crate) fn below(folder: &Path) -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Relaxed);
        let path = folder.join(format!("scratch-{}-{number}", process::id()));
        fs::create_dir_all(folder)
            .and_then(|()| fs::create_dir(&path))
            .with_context(|| format!("could not make {}", path.display()))?;
        Ok(Self(path))
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// Says what is being done, on stderr.
pub(crate) fn say(what: impl AsRef<str>) {
    eprintln!("xtask: {}", what.as_ref());
}

/// Runs to the end with our stdout and stderr; an error when it can't start or does not exit with 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("could not start `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", shown(command));
    }
    Ok(())
}

/// Runs to the end and returns stdout; the error carries what it wrote to stderr.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("could not start `{}`", shown(command)))?;
    if !output.status.success() {
        bail!(
            "`{}` failed: {}\n{}",
            shown(command),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The first executable of that name on `PATH`, or in the system folders that a user's `PATH` may lack.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata()
        .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

fn shown(command: &Command) -> String {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect();
    words.join(" ")
}
