//! slipgate in hybrid mode, with its quotas out of the way.

use std::process::Command;

use anyhow::{Context, Result, bail};
use slipgate_testbed::{Guest, PinDir, World, slipgate, world::UPLINK};

use super::{Contender, Stand, guest, process, world};
use crate::conditions::Pinning;

/// Quotas are policy: none of them may be what is measured.
const QUOTAS: [&str; 6] = [
    "--flow-table",
    "262144",
    "--max-flows",
    "262144",
    "--new-flows-per-second",
    "100000000",
];

pub(super) struct Slipgate;

impl Contender for Slipgate {
    fn name(&self) -> &'static str {
        "slipgate"
    }

    fn version(&self) -> Result<String> {
        let output = Command::new(slipgate::binary()?)
            .arg("--version")
            .output()
            .context("run `slipgate --version`")?;
        if !output.status.success() {
            bail!("`slipgate --version` ended with {}", output.status);
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn set_up(&self, pinning: Pinning) -> Result<Stand> {
        let world = World::with(world(false))?;
        let guest = Guest::new(&world, guest(pinning))?;
        let pins = PinDir::new()?;
        let mut args = vec!["--tap", guest.tap(), "--uplink", UPLINK];
        args.extend(["--mode", "hybrid", "--log", "warn"]);
        args.extend(QUOTAS);
        let mut slipgate = slipgate::Slipgate::attach(&world.host, &pins, &args)?;
        process::pin(slipgate.broker_pid(), pinning.middle)?;
        let engine = slipgate.engine_pid().context("slipgate has no engine")?;
        process::pin(engine, pinning.middle)?;
        Ok(Stand::in_kernel(world, guest).under_slipgate(slipgate, engine))
    }
}
