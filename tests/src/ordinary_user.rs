//! A user without any privilege, what is theirs, and slipgate as they start it.
//!
//! Root makes one up. Who is no root, and has capabilities over namespaces of their own only, is one: what
//! they start has none of these.

use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
};

use tempfile::TempDir;

use crate::{
    builds::{binary, refusals_of},
    error::{Error, Result, Tried},
    netns::NetNs,
};

/// A user with nothing.
const USER: u32 = 61_234;

/// Becomes that user ($1), who is root. Most distributions let everybody open /dev/net/tun; here it is made
/// so in a mount namespace.
const AS_USER: &str = "mount -t tmpfs none /dev/net && mknod -m 666 /dev/net/tun c 10 200 \
    && ulimit -n \"${MOST_FILES:-$(ulimit -Hn)}\" && exec setpriv --reuid \"$1\" --regid \"$1\" --clear-groups --no-new-privs \
    --bounding-set=-all -- \"${@:2}\"";

/// Becomes a user who may open /dev/kvm, which is in the directory $1 then.
const OPENED: &str = "mount -t tmpfs none \"$1\" && mknod -m 666 \"$1/kvm\" c 10 232 \
    && mount --bind \"$1/kvm\" /dev/kvm && exec \"${@:2}\"";

/// Gives up what this user has over namespaces of their own; $1 is for who becomes another.
const WITHOUT_CAPABILITIES: &str = "ulimit -n \"${MOST_FILES:-$(ulimit -Hn)}\" && exec setpriv --no-new-privs \
    --inh-caps=-all --ambient-caps=-all --bounding-set=-all -- \"${@:2}\"";

/// A directory in which the user has the binary, a run-time directory (`run`) and nothing else.
#[derive(Clone, Debug)]
pub struct OrdinaryUser {
    dir: Arc<TempDir>,
    /// Descriptors that each process of theirs may have; `None`: as many as of the test.
    most_files: Option<u64>,
}

impl OrdinaryUser {
    /// Makes the directory; it goes with the last copy of this.
    ///
    /// # Errors
    /// It can't be made, or there is no binary to copy.
    pub fn new() -> Result<Self> {
        let dir = TempDir::new().tried("make a user's directory")?;
        let user = Self {
            dir: Arc::new(dir),
            most_files: None,
        };
        permit(user.dir.path(), 0o755)?;
        user.install(&binary()?, "slipgate")?;
        let run = user.file("run");
        fs::create_dir(&run).tried("make a run-time directory")?;
        permit(&run, 0o700)?;
        if is_root() {
            chown(&run, Some(USER), Some(USER)).tried("give a run-time directory to the user")?;
        }
        fs::create_dir(user.file("devices")).tried("make a directory for devices")?;
        Ok(user)
    }

    /// The same user, whose processes may have so many descriptors each.
    pub fn limited_to(mut self, most_files: u64) -> Self {
        self.most_files = Some(most_files);
        self
    }

    /// Returns the path of a file of theirs.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Copies a program to where they may execute it.
    ///
    /// # Errors
    /// It can't be copied.
    pub fn install(&self, program: &Path, name: &str) -> Result<()> {
        let to = self.file(name);
        // By a process: a child that another test forks would have this one's descriptor for writing
        // until its `exec`, and a program that somebody may write is not run (ETXTBSY).
        let copied = Command::new("cp").arg(program).arg(&to).status();
        let copied = copied.tried("copy a program")?;
        if !copied.success() {
            return Err(Error::unexpected(format!(
                "cp {} {}: {copied}",
                program.display(),
                to.display()
            )));
        }
        permit(&to, 0o755)
    }

    /// A slipgate command of theirs, who may open /dev/net/tun.
    pub fn slipgate(&self, args: &[&str]) -> Command {
        self.command(&self.file("slipgate"), args)
    }

    /// A slipgate command of theirs, who may open /dev/kvm too.
    pub fn slipgate_with_kvm(&self, args: &[&str]) -> Command {
        self.command_with_kvm(&self.file("slipgate"), args)
    }

    /// The same of another program.
    pub fn command(&self, program: &Path, args: &[impl AsRef<OsStr>]) -> Command {
        let words = ["bash", "-c"];
        let mut command = match is_root() {
            true => {
                let mut command = Command::new("unshare");
                command.arg("--mount").args(words).arg(AS_USER);
                command
            }
            false => {
                let mut command = Command::new(words[0]);
                command.arg(words[1]).arg(WITHOUT_CAPABILITIES);
                command
            }
        };
        command
            .args(["bash", &USER.to_string()])
            .arg(program)
            .args(args)
            .env("XDG_RUNTIME_DIR", self.file("run"));
        if let Some(most) = self.most_files {
            command.env("MOST_FILES", most.to_string());
        }
        command
    }

    /// The same with /dev/kvm, which root opens to everybody in a mount namespace.
    pub fn command_with_kvm(&self, program: &Path, args: &[impl AsRef<OsStr>]) -> Command {
        let inner = self.command(program, args);
        if !is_root() {
            return inner;
        }
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "bash", "-c", OPENED, "bash"])
            .arg(self.file("devices"))
            .arg(inner.get_program())
            .args(inner.get_args());
        for (name, value) in inner.get_envs() {
            value.map(|value| command.env(name, value));
        }
        command
    }

    /// The groups whose members may ping where this user may, as `net.ipv4.ping_group_range` has them: all
    /// of them, as far as they have a number here.
    pub fn ping_groups(&self) -> String {
        // SAFETY: it takes nothing and can't fail.
        match (is_root(), unsafe { libc::getegid() }) {
            (true, _) => "0 2147483647".to_owned(),
            (false, own) => format!("{own} {own}"),
        }
    }

    /// Runs a slipgate command of theirs in a network namespace. `why` may say no.
    ///
    /// # Errors
    /// It can't be started, or fails.
    pub fn run(&self, ns: &NetNs, args: &[&str]) -> Result<Output> {
        ns.output_with(self.slipgate(args), refusals_of(args))
    }

    /// Whether slipgate has left no table, lock or socket of theirs.
    pub fn has_nothing_left(&self) -> bool {
        let entries = fs::read_dir(self.file("run/slipgate"));
        entries.map_or(true, |mut entries| entries.next().is_none())
    }
}

fn is_root() -> bool {
    // SAFETY: it takes nothing and can't fail.
    unsafe { libc::geteuid() == 0 }
}

fn permit(path: &Path, mode: u32) -> Result<()> {
    let permissions = fs::Permissions::from_mode(mode);
    fs::set_permissions(path, permissions).tried("permit a file to the user")
}
