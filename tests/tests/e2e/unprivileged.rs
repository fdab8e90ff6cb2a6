//! A user without any privilege, and what is theirs.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::Command,
};

use slipgate_testbed::{World, slipgate::binary};
use tempfile::TempDir;

/// A user with nothing.
const USER: u32 = 61_234;

/// A place where the user has the binary, this executable, a device for TAPs and a run-time directory
/// (`run`).
pub(super) struct Place {
    pub(super) world: World,
    dir: TempDir,
}

impl Place {
    pub(super) fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let open = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        open(dir.path(), 0o755);
        let here = std::env::current_exe().unwrap();
        for (from, to) in [(binary().unwrap(), "slipgate"), (here, "tests")] {
            let to = dir.path().join(to);
            fs::copy(from, &to).unwrap();
            open(&to, 0o755);
        }
        let run = dir.path().join("run");
        fs::create_dir(&run).unwrap();
        open(&run, 0o700);
        chown(&run, Some(USER), Some(USER)).unwrap();
        fs::create_dir(dir.path().join("devices")).unwrap();
        Self {
            world: World::new().unwrap(),
            dir,
        }
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A slipgate command of the user's. Most distributions let everybody open /dev/net/tun; here it
    /// is made so in a mount namespace.
    pub(super) fn slipgate(&self, args: &[&str]) -> Command {
        const AS_USER: &str = "mount -t tmpfs none /dev/net && mknod -m 666 /dev/net/tun c 10 200 \
            && exec setpriv --reuid \"$1\" --regid \"$1\" --clear-groups --no-new-privs \
            --bounding-set=-all -- \"${@:2}\"";
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "bash", "-c", AS_USER, "bash", &USER.to_string()])
            .arg(self.file("slipgate"))
            .args(args)
            .env("XDG_RUNTIME_DIR", self.file("run"));
        command
    }

    /// A slipgate command of the user's, who may open /dev/kvm.
    pub(super) fn slipgate_with_kvm(&self, args: &[&str]) -> Command {
        const OPENED: &str = "mount -t tmpfs none \"$1\" && mknod -m 666 \"$1/kvm\" c 10 232 \
            && mount --bind \"$1/kvm\" /dev/kvm && exec \"${@:2}\"";
        let inner = self.slipgate(args);
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "bash", "-c", OPENED, "bash"])
            .arg(self.file("devices"))
            .arg(inner.get_program())
            .args(inner.get_args())
            .env("XDG_RUNTIME_DIR", self.file("run"));
        command
    }

    pub(super) fn output(&self, args: &[&str]) -> String {
        let output = self.world.host.output_with(self.slipgate(args), &[3]);
        String::from_utf8(output.unwrap().stdout).unwrap()
    }
}
