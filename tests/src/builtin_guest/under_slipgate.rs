//! `slipgate run` as the built-in guest's VMM.

use serde_json::Value;

use super::{Boot, GuestOutput};
use crate::{error::Result, microvm::MicroVm, pins::PinDir};

/// A guest to be run by `slipgate run`.
#[derive(Clone, Debug)]
pub struct SlipgateRun<'a> {
    /// Guest to boot, and its namespace.
    pub boot: Boot<'a>,
    /// More flags: the uplink, rules.
    pub flags: &'a [&'a str],
}

impl SlipgateRun<'_> {
    /// Boots the guest and waits for its end. Returns its output, and the contents of `--report`.
    ///
    /// # Errors
    /// slipgate cannot be started, or the guest does not end in time.
    pub fn run(&self) -> Result<(GuestOutput, Value)> {
        let (cpus, memory) = (self.boot.cpus.to_string(), self.boot.memory_mib.to_string());
        let mut args = vec!["--cmdline", self.boot.command_line, "--cpus", &cpus];
        args.extend(["--queues", &cpus, "--memory", &memory]);
        args.extend(self.flags);
        let vm = MicroVm::start(self.boot.namespace, &PinDir::new()?, &args)?;
        let end = vm.finish(self.boot.timeout)?;
        let objects = |line: &&crate::Line| line.text.starts_with('{');
        let output = GuestOutput {
            to_first_line: end.lines.iter().find(objects).map(|line| line.after),
            console: end.lines.into_iter().map(|line| line.text).collect(),
            stderr: end.stderr,
            status: Some(end.status),
            took: end.after,
        };
        Ok((output, end.report))
    }
}
