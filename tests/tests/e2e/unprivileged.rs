//! A user without any privilege, in a world.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;
use slipgate_testbed::{OrdinaryUser, SocketGuest, World};

/// A world, and a place in it where the user has this executable, besides what is theirs anyway.
pub(super) struct Place {
    pub(super) world: World,
    pub(super) user: OrdinaryUser,
}

impl Place {
    pub(super) fn new() -> Self {
        let user = OrdinaryUser::new().unwrap();
        let here = std::env::current_exe().unwrap();
        user.install(&here, "tests").unwrap();
        Self {
            world: World::new().unwrap(),
            user,
        }
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.user.file(name)
    }

    pub(super) fn slipgate(&self, args: &[&str]) -> Command {
        self.user.slipgate(args)
    }

    pub(super) fn output(&self, args: &[&str]) -> String {
        let output: Output = self.user.run(&self.world.host, args).unwrap();
        String::from_utf8(output.stdout).unwrap()
    }
}

/// The text of a flow log, and what it has of flows that have ended.
pub(super) fn flow_ends(log: &Path) -> (String, Vec<Value>) {
    let records = fs::read_to_string(log).unwrap();
    let ends = records
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .filter(|record: &Value| record["event"] == "flow_end")
        .collect();
    (records, ends)
}

/// `slipgate attach --socket` or `--vhost-user`, which is ready; killed on drop.
pub(super) struct Attached {
    pub(super) child: Child,
    pub(super) socket: PathBuf,
}

impl Attached {
    /// Serves `web.sock` by these further flags.
    pub(super) fn start(place: &Place, flags: &[&str]) -> Self {
        Self::start_by("--socket", place, flags)
    }

    /// Serves `web.sock`, which the flag `by` names.
    pub(super) fn start_by(by: &str, place: &Place, flags: &[&str]) -> Self {
        Self::start_as("web", by, place, flags)
    }

    /// The same with this name in the place of `web`.
    pub(super) fn start_as(name: &str, by: &str, place: &Place, flags: &[&str]) -> Self {
        let socket = place.file(&format!("run/{name}.sock"));
        let mut args = vec!["attach", by, socket.to_str().unwrap()];
        args.extend(flags);
        let mut command = place.slipgate(&args);
        command.stdout(Stdio::piped()).stdin(Stdio::null());
        let mut child = place.world.host.spawn(command).unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        let ready = format!("slipgate: ready: {name} at {}\n", socket.display());
        assert_eq!(line, ready);
        Self { child, socket }
    }

    pub(super) fn guest(&self) -> SocketGuest {
        SocketGuest::connect(&self.socket).unwrap()
    }

    /// Waits for the end, and returns the exit status.
    pub(super) fn ended(mut self) -> Option<i32> {
        let status = self.child.wait().unwrap();
        assert!(!self.socket.exists());
        status.code()
    }

    /// Waits for the end. Returns the exit status, and checks that nothing is left.
    pub(super) fn end(self, place: &Place) -> Option<i32> {
        let code = self.ended();
        let left = fs::read_dir(place.file("run/slipgate")).unwrap().count();
        assert_eq!(left, 0, "tables, locks and sockets are removed");
        code
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
