//! Paths of the workspace, and the running of other programs.

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
    /// Directory of the workspace's `Cargo.toml`.
    pub(crate) root: PathBuf,
    /// Target directory of the outer cargo: `CARGO_TARGET_DIR`, or `target`.
    pub(crate) target: PathBuf,
}

impl Workspace {
    /// Finds the checkout by cargo's environment at run time, or else by the path at which xtask
    /// was compiled.
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

    /// Returns the directory of the BPF objects. It is always in the checkout: `ebpf/control`
    /// embeds them from there.
    pub(crate) fn bpf(&self) -> PathBuf {
        self.root.join("target/bpf")
    }

    /// Returns the directory of the built-in guest. It is always in the checkout: `cli` embeds it
    /// from there.
    pub(crate) fn guest(&self) -> PathBuf {
        self.root.join("target/guest")
    }

    /// Returns the directory of what packages are made of, besides `packaging/`. It is always in
    /// the checkout, because `cli/Cargo.toml` names it.
    pub(crate) fn package(&self) -> PathBuf {
        self.root.join("target/package")
    }

    /// Returns the directory of the tools that xtask builds for itself.
    pub(crate) fn tools(&self) -> PathBuf {
        self.root.join("target/tools")
    }

    /// Returns the directory of the unpacked kernels that tests boot. It is always in the checkout,
    /// where the tests look for it.
    pub(crate) fn kernels(&self) -> PathBuf {
        self.root.join("target/kernels")
    }

    /// Returns the compiler that the workspace is built with, as a command in the checkout.
    pub(crate) fn rustc(&self) -> Command {
        let mut rustc = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        rustc.current_dir(&self.root);
        rustc
    }

    /// Returns the outer cargo as a command in the checkout, without the variables that `cargo run`
    /// set for xtask.
    pub(crate) fn cargo(&self) -> Command {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // What is embedded has been built before, or the build is to fail.
        cargo.current_dir(&self.root).env("SLIPGATE_NO_STUBS", "1");
        for (name, _) in env::vars_os() {
            if is_told_to_xtask(&name) {
                cargo.env_remove(name);
            }
        }
        cargo
    }
}

/// Whether `cargo run` set this variable of the environment for xtask.
pub(crate) fn is_told_to_xtask(name: &OsStr) -> bool {
    const PREFIXES: [&str; 4] = [
        "CARGO_PKG_",
        "CARGO_MANIFEST_",
        "CARGO_BIN_",
        "CARGO_CRATE_",
    ];
    let name = name.to_string_lossy();
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// A temporary directory, removed when this is dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Creates a temporary directory in `folder`, which is created too if it does not exist.
    pub(crate) fn below(folder: &Path) -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Relaxed);
        let path = folder.join(format!("scratch-{}-{number}", process::id()));
        fs::create_dir_all(folder)
            .and_then(|()| fs::create_dir(&path))
            .with_context(|| format!("could not make {}", path.display()))?;
        Ok(Self(path))
    }

    /// Returns the path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// Prints a message about the progress to stderr.
pub(crate) fn say(what: impl AsRef<str>) {
    eprintln!("xtask: {}", what.as_ref());
}

/// Runs a command to its end, with this process's stdout and stderr.
///
/// # Errors
/// It cannot be started, or does not exit with 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("could not start `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", shown(command));
    }
    Ok(())
}

/// Runs a command to its end and returns its stdout.
///
/// # Errors
/// It cannot be started, or does not exit with 0; the error has its stderr.
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

/// Returns the first executable of that name on `PATH`, or in the system directories that a user's
/// `PATH` may lack.
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
