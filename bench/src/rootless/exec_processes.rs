//! Processes of a running `slipgate exec`: the command, and the engine.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use crate::{contender::NatProcess, process_tree::descendants};

const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Processes that `slipgate exec` has started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Started {
    pub(super) engine: u32,
    /// The command, whose network namespace is the guest.
    pub(super) command: u32,
}

impl Started {
    /// Waits until both run. The command is told by its program, the engine by being in the network
    /// namespace of the first process.
    ///
    /// # Errors
    /// The first process ends, or they don't start in time.
    pub(super) fn of(process: &mut NatProcess, program: &str) -> Result<Started> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            process.check()?;
            let children = descendants(process.pid());
            let command = children.iter().find(|pid| name_of(**pid) == program);
            let host = namespace_of(process.pid());
            let in_host = |pid: &&u32| host.is_some() && namespace_of(**pid) == host;
            let engine = children
                .iter()
                .filter(|pid| name_of(**pid) != program)
                .find(in_host);
            if let (Some(&engine), Some(&command)) = (engine, command) {
                return Ok(Started { engine, command });
            }
            if Instant::now() > deadline {
                bail!("`slipgate exec` has no engine and command in time: {children:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn name_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm"));
    name.unwrap_or_default().trim().to_owned()
}

fn namespace_of(pid: u32) -> Option<u64> {
    let namespace = fs::metadata(format!("/proc/{pid}/ns/net")).ok()?;
    Some(namespace.ino())
}
